from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.config.spec import StallSpec
from clusterctl.run.rules import stall_detection
from clusterctl.run.rules.stall_detection import StallPhase

# Test folders are no packages: the model of a job is loaded by its path.
_spec = importlib.util.spec_from_file_location("stall_job", Path(__file__).parent / "job.py")
assert _spec is not None
assert _spec.loader is not None
job = importlib.util.module_from_spec(_spec)
sys.modules["stall_job"] = job
_spec.loader.exec_module(job)
Rank, busy, steps, watch = job.Rank, job.busy, job.steps, job.watch

FREEZE = 100.0


def two(**kinds):
    """Two ranks that do the same, on two nodes."""
    return {0: Rank(**kinds, node="a"), 1: Rank(**kinds, node="b")}


@pytest.mark.parametrize("period", [0.01, 0.1, 0.5, 1.0, 2.0])
def test_a_freeze_is_suspected_within_35_s_and_confirmed_within_60(period):
    seen = watch(two(step=steps(period, FREEZE)), FREEZE + 90)
    assert FREEZE + 25 < seen.suspected <= FREEZE + 35
    assert seen.confirmed <= FREEZE + 60


def test_a_freeze_soon_after_the_first_steps_is_noticed_as_fast():
    seen = watch(two(step=steps(0.1, 10.6)), 100)
    assert seen.suspected <= 45
    assert seen.confirmed <= 70


def test_one_rank_spinning_does_not_hide_that_the_others_wait():
    ranks = two(step=steps(0.5, FREEZE))
    ranks[0].cpu, ranks[1].cpu = busy(), busy(FREEZE)
    assert watch(ranks, FREEZE + 60).confirmed is not None


def test_a_rank_that_could_run_and_gets_no_processor_is_not_one_that_waits():
    def confirmed(starved: float) -> bool:
        ranks = two(step=steps(0.5, FREEZE), cpu=busy(share=0.01), starved=busy(share=starved))
        return watch(ranks, FREEZE + 60).confirmed is not None

    assert [confirmed(starved) for starved in (0.95, 0.55, 0.45)] == [False, False, True]


def test_on_a_crowded_machine_a_rank_that_polls_is_one_that_waits():
    ranks = two(step=steps(0.5, FREEZE), cpu=busy(share=0.01), starved=busy(share=0.4))
    assert watch(ranks, FREEZE + 60).confirmed is not None


def test_a_rank_that_was_kept_from_a_processor_before_it_stood_still_hides_nothing():
    ranks = two(step=steps(0.5, FREEZE), cpu=busy(FREEZE, share=0.01), starved=busy(FREEZE, share=0.95))
    assert watch(ranks, FREEZE + 60).confirmed is not None


def test_chatter_of_a_stalled_run_hides_it_only_until_the_ceiling():
    ranks = two(step=steps(0.5, FREEZE), output=int, backend="nccl")
    seen = watch(ranks, 700)
    assert FREEZE + 480 <= seen.suspected <= FREEZE + 490
    assert seen.confirmed <= FREEZE + 550


STILL = {"step": steps(0.5, FREEZE), "seq": lambda t: (9, 8) if t > FREEZE else (8, 8)}
"""Ranks that wait in a collective from the freeze on."""
SHORT = StallSpec(timeout=10.0, startup_timeout=75.0)


