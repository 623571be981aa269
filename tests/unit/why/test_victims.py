"""Ranks that all died of a peer: what that one had said itself before it was stopped with them, and what was counted."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.verdicts import load_verdict, open_bundle
from clusterctl.run.record import saved_verdict, state_reader
from clusterctl.run.rules.failure_causes import find_cause_in_output
from clusterctl.why.evidence_types import Evidence, Rank
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault
from tests.unit.why.cases import case, ended, lost_peer, raised
from tests.unit.why.test_crash import STOPPED, gave_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.why.verdict import Verdict

KINDS = Path(__file__).parent / "kinds"
RAISED = """Traceback (most recent call last):
  File "train.py", line 7, in step
    raise ValueError("the loss is not finite")
ValueError: the loss is not finite
"""
BOXED = """╭──────── Traceback (most recent call last) ────────╮
│ train.py:7 in step                                │
│ ❱ 7     raise ValueError("the loss is not finite") │
╰───────────────────────────────────────────────────╯
ValueError: the loss is not finite
"""
TORCH = "".join(f"[rank1]: {line}\n" for line in RAISED.splitlines())
WAITS, THROUGH = {"0": (61, 60)}, {"0": (60, 60)}


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def counting(*counters: Mapping[str, tuple[int, int]] | None) -> Evidence:
    """Rank 0 alone gave up before all were stopped, and this is what was counted until then."""
    made = case(gave_up(), STOPPED, STOPPED, STOPPED)
    ranks: tuple[Rank, ...] = tuple(
        replace(rank, collective_counts=counted) for rank, counted in zip(made.ranks, counters, strict=True)
    )
    return replace(made, ranks=ranks)


def test_a_rank_that_had_said_why_before_it_was_stopped_is_to_blame_and_not_those_that_lost_it() -> None:
    said = raised("ValueError: the loss is not finite", stopped=True)
    verdict = judge_run(case(lost_peer(address="10.0.0.1"), said, STOPPED, STOPPED))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.EXCEPTION, Confidence.LIKELY, [1])
    assert verdict.culprits[0].where == "train.py:7"


def test_two_that_had_said_different_things_are_both_named_and_none_is_likely() -> None:
    said = [raised(f"{name}Error: no", stopped=True) for name in ("Value", "Key")]
    verdict = judge_run(case(lost_peer(), *said, STOPPED))

    assert (verdict.confidence, named(verdict)) == (Confidence.AMBIGUOUS, [1, 2])


def test_a_rank_that_had_said_that_it_lost_a_peer_is_none_that_began_it() -> None:
    said = replace(lost_peer(), stopped=True)

    assert judge_run(case(lost_peer(), said, STOPPED, STOPPED)).cls is Fault.PEER_LOST


def test_whom_a_rank_named_that_was_stopped_while_it_said_so_is_to_blame() -> None:
    said = replace(gave_up("[Rank 0]: Rank 3 failed to pass monitoredBarrier in 4000 ms"), stopped=True)
    verdict = judge_run(case(said, STOPPED, lost_peer(address="10.0.0.1"), STOPPED))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [3])


def test_ranks_that_were_stopped_while_they_gave_up_count_as_such() -> None:
    also = replace(gave_up(), stopped=True)
    verdict = judge_run(case(gave_up(), also, STOPPED, also))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def test_the_one_that_neither_gave_up_nor_lost_those_that_did_is_for_whom_they_waited() -> None:
    also = replace(gave_up(), stopped=True)
    verdict = judge_run(case(lost_peer(11.0), gave_up(), STOPPED, also))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def test_where_one_alone_gave_up_the_rank_that_waited_in_no_collective_meanwhile_is_to_blame() -> None:
    verdict = judge_run(counting(WAITS, WAITS, THROUGH, WAITS))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


@pytest.mark.parametrize(
    "counters",
    [
        pytest.param((WAITS, WAITS, THROUGH, None), id="one is not counted"),
        pytest.param((WAITS, WAITS, THROUGH, THROUGH), id="half of them are in none"),
        pytest.param((THROUGH, WAITS, WAITS, WAITS), id="the one that gave up was in none"),
        pytest.param((WAITS, WAITS, WAITS, WAITS), id="all are in one"),
    ],
)
def test_counters_that_leave_a_doubt_name_nobody(counters: tuple[Mapping[str, tuple[int, int]] | None, ...]) -> None:
    assert judge_run(counting(*counters)).cls is Fault.PEER_LOST


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(f"step 60\n{RAISED}", id="Python's own"),
        pytest.param(f"step 60\n{TORCH}", id="with what torch sets before each line"),
        pytest.param(f"{TORCH}[rank1]:  Original exception:\n[rank1]: [pair.cc:553] bad\n", id="of several lines"),
        pytest.param(f"{BOXED}saving a crash report\n", id="in a box"),
        pytest.param(f"{RAISED}wandb: uploading history, summary ...\n", id="it uploads"),
        pytest.param(f"{RAISED}crash report written\nsending it to the team\n", id="it tells what it does then"),
        pytest.param(f"{RAISED}\n[W1125 02:55:28.830527067 socket.cpp:207] no name\n", id="a warning after it"),
    ],
)
def test_the_traceback_with_which_an_output_ends_is_what_the_rank_says(output: str) -> None:
    cause = find_cause_in_output(1, "gpu01", output)

    assert cause is not None
    assert (cause.message, cause.secondary) == ("ValueError: the loss is not finite", False)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("", id="nothing"),
        pytest.param("step 60\nstep 61\n", id="no traceback"),
        pytest.param(f"{RAISED}step 61\n", id="it went on after one"),
        pytest.param(RAISED + "".join(f"read shard {n}\n" for n in range(20)), id="it went on with other words"),
        pytest.param(RAISED.rpartition("ValueError")[0], id="it was stopped in the middle of it"),
    ],
)
def test_an_output_that_does_not_end_with_one_says_nothing(output: str) -> None:
    assert find_cause_in_output(1, "gpu01", output) is None


def test_what_a_rank_that_caught_the_signal_wrote_afterwards_says_nothing() -> None:
    with open_bundle(KINDS / "loses_its_links_then_raises-1.tar.gz") as run:
        state, _ = state_reader.load_state_and_attendance(run)
        caught = replace(state.workers[1], signal=None, exit_code=1)
        (index,) = run.path.glob("nodes/*/attempt-0/rank-1.idx")
        before = saved_verdict.read_outputs_before_stop(run, replace(state, workers={**state.workers, 1: caught}))[1]
        index.write_bytes(b"")
        after = saved_verdict.read_outputs_before_stop(run, replace(state, workers={**state.workers, 1: caught}))
        other = saved_verdict.read_outputs_before_stop(run, state)[1]

    assert state.workers[1].signal == signal.SIGTERM
    assert "ValueError" in before
    assert 1 not in after
    assert "ValueError" in other


def test_outputs_are_not_read_where_a_failure_tells_for_itself() -> None:
    with open_bundle(KINDS / "raises-3.tar.gz") as run:
        state, _ = state_reader.load_state_and_attendance(run)

        assert saved_verdict.read_outputs_before_stop(run, state) == {}
        assert saved_verdict.read_collective_counts_before_failure(run, state) == {}


def test_of_peers_that_give_up_the_first_alone_is_enough() -> None:
    with open_bundle(KINDS / "peers_give_up-2.tar.gz") as run:
        as_if_stopped(run, 0, 3)
        verdict = load_verdict(run, live=False)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def as_if_stopped(run: RunDir, *ranks: int) -> None:
    """Write into the journals of a run that these ranks were stopped before they said a word."""
    for journal in run.path.glob("nodes/*/journal.jsonl"):
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        for event in events:
            if event["kind"] == "exited" and event["rank"] in ranks:
                event |= {"exit_code": None, "signal": int(signal.SIGTERM), "stopped": True, "tail": "", "error": None}
                (journal.parent / f"attempt-0/rank-{event['rank']}.log").write_text("")
        journal.write_text("".join(f"{json.dumps(event)}\n" for event in events))


def test_a_run_whose_ranks_are_stopped_says_no_more_than_before_without_their_outputs() -> None:
    with open_bundle(KINDS / "loses_its_links_then_raises-1.tar.gz") as run:
        for log in run.path.glob("nodes/*/attempt-0/rank-*.log"):
            log.unlink()
        verdict = load_verdict(run, live=False)

    assert (verdict.cls, verdict.confidence) == (Fault.PEER_LOST, Confidence.AMBIGUOUS)


def test_a_rank_that_ended_without_a_reason_is_not_made_one_by_its_peers() -> None:
    assert judge_run(case(lost_peer(), ended(None, signal="SIGTERM", stopped=True))).cls is Fault.PEER_LOST
