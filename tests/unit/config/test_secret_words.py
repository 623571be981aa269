"""Arguments of the job that look like a secret are doubted, and hidden where a run is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.secret_redaction import redact_text, redact_words
from clusterctl.config.spec import JobSpec
from clusterctl.run.record.run_origin import format_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

HF = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "x"], ["--token", "***"]),
        (["--hf-token=x"], ["--hf-token=***"]),
        (["--api_key", "x", "y"], ["--api_key", "***", "y"]),
        (["--wandb.api_key=x"], ["--wandb.api_key=***"]),
        (["logger.token=x", "lr=0.1"], ["logger.token=***", "lr=0.1"]),
        (["--db-password", "x"], ["--db-password", "***"]),
        (["WANDB_API_KEY=x"], ["WANDB_API_KEY=***"]),
        (["--auth", HF], ["--auth", "***"]),
        ([f"https://user:{HF}@host"], ["https://user:***@host"]),
        (["--token"], ["--token"]),
        (["--token", "--epochs", "3"], ["--token", "--epochs", "3"]),
        (["--max-tokens", "8"], ["--max-tokens", "8"]),
        (["--tokenizer", "gpt2"], ["--tokenizer", "gpt2"]),
        (["--pad-token-id", "0"], ["--pad-token-id", "0"]),
        (["--eos-token", "</s>"], ["--eos-token", "</s>"]),
        (["--sort-key=size"], ["--sort-key=size"]),
        (["sk-learn", "--lr", "-1"], ["sk-learn", "--lr", "-1"]),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_words_that_look_like_a_secret_are_hidden(words: list[str], shown: list[str]) -> None:
    assert redact_words(words) == shown


def test_a_text_of_a_shell_keeps_its_blanks() -> None:
    assert redact_text("a  --token x\n b") == "a  --token ***\n b"


@pytest.mark.parametrize(
    "job",
    [
        JobSpec(script="t.py", args=("--token", "hunter2")),
        JobSpec(module="m", args=("--token=hunter2",)),
        JobSpec(command="python t.py --token hunter2"),
        JobSpec(command=("python", "t.py"), args=("--token", "hunter2")),
    ],
    ids=["script", "module", "shell", "words"],
)
def test_the_command_of_a_run_is_shown_without_secrets(job: JobSpec) -> None:
    assert "hunter2" not in format_command(job)
    assert "***" in format_command(job)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--hf-token", "x"], "--hf-token"),
        (["a", "token=x"], "token=***"),
        ([HF], "***"),
        (["--max-tokens", "8"], None),
    ],
    ids=["option", "assigned", "value", "none"],
)
def test_an_argument_that_looks_like_a_secret_is_warned_of(
    parse_text: Callable[..., LoadedClusterFile], args: list[str], name: str | None
) -> None:
    text = f"version: 1\nhosts: a\njob: {{command: ['true'], args: {json.dumps(args)}}}\n"
    warnings = parse_text(text).warnings
    assert [w.text.split("`")[1] for w in warnings if w.text.startswith("job.args")] == ([] if name is None else [name])