@pytest.mark.parametrize(
    ("culprit", "limits", "limit_s"),
    [
        pytest.param({"output": int}, SHORT, 30.0, id="prints a line a second"),
        pytest.param({"written": lambda t: int(t * 1e6)}, SHORT, 30.0, id="goes on sending metrics"),
        pytest.param(
            {"output": int}, StallSpec(timeout=10.0, busy_timeout=50.0), 50.0, id="a limit that the file sets"
        ),
        pytest.param({"output": int}, StallSpec(), 1500.0, id="the default of gloo"),
        pytest.param({"output": int, "backend": "nccl"}, StallSpec(), 480.0, id="the default of NCCL"),
        pytest.param({"output": int}, StallSpec(timeout=1800.0), 1800.0, id="a long limit of the file"),
    ],
)
def test_signs_of_life_of_one_rank_lengthen_the_limit_of_a_group_that_waits_and_never_suspend_it(
    culprit, limits, limit_s
):
    ranks = two(**STILL, **({"backend": "nccl"} if "backend" in culprit else {}))
    ranks[1] = Rank(step=steps(0.5, FREEZE), node="b", **culprit)
    seen = watch(ranks, FREEZE + limit_s + 70, limits)
    assert FREEZE + limit_s - 3 <= seen.suspected <= FREEZE + limit_s + 5
    assert seen.confirmed is not None


@pytest.mark.parametrize(("timeout", "limit_s"), [(None, 90.0), (60.0, 180.0), (10.0, 30.0)])
def test_a_rank_that_computes_while_others_wait_gets_three_times_the_limit(timeout, limit_s):
    ranks = two(**STILL)
    ranks[1] = Rank(step=steps(0.5, FREEZE), node="b", cpu=busy())
    seen = watch(ranks, FREEZE + limit_s + 70, StallSpec(timeout=timeout))
    assert FREEZE + limit_s - 5 <= seen.suspected <= FREEZE + limit_s + 5
    assert seen.confirmed is not None


def test_a_rank_that_waits_with_others_and_spins_there_gets_no_longer_limit():
    ranks = two(**STILL, cpu=busy(share=0.9))
    ranks[1].cpu = busy(FREEZE, share=0.9)
    assert watch(ranks, FREEZE + 60, gpus=True).confirmed is not None


@pytest.mark.parametrize(
    ("wchan", "main_age", "limit_s"),
    [
        pytest.param("futex_do_wait", lambda t: max(0.0, t - FREEZE), 30.0, id="for another thread, as in gloo's recv"),
        pytest.param("sk_wait_data", lambda t: max(0.0, t - FREEZE), 30.0, id="for a socket, as in a store"),
        pytest.param("futex_do_wait", lambda t: 1.0, 1500.0, id="its main thread runs now and then"),
        pytest.param("do_wait", lambda t: max(0.0, t - FREEZE), 1500.0, id="for its own child process"),
        pytest.param("pipe_read", lambda t: max(0.0, t - FREEZE), 1500.0, id="for data of a loader"),
        pytest.param(None, lambda t: max(0.0, t - FREEZE), 1500.0, id="the kernel does not tell"),
    ],
)
def test_a_rank_whose_main_thread_is_in_one_call_waits_for_others_as_in_a_collective(wchan, main_age, limit_s):
    ranks = two(step=steps(0.5, FREEZE), wchan=lambda t: wchan, main_age=main_age)
    ranks[1] = Rank(step=steps(0.5, FREEZE), node="b", output=int)
    seen = watch(ranks, FREEZE + limit_s + 70, SHORT)
    assert FREEZE + limit_s - 3 <= seen.suspected <= FREEZE + limit_s + 5
    assert seen.confirmed is not None


def test_a_silent_stall_keeps_the_limit_by_which_it_was_suspected():
    seen = watch(two(**STILL), FREEZE + 120, SHORT)
    assert seen.suspected <= FREEZE + 15
    assert seen.last.limit_s == 10.0


def test_signs_of_life_before_the_first_step_do_not_hide_ranks_that_wait_longer_than_the_start_may_take():
    ranks = two(seq=lambda t: (1, 0))
    ranks[1] = Rank(output=int, node="b")
    assert 74 <= watch(ranks, 150, SHORT).suspected <= 80
    assert watch(ranks, 70, SHORT).suspected is None


