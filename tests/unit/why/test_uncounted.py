"""Who is missing where nothing is counted: other programs than torch, and ranks that tell nothing of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterctl.agent.protocol.record_types import TcpConnection
from clusterctl.why.evidence_types import RankSnapshot, StackFrame
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, Verdict
from tests.unit.why.cases import USER, case, elsewhere, entry, waiting

HUB = 29500


def of(*looks: RankSnapshot, **more: object) -> Verdict:
    return judge_run(case(*looks, stalled=True, **more))


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def connection(**fields: Any) -> TcpConnection:
    """A connection on which nothing waits."""
    quiet: Any = {"state": "ESTABLISHED", "unacked": 0, "unread": 0, "lost": 0, "awaited": False}
    return quiet | fields


def reads(rank: int, *, awaited: bool = True, **more: object) -> TcpConnection:
    """The connection of a rank to rank 0, as that rank has it."""
    return connection(
        address=f"10.0.0.{rank // 2 + 1}",
        port=40_000 + rank,
        peer="10.0.0.1",
        peer_port=HUB,
        awaited=awaited,
        **more,
    )


def answers(rank: int, *, awaited: bool = False, **more: object) -> TcpConnection:
    """The same, as rank 0 has it."""
    return connection(
        address="10.0.0.1",
        port=HUB,
        peer=f"10.0.0.{rank // 2 + 1}",
        peer_port=40_000 + rank,
        awaited=awaited,
        **more,
    )


def at_socket(*sockets: TcpConnection, line: int = 70) -> RankSnapshot:
    frames = (StackFrame(function="answer", file=USER, line=line),)
    return RankSnapshot(source="signal", state="S", wchan="wait_woken", cpu=0.0, frames=frames, sockets=sockets)


def test_of_ranks_that_read_from_each_other_the_one_that_reads_from_nobody_is_named() -> None:
    hub = at_socket(answers(1), answers(2, awaited=True), answers(3))
    verdict = of(hub, at_socket(reads(1)), elsewhere(sockets=(reads(2, awaited=False),)), at_socket(reads(3)))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def test_the_rank_that_all_read_from_is_named_where_it_reads_from_nobody() -> None:
    hub = elsewhere(sockets=(answers(1), answers(2), answers(3)))
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), at_socket(reads(3)))

    assert named(verdict) == [0]
    assert "sent no data" in verdict.summary


def test_ranks_that_read_from_each_other_in_a_circle_are_a_deadlock() -> None:
    first = at_socket(answers(1, awaited=True), answers(2))
    verdict = of(first, at_socket(reads(1)), at_socket(reads(2)))

    assert (verdict.cls, named(verdict)) == (Fault.DEADLOCK, [0, 1])


def test_a_rank_apart_from_all_chains_makes_it_ambiguous() -> None:
    hub = elsewhere(sockets=(answers(1), answers(2)))
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), elsewhere(line=5))

    assert verdict.confidence is Confidence.AMBIGUOUS
    assert named(verdict) == [0, 3]


def test_without_stacks_the_rank_that_the_kernel_holds_elsewhere_is_likely() -> None:
    in_futex = RankSnapshot(source="proc", state="S", wchan="futex_do_wait", cpu=0.0)
    asleep = RankSnapshot(source="proc", state="S", wchan="hrtimer_nanosleep", cpu=0.0)
    verdict = of(in_futex, in_futex, asleep, in_futex)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def test_that_no_rank_tells_of_itself_is_said() -> None:
    verdict = of(waiting(), waiting(), elsewhere(), waiting())

    assert any("`job.inject: false`" in text for text in verdict.missing_evidence)


def test_between_which_nodes_nothing_arrives_is_said_where_all_have_joined() -> None:
    begun = (entry(12),)
    lost = [waiting(entries=begun, sockets=(reads(rank, awaited=False, lost=5, unacked=96),)) for rank in (2, 3)]
    verdict = of(waiting(entries=begun), waiting(entries=begun, sockets=()), *lost)

    assert (verdict.cls, verdict.confidence) == (Fault.NETWORK, Confidence.LIKELY)
    assert [(one.rank, one.node) for one in verdict.culprits] == [(None, "gpu01"), (None, "gpu02")]
    assert "96 bytes were resent 5 times" in verdict.summary


def test_a_segment_that_was_sent_again_once_is_no_broken_network() -> None:
    looks = [waiting(entries=(entry(12),), sockets=(reads(rank, awaited=False, lost=1),)) for rank in range(4)]
    verdict = of(*looks)

    assert verdict.confidence is Confidence.AMBIGUOUS
    assert verdict.culprits == ()


def test_connections_within_two_nodes_that_look_alike_are_two() -> None:
    inside = connection(address="127.0.0.1", port=5, peer="127.0.0.1", peer_port=6, awaited=True)
    turned = connection(address="127.0.0.1", port=6, peer="127.0.0.1", peer_port=5)
    verdict = of(at_socket(inside), elsewhere(), elsewhere(sockets=(turned,)), elsewhere(line=5))

    assert named(verdict) != [2]


def test_ranks_of_two_nodes_on_one_machine_read_from_each_other_over_loopback() -> None:
    inside = connection(address="127.0.0.1", port=5, peer="127.0.0.1", peer_port=6, awaited=True)
    turned = connection(address="127.0.0.1", port=6, peer="127.0.0.1", peer_port=5)
    evidence = case(at_socket(inside), at_socket(), elsewhere(sockets=(turned,)), at_socket(), stalled=True)
    nodes = {name: replace(node, addresses=("127.0.0.1",)) for name, node in evidence.nodes.items()}

    assert named(judge_run(replace(evidence, nodes=nodes))) == [2]
