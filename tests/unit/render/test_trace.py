"""Tracebacks as their authors read them."""

from __future__ import annotations

import pytest

from clusterctl.render.stack_report import fold_traceback, shorten_paths

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d.py"
CODE = "/root/.local/share/clusterctl/work/crash"


def frame(file: str, source: str = "call()") -> list[str]:
    return [f'  File "{file}", line 3, in f', f"    {source}"]


HEAD = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param([frame("a.py"), frame("b.py")], [*frame("a.py"), *frame("b.py")], id="no library"),
        pytest.param(
            [frame("a.py"), *[frame(TORCH)] * 3],
            [*frame("a.py"), "  … 2 frames of torch", *frame(TORCH)],
            id="the last of a library stays",
        ),
        pytest.param(
            [frame("a.py"), *[frame(TORCH)] * 2, frame("b.py")],
            [*frame("a.py"), "  … 2 frames of torch", *frame("b.py")],
            id="a library between",
        ),
        pytest.param(
            [frame("<frozen runpy>"), frame("/usr/lib/python3.11/runpy.py"), frame(TORCH), frame("a.py")],
            ["  … 3 frames of Python, torch", *frame("a.py")],
            id="libraries first",
        ),
        pytest.param(
            [frame(TORCH), frame("a.py")], [*frame(TORCH), *frame("a.py")], id="one alone is shorter than a note"
        ),
    ],
)
def test_frames_of_libraries_are_folded(frames: list[list[str]], expected: list[str]) -> None:
    lines = [HEAD, *(line for one in frames for line in one), "ValueError: bad"]

    assert fold_traceback(lines) == [HEAD, *expected, "ValueError: bad"]


def test_the_rank_that_a_framework_puts_before_each_line_is_left_out() -> None:
    lines = [HEAD, *frame("a.py"), "ValueError: bad"]

    assert fold_traceback([f"[rank3]: {line}" for line in lines]) == lines


def test_a_chain_of_tracebacks_keeps_the_last_frame_of_each() -> None:
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    one = [HEAD, *frame("a.py"), *frame(TORCH) * 3, "KeyError: 1"]
    short = [HEAD, *frame("a.py"), "  … 2 frames of torch", *frame(TORCH), "KeyError: 1"]

    assert fold_traceback([*one, *between, *one]) == [*short, *between, *short]


@pytest.mark.parametrize(
    ("folder", "file", "expected"),
    [
        pytest.param("~/.local/share/clusterctl/work/crash", f"{CODE}/train.py", "train.py", id="in a home"),
        pytest.param(CODE, f"{CODE}/src/train.py", "src/train.py", id="absolute"),
        pytest.param("work/crash", f"{CODE}/train.py", "train.py", id="below the home"),
        pytest.param(CODE, f"{CODE}2/train.py", f"{CODE}2/train.py", id="another folder"),
    ],
)
def test_files_of_the_code_folder_are_named_by_their_place_in_it(folder: str, file: str, expected: str) -> None:
    assert shorten_paths(f'  File "{file}", line 3', [folder]) == f'  File "{expected}", line 3'
