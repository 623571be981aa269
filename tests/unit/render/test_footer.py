"""The last line of the live view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.render.console import ASCII, UNICODE
from clusterctl.render.live_footer import FooterContent, StepRate, format_footer
from clusterctl.run.rules.state import RunPhase, RunState, WorkerState

WORKERS = {rank: WorkerState(rank=rank, local_rank=rank, node="n", pid=70 + rank) for rank in range(8)}
RUNNING = RunState(phase=RunPhase.RUNNING, attempt=0, workers=WORKERS, created=1000.0)
WATCHED = FooterContent(ranks=frozenset({0}), has_output=True, stops_run=True, accepts_keys=True)


def step_rate(*steps: tuple[float, int]) -> StepRate:
    made = StepRate()
    for moment, step in steps:
        made.add(moment, step)
    return made


@pytest.mark.parametrize(
    ("state", "content", "steps", "expected"),
    [
        pytest.param({}, {}, [(0.0, 381), (10.0, 412)],
                     "following rank 0 of 8 · step 412 · 3.1 it/s · 12m00s · d detach · ^C stop", id="rank 0"),
        pytest.param({}, {"ranks": None}, [], "following all 8 ranks · 12m00s · d detach · ^C stop", id="all ranks"),
        pytest.param({}, {"stops_run": False, "ranks": frozenset({1, 2, 5})}, [(0.0, 3)],
                     "following ranks 1-2,5 of 8 · step 3 · 12m00s · d detach · ^C leave", id="some ranks"),
        pytest.param({}, {"has_output": False, "accepts_keys": False}, [],
                     "importing… (8 of 8 workers up, no output yet) · 12m00s", id="before the first output"),
        pytest.param({"phase": RunPhase.RESTARTING}, {"accepts_keys": False}, [], "restarting · 12m00s", id="restarting"),
        pytest.param({"attempt": -1}, {}, [], "", id="not started"),
        pytest.param({"phase": RunPhase.FAILED}, {}, [], "", id="over"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_followed_and_how_to_leave(
    state: dict[str, Any], content: dict[str, Any], steps: list[tuple[float, int]], expected: str
) -> None:
    line = format_footer(replace(RUNNING, **state), replace(WATCHED, **content), step_rate(*steps), 1720.0, UNICODE)

    assert line == expected


@pytest.mark.parametrize(
    ("width", "content", "expected"),
    [
        pytest.param(59, {}, "following rank 0 of 8 · step 412 · d detach · ^C stop", id="speed and age go first"),
        pytest.param(50, {}, "following rank 0 of 8 · d detach · ^C stop", id="then the step"),
        pytest.param(35, {}, "following ran… · d detach · ^C stop", id="then whom"),
        pytest.param(
            59, {"has_output": False}, "importing… (8 of 8 workers up, no out… · d detach · ^C stop", id="importing"
        ),
        pytest.param(20, {}, "d detach · ^C stop", id="nothing but keys"),
    ],
)
def test_however_narrow_the_terminal_the_keys_stay(width: int, content: dict[str, Any], expected: str) -> None:
    seen = step_rate((0.0, 381), (10.0, 412))

    assert format_footer(RUNNING, replace(WATCHED, **content), seen, 1720.0, UNICODE, width) == expected


def test_a_step_is_told_with_its_attempt_once_there_are_several() -> None:
    line = format_footer(replace(RUNNING, attempt=2), WATCHED, step_rate((1715.0, 118), (1719.0, 120)), 1720.0, UNICODE)

    assert "step 120 (attempt 2) · 0.5 it/s" in line


def test_without_other_signs_the_line_is_ascii() -> None:
    assert format_footer(RUNNING, WATCHED, StepRate(), 1720.0, ASCII).isascii()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(0.0, 5)], ["step 5"], id="one"),
        pytest.param([(0.0, 5), (30.0, 6)], ["step 6", "30 s/it"], id="slow"),
        pytest.param([(0.0, 500), (10.0, 3), (20.0, 13)], ["step 13", "1.0 it/s"], id="another attempt"),
        pytest.param([(0.0, 0), (100.0, 1), (200.0, 101)], ["step 101", "1.0 it/s"], id="the last minute"),
    ],
)
def test_the_pace_is_that_of_the_last_minute(steps: list[tuple[float, int]], expected: list[str]) -> None:
    assert step_rate(*steps).format() == expected
