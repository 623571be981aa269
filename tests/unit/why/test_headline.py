"""What is read in the last words of programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.why.failure_headline import find_final_traceback, find_headline, parse_missing_command

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


RAISED = """step 4 loss 2.0
Traceback (most recent call last):
  File "/w/train.py", line 15, in main
    [1, 2, 3][80]
IndexError: list index out of range
"""
LOGURU = """2026-11-26 14:36:50.242 | INFO     | __main__:main:17 - Training of experiment is done and the best AP is 0.00
2026-11-26 14:36:50.242 | ERROR    | __main__:<module>:20 - An error has been caught in function '<module>':
Traceback (most recent call last):

> File "/w/train.py", line 20, in <module>
    main()
    └ <function main at 0x7fe4d14fd9e0>

  File "/w/train.py", line 15, in main
    [1, 2, 3][80]          # a label outside of the classes

IndexError: list index out of range
"""
RICH = """╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /w/train.py:15 in main                                                       │
│                                                                              │
│ ❱ 15     [1, 2, 3][80]                                                       │
╰──────────────────────────────────────────────────────────────────────────────╯
IndexError: list index out of range
"""
CHAINED = """Traceback (most recent call last):
  File "/w/train.py", line 15, in main
    [1, 2, 3][80]
IndexError: list index out of range

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/w/train.py", line 20, in run
    raise RuntimeError("step failed") from error
RuntimeError: step failed
"""


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(RAISED, id="print_exc"),
        pytest.param("ERROR:root:training failed\n" + RAISED, id="logging_exception"),
        pytest.param(LOGURU, id="loguru"),
        pytest.param(RICH, id="rich"),
        pytest.param(CHAINED, id="raised_again"),
        pytest.param(RAISED[RAISED.index("  File") :], id="head_cut_off"),
        pytest.param(RAISED + "cleaning up\n", id="goodbye"),
        pytest.param(RAISED + "Training failed, see the log\n", id="says_that_it_failed"),
        pytest.param(RAISED + "[2026-11-26 14:36:50] ERROR: training aborted\n", id="logs_that_it_failed"),
        pytest.param(
            RAISED + "[rank0]:[W1126 14:36:50.2 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not "
            "called before program exit\n",
            id="warning_of_torch",
        ),
        pytest.param(RAISED + "  50%|█████     | 5/10 [00:01<00:01,  4.9it/s]\n", id="bar_of_the_loop_that_was_left"),
        pytest.param(RAISED + "wandb: \nwandb: View run at https://wandb.ai/x\n", id="wandb"),
        pytest.param(
            RAISED
            + "Exception ignored in: <function P.__del__ at 0x7f>\n"
            + RAISED.split("\n", 1)[1].replace("Index", "Key"),
            id="an_ignored_one_behind_it",
        ),
    ],
)
def test_the_traceback_is_found_with_which_an_output_ends(output: str) -> None:
    found = find_final_traceback(output)
    assert found is not None
    assert "IndexError: list index out of range" in found.text


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param("step 5 loss 1.9\n", id="a_step"),
        pytest.param("retrying\nsaved model.pt\n", id="a_result"),
        pytest.param("2026-11-26 14:36:50 INFO trainer: saved model.pt\n", id="a_log_line"),
        pytest.param("100%|██████████| 10/10 [00:02<00:00,  4.9it/s]\n", id="a_bar_that_is_full"),
        pytest.param(
            "".join(f"\r {n}0%|{n}  | {n}/10 [00:02<00:00,  4.9it/s]" for n in range(3, 9)), id="a_bar_that_grows"
        ),
        pytest.param("done\n", id="done"),
        pytest.param("closing epoch 3\n" * 12 + "best 0.9\n", id="many_lines"),
    ],
)
def test_a_traceback_behind_which_a_program_went_on_is_not_the_end_of_its_output(behind: str) -> None:
    assert find_final_traceback(RAISED + behind) is None


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("step 4 loss 2.0\n", id="no_traceback"),
        pytest.param("Exception ignored in: <function P.__del__ at 0x7f>\n" + RAISED.split("\n", 1)[1], id="ignored"),
        pytest.param("Exception in thread Thread-1 (feed):\n" + RAISED.split("\n", 1)[1], id="of_a_thread"),
        pytest.param("ValueError: bad batch 3\n", id="an_exception_without_traceback"),
    ],
)
def test_an_output_that_tells_of_no_failure_of_its_own_ends_with_no_traceback(output: str) -> None:
    assert find_final_traceback(output) is None
