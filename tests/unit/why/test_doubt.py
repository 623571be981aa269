"""What must not be said for certain, though it looks so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.agent.protocol.record_types import FlightRecorderEntry
from clusterctl.why.evidence_types import Evidence, Node, Rank, RankExit, RankSnapshot
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, ProblemKind, Verdict
from tests.unit.why.cases import case, elsewhere, ended, entry, lost_peer, raised, waiting

BEGUN, LATE = {"0": (12, 11)}, {"0": (11, 11)}
IN_STAGE = entry(4, group="1")


def of(*looks: RankSnapshot | RankExit | None, **more: object) -> Verdict:
    return judge_run(case(*looks, stalled=True, **more))


def named(verdict: Verdict) -> list[int]:
    return sorted(culprit.rank for culprit in verdict.culprits if culprit.rank is not None)


def began(*entries: FlightRecorderEntry, **more: object) -> RankSnapshot:
    return waiting(entries=entries, **more)


def start(*, over: bool = False, stalled: bool = False, link: str = "connected") -> Evidence:
    ranks = (Rank(rank=0, node="gpu01"), Rank(rank=1, node="gpu02", started=False))
    nodes = {"gpu01": Node(node="gpu01"), "gpu02": Node(node="gpu02", link=link)}
    return replace(case(), ranks=ranks, nodes=nodes, has_ended=over, stalled=stalled)


@pytest.mark.parametrize(
    "verdict",
    [
        pytest.param(of(waiting(seq=BEGUN), elsewhere(seq=LATE), None, waiting(seq=BEGUN)), id="one was not seen"),
        pytest.param(
            of(waiting(seq=BEGUN), elsewhere(seq=LATE, status_age=30.0), per_node=1), id="an old status file, alone"
        ),
        pytest.param(
            of(waiting(seq=BEGUN), elsewhere(seq=LATE, state="D", wchan="io_schedule", cpu=0.4), waiting(seq=BEGUN)),
            id="in and out of a wait for a disk",
        ),
        pytest.param(of(*(began(IN_STAGE) for _ in range(3)), ended(0)), id="left, of another group perhaps"),
        pytest.param(
            judge_run(case(lost_peer(4000.0), ended(0, 10.0), lost_peer(4000.1))),
            id="left an hour before the others broke",
        ),
        pytest.param(
            judge_run(case(ended(3, tail="No module named 'flash_attn', the slow path is taken\nstep 5"), lost_peer())),
            id="a line of output before it exits",
        ),
        pytest.param(
            of(began(entry(12), blindness="the begin alone"), elsewhere(seq=LATE, entries=(entry(11, done=True),))),
            id="of others only the begin of collectives is seen",
        ),
        pytest.param(
            of(*(began(entry(12), seq=BEGUN, blindness="the begin alone") for _ in range(3)), ended(0)),
            id="left, and the ends of collectives are unknown",
        ),
        pytest.param(judge_run(start()), id="one starts still"),
        pytest.param(judge_run(start(stalled=True, link="unreachable")), id="one may have started behind a cut link"),
    ],
)
def test_it_is_likely_and_no_more(verdict: Verdict) -> None:
    assert (verdict.confidence, len(verdict.culprits)) == (Confidence.LIKELY, 1)


def test_a_rank_whose_node_writes_no_status_of_others_either_keeps_no_lock() -> None:
    verdict = of(
        waiting(seq=BEGUN),
        waiting(seq=BEGUN),
        elsewhere(seq=LATE, status_age=30.0),
        waiting(seq=BEGUN, status_age=30.0),
    )

    assert (verdict.cls, named(verdict)) == (Fault.NOT_JOINED, [2])


def test_a_rank_whose_neighbour_writes_its_status_keeps_the_interpreter_lock_for_certain() -> None:
    verdict = of(waiting(seq=BEGUN, status_age=1.0), elsewhere(seq=LATE, status_age=30.0))

    assert (verdict.cls, verdict.confidence) == (Fault.GIL_HELD, Confidence.CERTAIN)


@pytest.mark.parametrize(
    ("held", "cls"),
    [
        pytest.param(elsewhere(seq=LATE, state="T", wchan="do_signal_stop"), Fault.STOPPED, id="stopped"),
        pytest.param(elsewhere(seq=LATE, state="D", wchan="kernel_clone"), Fault.DSTATE, id="not to be interrupted"),
        pytest.param(elsewhere(seq=LATE, wchan="request_wait_answer"), Fault.STORAGE, id="at a file system"),
    ],
)
def test_a_rank_that_the_kernel_holds_is_not_named_alone_where_another_is_missing_too(
    held: RankSnapshot, cls: Fault
) -> None:
    verdict = of(waiting(seq=BEGUN), held, elsewhere(seq=LATE), waiting(seq=BEGUN))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (cls, Confidence.AMBIGUOUS, [1, 2])


def test_a_run_that_moves_is_not_alarmed_by_one_that_is_through() -> None:
    verdict = judge_run(case(began(IN_STAGE), began(IN_STAGE), ended(0)))

    assert verdict.confidence is Confidence.AMBIGUOUS


def test_what_was_seen_in_an_earlier_standstill_says_nothing_of_one_that_is_through() -> None:
    assert (
        judge_run(case(waiting(seq=BEGUN), waiting(seq=BEGUN), ended(0), evidence_folder="stall-1")).kind
        is ProblemKind.NONE
    )


def test_of_most_that_are_through_and_one_that_lost_them_nobody_is_named_alone() -> None:
    verdict = judge_run(case(ended(0, 9.0), ended(0, 9.1), ended(0, 9.2), lost_peer(10.0)))

    assert (verdict.confidence, named(verdict)) == (Confidence.AMBIGUOUS, [0, 1, 2, 3])


def test_the_one_rank_in_a_message_that_all_wait_for_is_likely() -> None:
    receives = waiting("recv", entries=(entry(11, done=True), entry(1, "recv", p2p=True)))
    verdict = of(began(entry(12)), began(entry(12)), receives, began(entry(12)))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, Confidence.LIKELY, [2])


def test_of_stages_that_wait_in_messages_the_one_at_another_line_is_not_named() -> None:
    receives = began(entry(9, group="stage", done=True), entry(3, "recv", p2p=True))
    sends = waiting("send", 44, entries=(entry(9, group="other", done=True), entry(7, "send", p2p=True)))
    verdict = of(receives, receives, receives, sends)

    assert (verdict.confidence, verdict.culprits) == (Confidence.AMBIGUOUS, ())


def test_a_rank_that_a_person_killed_in_a_hang_is_not_to_blame_for_the_hang() -> None:
    seen = of(waiting(seq=BEGUN), waiting(seq=BEGUN), elsewhere(seq=LATE)).culprits
    killed = case(waiting(seq=BEGUN), waiting(seq=BEGUN), elsewhere(seq=LATE), stalled=True, evidence_folder="stall-2")
    ends = (ended(None, 90.0, signal="SIGKILL"), lost_peer(90.5), ended(1, stopped=True))
    ranks = tuple(replace(rank, end=end) for rank, end in zip(killed.ranks, ends, strict=True))
    verdict = judge_run(replace(killed, ranks=ranks))

    assert (verdict.cls, verdict.confidence) == (Fault.NOT_JOINED, Confidence.LIKELY)
    assert [culprit.rank for culprit in verdict.culprits] == [culprit.rank for culprit in seen] == [2]


def test_two_that_fail_within_one_moment_for_two_reasons_are_both_named() -> None:
    verdict = judge_run(case(raised("ValueError: a", 10.0), raised("KeyError: 'b'", 10.02), lost_peer(10.1)))

    assert (verdict.confidence, named(verdict)) == (Confidence.AMBIGUOUS, [0, 1])


def test_of_a_node_that_its_peers_lost_the_one_rank_that_says_so_too_is_not_named_alone() -> None:
    verdict = judge_run(
        case(ended(1, stopped=True), lost_peer(10.0), lost_peer(10.1, "10.0.0.1"), lost_peer(10.2, "10.0.0.1"))
    )

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.PEER_LOST, Confidence.AMBIGUOUS, [0, 1])


def test_ranks_that_are_blind_are_listed_once_with_their_backend_and_judged_by_their_stacks() -> None:
    blind = "blind on this backend (mpi, torch 2.14.1): goes by stacks"
    verdict = of(*(waiting(blindness=blind, status_age=0.5) for _ in range(3)), elsewhere(blindness=blind))

    assert (named(verdict), verdict.confidence) == ([3], Confidence.LIKELY)
    assert f"ranks 0-3: {blind}" in verdict.missing_evidence
