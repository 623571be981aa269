"""The goodput of a run: parts that sum to the wall time, whatever the journal says."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterctl.agent.protocol import events as node_events
from clusterctl.config.spec import StallSpec
from clusterctl.render.console import ASCII
from clusterctl.render.goodput_text import describe_goodput, goodput_json
from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.goodput import PARTS, Goodput, measure_goodput
from clusterctl.run.rules.stall_detection import FirstStep, StallObserver
from clusterctl.run.rules.state import RunState
from clusterctl.run.rules.state_updates import apply_controller_event
from tests.unit.run.told import attempt, told, wrote

Journal = list[tuple[float, head.ControllerEvent]]
CREATED = head.RunCreated(run="r-1", name="r", path="/c.yaml")
WAITS = head.StartStepProgress(name=head.WAIT_STEP)
SERVED = head.StartStepProgress(name=head.WAIT_STEP, ended=True)
UP = head.StartStepProgress(name="start", ended=True)


def first(number: int, step: float | None = None, ago_s: float = 0.0) -> head.FirstStepSeen:
    return head.FirstStepSeen(attempt=number, step=step, ago_s=ago_s)


def decided(number: int) -> head.AttemptEndDecided:
    return head.AttemptEndDecided(attempt=number, reason="peer_failed")


def again(number: int, own_step: float | None = None) -> head.RestartPlanned:
    return head.RestartPlanned(attempt=number, why="crash", at=0.0, own_step=own_step)


def stall(number: int, phase: str, since_s: float = 0.0) -> head.StallChanged:
    return head.StallChanged(attempt=number, phase=phase, since_s=since_s)


def measure(journal: Journal, now: float) -> Goodput:
    state = RunState()
    for time, event in journal:
        state = apply_controller_event(state, time, event)
    return measure_goodput(state, now)


def parts(goodput: Goodput) -> dict[str, float]:
    return {part: value for part in PARTS if (value := round(getattr(goodput, f"{part}_s"), 6))}


ENDED = head.RunEnded(state="failed", exit_code=100)
ONE: Journal = [(0.0, CREATED), (5.0, attempt()), (8.0, UP), (20.0, first(0, 0, ago_s=2.0))]
CRASHED: Journal = [*ONE, (118.0, decided(0)), (120.0, again(1, own_step=99))]


@pytest.mark.parametrize(
    ("journal", "now", "expected", "lost_steps"),
    [
        pytest.param([], 50.0, {}, None, id="no run"),
        pytest.param([(0.0, CREATED)], 7.0, {"start": 7.0}, 0, id="no attempt yet"),
        pytest.param([(0.0, CREATED), (1.0, WAITS)], 7.0, {}, 0, id="in line"),
        pytest.param([(0.0, CREATED), (1.0, WAITS), (5.0, SERVED)], 7.0, {"start": 2.0}, 0, id="after the line"),
        pytest.param(ONE[:3], 7.0, {"start": 7.0}, 0, id="workers start"),
        pytest.param(ONE[:3], 40.0, {"start": 8.0, "productive": 32.0}, 0, id="no step known: from the workers' start"),
        pytest.param(ONE[:2], 40.0, {"start": 5.0, "productive": 35.0}, 0, id="no step and no end of the start known"),
        pytest.param(ONE, 118.0, {"start": 18.0, "productive": 100.0}, 0, id="until the first step"),
        pytest.param(
            [*ONE, (100.0, decided(0)), (103.0, ENDED)],
            999.0,
            {"start": 18.0, "productive": 82.0, "stopping": 3.0},
            0,
            id="the end of the last attempt",
        ),
        pytest.param(
            [*ONE, (80.0, stall(0, "suspected", 30.0)), (95.0, stall(0, "confirmed", 45.0)), (98.0, stall(0, "none"))],
            118.0,
            {"start": 18.0, "stalled": 48.0, "productive": 52.0},
            0,
            id="a stall counts from the last progress",
        ),
        pytest.param(
            [*ONE, (80.0, stall(0, "suspected", 30.0)), (100.0, decided(0)), (100.0, ENDED)],
            118.0,
            {"start": 18.0, "stalled": 50.0, "productive": 32.0},
            0,
            id="a stall ends with its attempt",
        ),
        pytest.param(
            [*ONE[:3], (40.0, stall(0, "confirmed", 30.0))],
            48.0,
            {"start": 8.0, "stalled": 38.0, "productive": 2.0},
            0,
            id="a stall before the first step",
        ),
        pytest.param(CRASHED, 130.0, {"start": 18.0, "productive": 100.0, "restart": 12.0}, 0, id="a restart lasts"),
        pytest.param(
            [*CRASHED, (125.0, attempt(1)), (138.0, first(1, 75))],
            150.0,
            {"start": 18.0, "productive": 87.0, "lost": 25.0, "restart": 20.0},
            25,
            id="a quarter of the steps is repeated",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1)), (138.0, first(1, 0))],
            138.0,
            {"start": 18.0, "lost": 100.0, "restart": 20.0},
            100,
            id="from scratch",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1)), (138.0, first(1, 100))],
            138.0,
            {"start": 18.0, "productive": 100.0, "restart": 20.0},
            0,
            id="no step is repeated",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1)), (138.0, first(1))],
            138.0,
            {"start": 18.0, "productive": 100.0, "restart": 20.0},
            None,
            id="the job tells no numbers",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1, resume_from_time=88.0)), (138.0, first(1))],
            138.0,
            {"start": 18.0, "productive": 70.0, "lost": 30.0, "restart": 20.0},
            None,
            id="without numbers, work after the checkpoint is lost",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1, resume_from_time=2.0)), (138.0, first(1)), (148.0, decided(1)),
             (148.0, again(2)), (150.0, attempt(2, resume_from_time=143.0)), (158.0, first(2))],
            158.0,
            {"start": 18.0, "productive": 5.0, "lost": 105.0, "restart": 30.0},
            None,
            id="each attempt loses the work after the earliest later checkpoint",
        ),
        pytest.param(
            [*ONE[:3], (18.0, decided(0)), (18.0, again(1)), (20.0, attempt(1, resume_from_time=14.0)), (22.0, UP)],
            28.0,
            {"start": 8.0, "productive": 12.0, "lost": 4.0, "restart": 4.0},
            None,
            id="a checkpoint, and no step known",
        ),
        pytest.param(
            [*ONE, (100.0, head.LinkChanged(node="n1", link="unreachable", seconds=10.0)),
             (148.0, head.LinkChanged(node="n1", link="lost")), (150.0, decided(0))],
            150.0,
            {"start": 18.0, "productive": 72.0, "stalled": 60.0},
            0,
            id="the silence of a lost node",
        ),
        pytest.param(
            [*ONE, (100.0, head.LinkChanged(node="n1", link="unreachable", seconds=10.0)),
             (110.0, head.LinkChanged(node="n1", link="connected"))],
            118.0,
            {"start": 18.0, "productive": 100.0},
            0,
            id="a node that was only not reached",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1)), (138.0, first(1, 75)), (158.0, decided(1)), (158.0, again(2, own_step=94)),
             (159.0, attempt(2)), (168.0, first(2, 50))],
            168.0,
            {"start": 18.0, "productive": 50.0, "lost": 70.0, "restart": 30.0},
            70,
            id="a later attempt goes back further",
        ),
        pytest.param(
            [*CRASHED, (125.0, attempt(1)), (126.0, decided(1)), (126.0, again(2)), (127.0, attempt(2)),
             (138.0, first(2, 75))],
            138.0,
            {"start": 18.0, "productive": 75.0, "lost": 25.0, "restart": 20.0},
            25,
            id="an attempt without a step is all restart",
        ),
    ],
)  # fmt: skip
def test_where_the_time_of_a_run_goes(
    journal: Journal, now: float, expected: dict[str, float], lost_steps: int | None
) -> None:
    goodput = measure(journal, now)

    assert (parts(goodput), goodput.lost_steps) == (expected, lost_steps)
    assert math.isclose(sum(expected.values()), goodput.wall_s)


def test_an_attempt_whose_ranks_ended_well_was_productive_until_the_last_exit() -> None:
    state = told(RunState(), CREATED, at=0.0)
    state = told(state, attempt(), UP, at=10.0)
    for node, ranks in (("n0", (0, 1)), ("n1", (2, 3))):
        state = told(state, head.ClockEstimated(node=node, offset=100.0, error=0.0), at=10.0)
        state = wrote(state, node, *(node_events.Exited(0, rank, exit_code=0, latest=-10.0 - rank) for rank in ranks))
    state = told(state, head.RunEnded(state="succeeded", exit_code=0), at=120.0)

    assert parts(measure_goodput(state, 999.0)) == {"start": 10.0, "productive": 80.0, "stopping": 30.0}


TIMES = st.one_of(st.floats(-100.0, 1000.0), st.sampled_from([0.0, 10.0]))
NUMBERS = st.integers(0, 3)
STEPS = st.none() | st.floats(0.0, 1e6) | st.integers(0, 5).map(float)
EVENTS = st.one_of(
    st.just(CREATED),
    st.just(UP),
    st.builds(attempt, NUMBERS, resume_from_time=st.none() | TIMES),
    st.builds(head.LinkChanged, node=st.just("n1"), link=st.sampled_from(["unreachable", "lost", "connected"])),
    st.builds(first, NUMBERS, STEPS, st.floats(0.0, 100.0)),
    NUMBERS.map(decided),
    st.builds(again, NUMBERS, STEPS),
    st.builds(stall, NUMBERS, st.sampled_from(["none", "suspected", "confirmed"]), st.floats(0.0, 500.0)),
    st.just(ENDED),
)


@given(st.lists(st.tuples(TIMES, EVENTS), max_size=30), TIMES)
@example([(0.0, CREATED), (0.0, attempt(0)), (0.0, first(0, 5.0)), (0.0, again(1, 1.0)), (0.0, attempt(1))], 10.0)
def test_the_parts_sum_to_the_wall_time_and_the_ratio_is_a_share(journal: Journal, now: float) -> None:
    goodput = measure([(0.0, CREATED), *journal], now)
    seconds = [getattr(goodput, f"{part}_s") for part in PARTS]

    assert math.isclose(sum(seconds), goodput.wall_s, abs_tol=1e-6)
    assert min(seconds) >= -1e-6
    assert goodput.ratio is None or -1e-6 <= goodput.ratio <= 1.0
    assert goodput.lost_steps is None or goodput.lost_steps >= 0


# --- the first step, from samples


def looks(*ranks: dict[str, Any]) -> list[bytes]:
    """Samples of one rank, one a second."""
    return [
        b'{"t":1.0,"m":%d.0,"attempt":0,"gpus":false,"ranks":{"0":%s},"kind":"activity"}' % (moment, _json(rank))
        for moment, rank in enumerate(ranks)
    ]


def _json(rank: dict[str, Any]) -> bytes:
    return json.dumps({"alive": True, **rank}).encode()


def printed(count: int, number: float) -> dict[str, Any]:
    return {"printed_steps": (count, number), "inside": None}


def counted(step: int | None, source: str | None) -> dict[str, Any]:
    return {"printed_steps": None, "inside": {"step": step, "source": source, "beats": step or 0}}


NOTHING: dict[str, Any] = {"printed_steps": None, "inside": None}


@pytest.mark.parametrize(
    ("ranks", "expected", "last"),
    [
        pytest.param([NOTHING, NOTHING], None, None, id="no steps"),
        pytest.param([NOTHING, printed(1, 7)], None, 7, id="one printed number may be anything"),
        pytest.param(
            [NOTHING, printed(1, 7), printed(2, 8)], FirstStep(1.0, 7, is_printed=True), 8, id="two printed numbers"
        ),
        pytest.param(
            [printed(2, 8), printed(3, 9), printed(4, 1)], FirstStep(0.0, 8, is_printed=True), None, id="back"
        ),
        pytest.param([NOTHING, counted(1, "torch"), counted(9, "torch")], FirstStep(1.0), None, id="counted steps"),
        pytest.param([NOTHING, counted(40, "user"), counted(41, "user")], FirstStep(1.0, 40), 41, id="reported steps"),
        pytest.param([counted(1, "torch"), counted(41, "user")], FirstStep(0.0, 41), 41, id="reported after counted"),
        pytest.param([printed(2, 1), counted(1, "torch")], FirstStep(1.0), None, id="counted after printed"),
    ],
)
def test_the_first_step_and_its_number_come_from_the_samples(
    ranks: list[dict[str, Any]], expected: FirstStep | None, last: float | None
) -> None:
    observer = StallObserver(0, [0], StallSpec(), now=0.0)
    for moment, line in enumerate(looks(*ranks)):
        observer.add_sample_lines("n0", [line], float(moment))
    observer.judge(float(len(ranks)))

    assert (observer.find_first_step(), observer.find_own_step()) == (expected, last)


# --- what people and programs see


@pytest.mark.parametrize(
    ("goodput", "line"),
    [
        pytest.param(None, [], id="no attempt"),
        pytest.param(Goodput(), [], id="no time"),
        pytest.param(
            Goodput(wall_s=100.0, productive_s=90.0, start_s=10.0, has_steps=True),
            ["goodput 90.0% of 1m40s - start 10s"],
            id="steps are known",
        ),
        pytest.param(
            Goodput(wall_s=100.0, productive_s=90.0, start_s=10.0),
            ["goodput at most 90.0% of 1m40s - start 10s - first step unknown"],
            id="no step is known",
        ),
        pytest.param(
            Goodput(wall_s=200.0, productive_s=90.0, start_s=10.0, restart_s=40.0, stalled_s=30.0, lost_s=29.0,
                    stopping_s=1.0, restarts=2, stalls=1, lost_steps=120, has_steps=True),
            ["goodput 45.0% of 3m20s - start 10s - 2 restarts 40s - 1 stall 30s - 120 steps repeated 29s - stopping 1.0s"],
            id="every part",
        ),
        pytest.param(
            Goodput(wall_s=100.0, productive_s=50.0, start_s=10.0, restart_s=40.0, restarts=1, lost_steps=None,
                    is_lost_known=False, has_steps=True),
            ["goodput at most 50.0% of 1m40s - start 10s - 1 restart 40s - repeated work unknown"],
            id="unknown steps",
        ),
        pytest.param(
            Goodput(wall_s=100.0, productive_s=60.0, restart_s=20.0, lost_s=20.0, restarts=1, lost_steps=None,
                    has_steps=True),
            ["goodput 60.0% of 1m40s - 1 restart 20s - repeated work 20s"],
            id="work after the last checkpoint",
        ),
    ],
)  # fmt: skip
def test_the_goodput_in_a_line(goodput: Goodput | None, line: list[str]) -> None:
    assert describe_goodput(goodput, ASCII) == line


def test_unknown_steps_are_null_for_programs() -> None:
    told = goodput_json(Goodput(wall_s=10.0, productive_s=5.0, start_s=5.0, lost_steps=None, is_lost_known=False))

    assert told is not None
    assert (told["ratio"], told["lost_steps"], told["is_upper_bound"]) == (0.5, None, True)