def test_a_rank_that_saves_watched_files_is_not_one_that_retries():
    ranks = {0: Rank(step=steps(0.5, FREEZE), node="a"), 1: Rank(**STILL, node="b")}
    seen = watch(ranks, FREEZE + 200, SHORT, watched=lambda t: {"x": [int(t), int(t)]})
    assert seen.suspected is None


def test_a_declared_phase_of_the_rank_that_others_wait_for_lasts_as_long_as_it_says():
    ranks = two(**STILL)
    ranks[1] = Rank(
        step=steps(0.5, FREEZE), output=int, node="b", phase=lambda t: ("eval", FREEZE, 120.0) if t > FREEZE else None
    )
    seen = watch(ranks, FREEZE + 200, SHORT)
    assert FREEZE + 118 <= seen.suspected <= FREEZE + 126


def test_collectives_in_which_all_ranks_stand_still_end_the_start():
    ranks = two(seq=lambda t: (25, 24) if t > 3 else (1, 0))
    seen = watch(ranks, 200, StallSpec())
    assert 120 <= seen.suspected <= 130
    assert seen.last.reason == "25 collectives, then none"
    assert watch(ranks, 100, SHORT).suspected <= 20


def test_a_first_collective_that_takes_its_time_is_part_of_the_start():
    assert watch(two(seq=lambda t: (1, 0)), 300, StallSpec()).suspected is None


def test_a_rank_that_prepares_data_while_others_wait_is_part_of_the_start():
    ranks = two(seq=lambda t: (25, 24))
    ranks[1].seq = lambda t: (24, 24)
    assert watch(ranks, 300, StallSpec()).suspected is None


def printing(period: float, until: float) -> Callable[[float], tuple[int, float] | None]:
    """Numbered lines, one each `period` seconds."""
    return lambda t: (min(int(min(t, until) / period), 40), float(int(min(t, until) / period))) if t > period else None


def test_numbered_lines_of_several_ranks_end_the_start():
    ranks = two(printed=printing(0.05, 2.0))
    seen = watch(ranks, 200, StallSpec())
    assert 120 <= seen.suspected <= 130
    assert seen.last.reason == "40 printed steps, then none"


def test_the_first_printed_step_is_progress_and_an_output_without_steps_is_none():
    ranks = two(printed=lambda t: (1, 7.0) if 50 <= t < 80 else None)
    assert 20 <= watch(ranks, 72).last.last_progress_s <= 24
    assert 48 <= watch(ranks, 100).last.last_progress_s <= 52


def test_numbered_lines_of_one_rank_among_several_do_not():
    ranks = two()
    ranks[0].printed = printing(0.05, 2.0)
    assert watch(ranks, 300, StallSpec()).suspected is None


def test_the_limit_grows_with_the_time_between_numbered_lines():
    ranks = two(printed=printing(60.0, 390.0))
    seen = watch(ranks, 1200, StallSpec())
    assert 360 + 350 <= seen.suspected <= 360 + 370


def test_the_limit_grows_with_slow_steps():
    ranks = two(step=steps(20.0, 210.0))
    seen = watch(ranks, 500)
    assert 210 + 100 < seen.suspected <= 210 + 150


