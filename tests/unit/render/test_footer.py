"""The last line of the live view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.render.console import ASCII, UNICODE
from clusterctl.render.footer import FooterContent, StepRate, footer_line
from clusterctl.run.rules.state import RunPhase, RunState, WorkerState

WORKERS = {rank: WorkerState(rank=rank, local_rank=rank, node="n", pid=70 + rank) for rank in range(8)}
RUNNING = RunState(phase=RunPhase.RUNNING, attempt=0, workers=WORKERS, created=1000.0)
WATCHED = FooterContent(ranks=frozenset({0}), written=True, owns=True, keys=True)


def pace(*steps: tuple[float, int]) -> StepRate:
    made = StepRate()
    for moment, step in steps:
        made.add(moment, step)
    return made


@pytest.mark.parametrize(
    ("state", "watched", "steps", "expected"),
    [
        pytest.param({}, {}, [(0.0, 381), (10.0, 412)],
                     "following rank 0 of 8 · step 412 · 3.1 it/s · 12m00s · d detach · ^C stop", id="rank 0"),
        pytest.param({}, {"ranks": None}, [], "following all 8 ranks · 12m00s · d detach · ^C stop", id="all ranks"),
        pytest.param({}, {"owns": False, "ranks": frozenset({1, 2, 5})}, [(0.0, 3)],
                     "following ranks 1-2,5 of 8 · step 3 · 12m00s · d detach · ^C leave", id="some ranks"),
        pytest.param({}, {"written": False, "keys": False}, [],
                     "importing… (8 of 8 workers up, no output yet) · 12m00s", id="before the first output"),
        pytest.param({"phase": RunPhase.RESTARTING}, {"keys": False}, [], "restarting · 12m00s", id="restarting"),
        pytest.param({"attempt": -1}, {}, [], "", id="not started"),
        pytest.param({"phase": RunPhase.FAILED}, {}, [], "", id="over"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_followed_and_how_to_leave(
    state: dict[str, Any], watched: dict[str, Any], steps: list[tuple[float, int]], expected: str
) -> None:
    line = footer_line(replace(RUNNING, **state), replace(WATCHED, **watched), pace(*steps), 1720.0, UNICODE)

    assert line == expected


@pytest.mark.parametrize(
    ("width", "watched", "expected"),
    [
        pytest.param(59, {}, "following rank 0 of 8 · step 412 · d detach · ^C stop", id="speed and age go first"),
        pytest.param(50, {}, "following rank 0 of 8 · d detach · ^C stop", id="then the step"),
        pytest.param(35, {}, "following ran… · d detach · ^C stop", id="then whom"),
        pytest.param(
            59, {"written": False}, "importing… (8 of 8 workers up, no out… · d detach · ^C stop", id="importing"
        ),
        pytest.param(20, {}, "d detach · ^C stop", id="nothing but keys"),
    ],
)
def test_however_narrow_the_terminal_the_keys_stay(width: int, watched: dict[str, Any], expected: str) -> None:
    seen = pace((0.0, 381), (10.0, 412))

    assert footer_line(RUNNING, replace(WATCHED, **watched), seen, 1720.0, UNICODE, width) == expected


def test_a_step_is_told_with_its_attempt_once_there_are_several() -> None:
    line = footer_line(replace(RUNNING, attempt=2), WATCHED, pace((1715.0, 118), (1719.0, 120)), 1720.0, UNICODE)

    assert "step 120 (attempt 2) · 0.5 it/s" in line


def test_without_other_signs_the_line_is_ascii() -> None:
    assert footer_line(RUNNING, WATCHED, StepRate(), 1720.0, ASCII).isascii()


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
    assert pace(*steps).texts() == expected
