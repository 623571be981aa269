"""Words after `exec --` that only a shell would understand."""

from __future__ import annotations

import pytest

from clusterctl.cli.commands.exec import needs_shell


@pytest.mark.parametrize(
    "words",
    [
        ["echo a; echo b"],
        ["ls -l"],
        ["ls", "|", "wc"],
        ["cd", "/tmp"],
        ["cd /tmp && ls"],
        ["FOO=1", "env"],
        ["ls", "*.yaml"],
        ["ls", "~/x"],
        ["echo", "$HOME"],
        ["make", ">", "log"],
        ["source", "venv/bin/activate"],
    ],
    ids=" ".join,
)
def test_words_for_a_shell_are_told(words: list[str]) -> None:
    assert needs_shell(words)


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["ls", "/a"],
        ["bash", "-c", "a; b"],
        ["/bin/sh", "-c", "a | b"],
        ["python3", "-c", "x = 2 * 3"],
        ["test", "-e", "a b"],
    ],
    ids=" ".join,
)
def test_other_words_are_not(words: list[str]) -> None:
    assert not needs_shell(words)