CONTROLS = {
    "slow first step": (two(step=steps(0.5, first=600.0)), {}),
    "long silent validation on all ranks": (
        two(step=lambda t: int(min(t, 100) + max(0, t - 300)), cpu=busy()),
        {},
    ),
    "rank-0 checkpoint with a growing file": (
        {
            0: Rank(step=lambda t: int(min(t, 100) + max(0, t - 300)), written=lambda t: int(t * 1e6)),
            1: Rank(step=lambda t: int(min(t, 100) + max(0, t - 300))),
        },
        {},
    ),
    "rank-0 work on a watched file": (
        two(step=lambda t: int(min(t, 100) + max(0, t - 300))),
        {"watched": lambda t: {"x": [int(t), int(t)]}},
    ),
    "declared phase": (
        two(
            step=lambda t: int(min(t, 100) + max(0, t - 300)),
            phase=lambda t: ("checkpoint", 100.0, 900.0) if 100 <= t < 300 else None,
        ),
        {},
    ),
    "straggler": ({0: Rank(step=steps(0.5)), 1: Rank(step=steps(0.5, 100))}, {}),
    "silent logs with moving steps": (two(step=steps(1.0)), {}),
    "chatty logs": (two(step=steps(1.0), output=lambda t: int(t * 1e6)), {}),
    "one node unseen for 20 s": (
        two(step=steps(0.1)),
        {"seen": lambda node, t: not (node == "b" and 100 < t < 120)},
    ),
    "no node seen for 200 s": (two(step=steps(0.1)), {"seen": lambda node, t: not 100 < t < 300}),
    "plain workers that print now and then": (
        two(injected=False, output=lambda t: int(t / 70), frameworks=()),
        {},
    ),
    "injected plain workers that print now and then": (two(output=lambda t: int(t / 70), frameworks=()), {}),
    "silent validation on GPUs, seen by main threads that compute": (
        two(
            step=lambda t: int(min(t, 100) + max(0, t - 300)),
            main_age=lambda t: 0.8,
            backend="nccl",
            cpu=busy(),
        ),
        {"gpus": True},
    ),
}


@pytest.mark.parametrize(("ranks", "kinds"), CONTROLS.values(), ids=CONTROLS.keys())
def test_a_healthy_run_is_never_called_stalled(ranks, kinds):
    seen = watch(ranks, 800, **kinds)
    assert seen.suspected is None
    assert seen.last.reason == ""


def test_waiting_on_gpus_spins_and_so_cpu_does_not_count_there():
    ranks = two(step=steps(0.5, FREEZE), cpu=busy(), backend="nccl")
    assert watch(ranks, FREEZE + 60, gpus=True).confirmed is not None


def test_a_rank_that_polls_now_and_then_does_not_compute():
    ranks = two(step=steps(0.5, FREEZE), main_age=lambda t: t % 5.0, backend="nccl")
    assert watch(ranks, FREEZE + 60, gpus=True).confirmed is not None


def test_the_startup_timeout_rules_until_the_first_steps():
    seen = watch(two(), 200, StallSpec(startup_timeout=60.0))
    assert 60 <= seen.suspected <= 64
    assert "first step" in seen.last.reason


def test_a_job_without_progress_is_judged_by_its_activity():
    ranks = two(injected=False, output=lambda t: int(min(t, FREEZE)))
    seen = watch(ranks, 200, StallSpec(timeout=40.0))
    assert FREEZE + 40 <= seen.suspected <= FREEZE + 45


def test_a_phase_that_outlasts_its_limit_is_a_stall():
    phase = ("checkpoint", 100.0, 120.0)
    seen = watch(two(step=steps(0.5, FREEZE), phase=lambda t: phase if t >= 100 else None), 300)
    assert 218 <= seen.suspected <= 226
    assert "`checkpoint`" in seen.all[-1][1].reason


def test_progress_after_a_confirmed_stall_takes_it_back():
    seen = watch(two(step=lambda t: int(min(t, 100) + max(0, t - 200))), 300)
    assert seen.confirmed is not None
    assert seen.last.phase is StallPhase.NONE


def test_a_straggler_is_shown():
    seen = watch(CONTROLS["straggler"][0], 200)
    assert seen.last.stragglers == (1,)


def test_ranks_that_have_ended_are_not_waited_for():
    ranks = two(step=steps(0.5, FREEZE))
    ranks[1].alive = lambda t: t < 50
    assert watch(ranks, FREEZE + 60).confirmed is not None


def test_nothing_is_judged_before_every_rank_was_seen():
    seen = watch(two(step=steps(0.5, FREEZE)), 600, seen=lambda node, t: node == "a")
    assert seen.suspected is None
    assert seen.last.sample_age_s >= 600


