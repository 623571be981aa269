"""What is read in the last words of programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.why.headline import find_headline, parse_missing_command

TABLE = Path(__file__).with_name("last_words.txt")


def rows() -> list[Any]:
    found = []
    for block in TABLE.read_text(encoding="utf-8").split("\n=== ")[1:]:
        head, headline, words = block.split("\n", 2)
        name, end, judged = head.split(" | ")
        how, number = end.split()
        cls, confidence = judged.split()
        output = words.replace("␛", "\x1b").replace("␍", "\r")
        found.append(
            pytest.param(output, how, int(number), headline.removeprefix(">").strip(), cls, confidence, id=name)
        )
    return found


@pytest.mark.parametrize(("output", "how", "number", "headline", "cls", "confidence"), rows())
def test_the_cause_is_read_in_the_last_words(
    output: str, how: str, number: int, headline: str, cls: str, confidence: str
) -> None:
    end = {"exit": {"exit_code": number}, "signal": {"signal": number}}[how]

    found = find_headline(output, **end)

    assert (found.text, found.cls.value, found.confidence.value) == (headline, cls, confidence)


@pytest.mark.parametrize(
    ("headline", "name"),
    [
        ("run.sh: line 2: nvcc: command not found", "nvcc"),
        ("sh: 1: torchrun: not found", "torchrun"),
        ("bash: line 1: exec: nope: not found", "nope"),
        ("env: ‘python’: No such file or directory", "python"),
        ("timeout: failed to run command ‘nope’: No such file or directory", "nope"),
        ("clusterctl: cannot run `nope`: no such program on PATH", "nope"),
        ("exit code 127, a command was not found", None),
    ],
)
def test_the_command_that_was_not_found_is_named(headline: str, name: str | None) -> None:
    assert parse_missing_command(headline) == name
