"""Who is slower than the others in a run that goes on, and why; healthy runs are never called slow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.run.rules.rank_timing import has_no_progress_yet, measure_rank_timings
from clusterctl.why.evidence_types import RankSnapshot, RankTimeUse, StackFrame
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.slowness import describe_reason, find_slow_ranks
from clusterctl.why.verdict import Confidence, Fault, ProblemKind, Verdict
from tests.unit.why.cases import USER, case, elsewhere

POLL = "it polls"
IMPORTS = (
    StackFrame(function="_find_and_load", file="<frozen importlib._bootstrap>", line=1),
    StackFrame(function="<module>", file=USER, line=3),
)
SET_UP = (
    StackFrame(function="rendezvous", file="/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line=2),
    StackFrame(function="main", file=USER, line=9),
)


def pace(*shares: float, **more: Any) -> RankTimeUse:
    """One that waited so in each part of the time, or always alike."""
    return RankTimeUse(seconds=100.0, wait_shares=shares if len(shares) > 1 else shares * 3, **more)


def of(*paces: RankTimeUse, looks: tuple[RankSnapshot | None, ...] = (), **more: Any) -> Verdict:
    return judge_run(case(*(looks or (None,) * len(paces)), timings=dict(enumerate(paces)), **more))


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def test_the_rank_that_hardly_waits_while_all_others_do_is_slow() -> None:
    verdict = of(pace(0.7), pace(0.68), pace(0.02), pace(0.72))

    assert (verdict.kind, verdict.cls, verdict.confidence) == (ProblemKind.SLOW, Fault.SLOW, Confidence.LIKELY)
    assert named(verdict) == [2]
    assert "wait for it 70% of the time" in verdict.summary


@pytest.mark.parametrize(
    "paces",
    [
        pytest.param((pace(0.1), pace(0.12), pace(0.0), pace(0.1)), id="nobody waits much"),
        pytest.param((pace(0.8), pace(0.82), pace(0.7), pace(0.8)), id="all wait alike"),
        pytest.param((pace(0.7), pace(0.7), pace(0.02, 0.7, 0.7), pace(0.7)), id="in one part only"),
        pytest.param((pace(0.6), pace(0.6), pace(0.1, 0.0, 0.5), pace(0.6)), id="one pause over two parts"),
        pytest.param((pace(0.0), pace(0.0), pace(0.0), pace(0.7)), id="most of them"),
        pytest.param((pace(0.7),), id="alone"),
        pytest.param((pace(0.7), replace(pace(0.0), wait_shares=None), pace(0.7)), id="not counted"),
        pytest.param((pace(0.5), pace(0.5), pace(0.27), pace(0.5)), id="a little faster"),
    ],
)
def test_a_healthy_run_has_no_slow_rank(paces: tuple[RankTimeUse, ...]) -> None:
    assert find_slow_ranks(dict(enumerate(paces))) == ()
    assert of(*paces).kind is ProblemKind.NONE


def test_a_node_all_of_whose_ranks_are_slow_is_likely_and_ranks_of_two_nodes_are_not() -> None:
    node = of(pace(0.7), pace(0.7), pace(0.0), pace(0.0))
    apart = of(pace(0.7), pace(0.0), pace(0.7), pace(0.0))

    assert (named(node), node.confidence) == ([2, 3], Confidence.LIKELY)
    assert (named(apart), apart.confidence) == ([1, 3], Confidence.AMBIGUOUS)


@pytest.mark.parametrize(
    ("own", "troubles", "words"),
    [
        pytest.param(pace(0.0, cpu_starved_share=0.5), (), "no CPU for 50%", id="starved"),
        pytest.param(pace(0.0, disk_faults_per_s=200.0), (), "memory was read from a disk", id="swap"),
        pytest.param(pace(0.0, gpu_clock_mhz=900.0), (), "900 MHz", id="clock"),
        pytest.param(pace(0.0, other_waits={POLL: 0.6}), (), POLL, id="data"),
        pytest.param(pace(0.0, cpu_cores=1.0), (), "computes", id="work"),
        pytest.param(
            pace(0.0, cpu_starved_share=0.5), ("GPU 3 is slowed down by heat",), "heat", id="what health says"
        ),
        pytest.param(pace(0.0), (), "", id="nothing known"),
    ],
)
def test_why_a_rank_is_slow_is_told_by_what_differs(own: RankTimeUse, troubles: tuple[str, ...], words: str) -> None:
    usual = pace(0.7, cpu_starved_share=0.05, disk_faults_per_s=0.1, gpu_clock_mhz=1800.0)
    said = describe_reason({0: usual, 1: own, 2: usual}, 1, troubles)

    assert words in said
    assert bool(words) == bool(said)


def test_where_all_ranks_lack_processors_nobody_is_named() -> None:
    verdict = of(pace(0.1, cpu_starved_share=0.8), pace(0.1, cpu_starved_share=0.7))

    assert (verdict.kind, verdict.confidence, verdict.culprits) == (ProblemKind.SLOW, Confidence.AMBIGUOUS, ())


def test_what_a_run_that_moves_spends_its_time_with_is_said() -> None:
    verdict = of(pace(0.3, cpu_cores=0.9), pace(0.3, cpu_cores=1.1))

    assert verdict.kind is ProblemKind.NONE
    assert "30% in collectives" in verdict.summary


@pytest.mark.parametrize(
    ("share", "blindness", "words"),
    [
        pytest.param(1.0, "", "`TORCH_NCCL_ENABLE_TIMING=1`", id="always in a collective, as ahead of the GPU"),
        pytest.param(0.3, "the begin alone", "slow ranks are unknown: the begin alone", id="blind"),
    ],
)
def test_where_waits_say_nothing_slow_ranks_are_unknown(share: float, blindness: str, words: str) -> None:
    verdict = of(*(pace(share, blindness=blindness) for _ in range(4)))

    assert (verdict.kind, verdict.confidence) == (ProblemKind.NONE, Confidence.LIKELY)
    assert words in verdict.summary


def test_the_blindness_of_a_rank_comes_from_its_newest_sample() -> None:
    seen = {"pid": 7, "looks": 0, "held": 0, "seq": {"0": [1, 1]}, "degraded": {"recorder": "the begin alone"}}
    lines = [sampled(m, m, m, m, inside=seen) for m in range(0, 121, 10)]

    assert measure_rank_timings({"gpu02": lines}, 0)[3].blindness == "the begin alone"


def starting(*frames: tuple[StackFrame, ...], no_progress_s: float = 90.0) -> Verdict:
    looks = [
        RankSnapshot(source="signal", state="S", wchan="poll_schedule_timeout", cpu=0.0, frames=each) for each in frames
    ]
    return judge_run(case(*looks, no_progress_s=no_progress_s))


def test_a_rank_that_still_imports_while_the_others_meet_is_named_with_its_line() -> None:
    verdict = starting(SET_UP, SET_UP, IMPORTS, SET_UP)

    assert (verdict.kind, verdict.cls, verdict.confidence) == (ProblemKind.START, Fault.SLOW, Confidence.LIKELY)
    assert (named(verdict), verdict.culprits[0].where) == ([2], "train.py:3")
    assert "imports modules" in verdict.summary


def test_a_storm_of_imports_names_nobody() -> None:
    verdict = starting(IMPORTS, IMPORTS)

    assert (verdict.kind, verdict.cls, named(verdict)) == (ProblemKind.START, Fault.SLOW, [])


@pytest.mark.parametrize(
    ("frames", "no_progress_s"),
    [
        pytest.param((SET_UP, IMPORTS), 30.0, id="soon"),
        pytest.param((SET_UP, SET_UP), 90.0, id="nobody is late"),
        pytest.param((elsewhere().frames, elsewhere().frames), 90.0, id="all compute"),
    ],
)
def test_a_start_that_is_only_long_is_not_called_slow(frames: tuple[Any, ...], no_progress_s: float) -> None:
    assert starting(*frames, no_progress_s=no_progress_s).kind is ProblemKind.NONE


def sampled(m: float, looks: int, held: int, begun: int, rank: int = 3, **more: Any) -> bytes:
    inside = {"pid": 7, "beats": 0, "looks": looks, "held": held, "seq": {"0": [begun, begun]}, "progress_age_s": 0.5}
    own = {"alive": True, "pid": 7, "cpu_s": m, "wchan": None, "inside": inside, **more}
    return json.dumps({"kind": "activity", "t": m, "m": m, "attempt": 0, "ranks": {str(rank): own}}).encode()


def test_shares_are_those_of_each_third_of_the_newest_samples() -> None:
    lines = [sampled(100 + m, m, m // 2 if m <= 60 else 30, m, starved_s=m / 4) for m in range(0, 121, 10)]
    found = measure_rank_timings({"gpu02": lines}, 0)[3]

    assert found.wait_shares == (0.5, 0.25, 0.0)
    assert (found.seconds, found.cpu_cores, found.cpu_starved_share) == (120.0, 1.0, 0.25)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([sampled(0, 0, 0, 0), sampled(5, 5, 5, 5), sampled(10, 10, 10, 10)], id="seen for ten seconds"),
        pytest.param([], id="no sample"),
    ],
)
def test_of_too_few_looks_nothing_is_said(lines: list[bytes]) -> None:
    assert measure_rank_timings({"gpu02": lines}, 0) == {}


def test_a_rank_that_begins_no_collective_has_no_share() -> None:
    lines = [sampled(m, m, m, 1) for m in range(0, 121, 10)]

    assert measure_rank_timings({"gpu02": lines}, 0)[3].wait_shares is None


@pytest.mark.parametrize(
    ("cores", "rates", "named_ranks"),
    [
        pytest.param([0.05, 0.9, 0.02, 0.05], [1.0] * 4, [1], id="one computes"),
        pytest.param([0.9, 0.9, 0.02, 0.9], [1.0] * 4, [], id="most compute"),
        pytest.param([0.05, 0.9, 0.02, 0.05], [1.0, 0.7, 1.0, 1.0], [], id="steps of its own"),
        pytest.param([0.05, 0.9, 0.02, 0.05], [0.0] * 4, [], id="no steps"),
    ],
)
def test_of_ranks_without_collectives_the_one_that_computes_in_each_common_step_is_slow(
    cores: list[float], rates: list[float], named_ranks: list[int]
) -> None:
    lines = {
        f"gpu{rank}": [
            sampled(m, 0, 0, 0, rank=rank, cpu_s=m * used, printed_steps=[5, m * rate]) for m in range(100, 250, 10)
        ]
        for rank, (used, rate) in enumerate(zip(cores, rates, strict=True))
    }

    assert list(find_slow_ranks(measure_rank_timings(lines, 0))) == named_ranks


@pytest.mark.parametrize(
    ("waits", "named_ranks"),
    [
        pytest.param([1.0, 1.0, 1.0, 0.0], [3], id="one does not wait"),
        pytest.param([1.0, 0.0, 0.0, 0.0], [], id="a server waits"),
        pytest.param([0.5, 0.5, 0.5, 0.4], [], id="all wait alike"),
    ],
)
def test_of_ranks_that_wait_at_sockets_the_one_that_does_not_is_slow(
    waits: list[float], named_ranks: list[int]
) -> None:
    lines = {
        f"gpu{rank}": [
            sampled(m, 0, 0, 0, rank=rank, wchan="wait_woken" if (m * 7) % 10 < share * 10 else "futex_do_wait")
            for m in range(100, 220, 4)
        ]
        for rank, share in enumerate(waits)
    }

    assert list(find_slow_ranks(measure_rank_timings(lines, 0))) == named_ranks


def test_of_an_hour_of_samples_the_last_minutes_count() -> None:
    lines = {
        f"gpu{rank}": [
            sampled(m, 0, 0, 0, rank=rank, cpu_s=m * used, printed_steps=[5, m]) for m in range(100, 3700, 10)
        ]
        for rank, used in enumerate((0.05, 0.9, 0.02, 0.05))
    }

    assert list(find_slow_ranks(measure_rank_timings(lines, 0))) == [1]


def test_too_few_samples_of_the_last_minutes_show_no_slow_rank() -> None:
    lines = {
        f"gpu{rank}": [
            sampled(m, 0, 0, 0, rank=rank, cpu_s=m * used, printed_steps=[5, m]) for m in range(100, 3700, 50)
        ]
        for rank, used in enumerate((0.05, 0.9, 0.02, 0.05))
    }

    assert find_slow_ranks(measure_rank_timings(lines, 0)) == ()


def test_samples_of_an_earlier_attempt_count_for_nothing() -> None:
    lines = [sampled(m, m, 0, m) for m in range(0, 121, 10)]

    assert measure_rank_timings({"gpu02": lines}, 1) == {}


def test_a_run_has_begun_once_any_rank_has_shown_progress() -> None:
    quiet = json.loads(sampled(5, 5, 0, 0))
    quiet["ranks"]["3"]["inside"]["progress_age_s"] = None

    assert has_no_progress_yet({"gpu02": [json.dumps(quiet).encode()]}, 0)
    assert not has_no_progress_yet({"gpu02": [sampled(5, 5, 0, 0)]}, 0)
    assert not has_no_progress_yet({"gpu02": [json.dumps(quiet).encode()], "gpu03": []}, 0)