def test_a_rank_of_which_nothing_is_known_is_not_one_that_stands_still():
    unseen = two(step=steps(0.5, FREEZE), unseen=lambda t: t > FREEZE)
    assert watch(unseen, FREEZE + 600).suspected is None
    for_a_while = two(step=steps(0.5, FREEZE), unseen=lambda t: FREEZE < t < FREEZE + 300)
    seen = watch(for_a_while, FREEZE + 400)
    assert FREEZE + 300 <= seen.suspected <= FREEZE + 310


def test_what_another_attempt_says_is_ignored():
    state = stall_detection.start_stall_watch(1, [0], 0.0)
    sample = {"m": 1.0, "gpus": False, "watched": {}, "ranks": {"0": Rank(step=steps(1)).sample(50.0)}}
    assert stall_detection.add_sample(state, sample, node="a", attempt=0, now=5.0) is state


@pytest.mark.parametrize(
    ("backend", "gpus", "group", "user", "expected"),
    [
        pytest.param("cpu:gloo,cuda:nccl", True, None, None, 480.0, id="NCCL"),
        pytest.param("gloo", True, None, None, 1500.0, id="gloo, even with GPUs"),
        pytest.param(None, True, None, None, 480.0, id="GPUs before a group exists"),
        pytest.param(None, False, None, None, 1500.0, id="no GPUs"),
        pytest.param("nccl", True, 300.0, None, 240.0, id="cut to 0.8 of the group's timeout"),
        pytest.param("nccl", True, 300.0, 400.0, 400.0, id="what the user set stands"),
    ],
)
def test_the_ceiling(backend, gpus, group, user, expected):
    state = _after_one_sample(Rank(step=steps(1), backend=backend, timeout_s=group), gpus)
    assert stall_detection.find_max_stall_limit_s(state, StallSpec(timeout=user)) == expected


@pytest.mark.parametrize(
    ("timeout", "warned"),
    [
        pytest.param(None, False, id="the default lies before it"),
        pytest.param(200.0, False, id="well before"),
        pytest.param(280.0, True, id="before, but not confirmed by then"),
        pytest.param(600.0, True, id="after"),
    ],
)
def test_a_limit_that_the_framework_would_forestall_is_warned_about(timeout, warned):
    state = _after_one_sample(Rank(step=steps(1), backend="nccl", timeout_s=300.0), True)
    assert (stall_detection.describe_late_stall_limit(state, StallSpec(timeout=timeout)) is not None) is warned


def _after_one_sample(rank, gpus):
    sample = {"m": 1.0, "gpus": gpus, "watched": {}, "ranks": {"0": rank.sample(50.0)}}
    return stall_detection.add_sample(
        stall_detection.start_stall_watch(0, [0], 0.0), sample, node="a", attempt=0, now=50.0
    )


@settings(deadline=None, max_examples=40)
@given(
    period=st.floats(0.005, 15.0),
    freeze=st.floats(60.0, 200.0),
    ranks=st.integers(1, 5),
)
def test_a_run_is_never_suspected_before_its_freeze_and_always_confirmed_after_it(period, freeze, ranks):
    group = {rank: Rank(step=steps(period, freeze), node="ab"[rank % 2]) for rank in range(ranks)}
    seen = watch(group, freeze + 320)
    assert seen.suspected > freeze - period
    assert seen.confirmed is not None
    assert seen.confirmed > seen.suspected


@settings(deadline=None, max_examples=40)
@given(gaps=st.lists(st.floats(0.01, 25.0), min_size=5, max_size=40))
def test_no_mixture_of_steps_up_to_25_s_is_called_stalled(gaps):
    moments = [10.0]
    for gap in gaps:
        moments.append(moments[-1] + gap)
    rank = Rank(step=lambda t: sum(moment <= t for moment in moments))
    assert watch({0: rank}, moments[-1]).suspected is None
