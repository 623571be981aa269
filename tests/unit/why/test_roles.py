"""Ranks of several roles: each role is judged alone, and a role that waits for another is not to blame."""

from __future__ import annotations

from dataclasses import replace

from clusterctl.why.evidence_types import Evidence, RankSnapshot, StackFrame
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Fault
from tests.unit.why.cases import USER, case, elsewhere, waiting
from tests.unit.why.test_uncounted import connection


def in_roles(*looks: RankSnapshot) -> Evidence:
    """Ranks 0 and 1 are a trainer on gpu01, the others a server on gpu02."""
    found = case(*looks, stalled=True)
    ranks = tuple(
        replace(rank, role="trainer" if rank.rank < 2 else "server", is_service=rank.rank >= 2) for rank in found.ranks
    )
    return replace(found, ranks=ranks)


def test_collectives_are_compared_only_within_a_role() -> None:
    first, late = waiting(seq={"0": (5, 4)}), elsewhere(seq={"0": (4, 4)})
    ahead = waiting(seq={"0": (90, 89)})

    verdict = judge_run(in_roles(first, late, ahead, ahead))

    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert verdict.summary.startswith("role `trainer`: rank 1 on gpu01 ")


def test_a_server_that_hangs_is_named_and_not_the_role_that_asks_it() -> None:
    asks = connection(address="10.0.0.1", port=4000, peer="10.0.0.2", peer_port=8000, awaited=True)
    client = elsewhere(wchan="wait_woken", sockets=(asks,))
    server = elsewhere(line=9, state="T", wchan="do_signal_stop")

    verdict = judge_run(in_roles(client, client, server))

    assert (verdict.cls, [culprit.rank for culprit in verdict.culprits]) == (Fault.STOPPED, [2])
    assert verdict.summary.startswith("role `server`: rank 2 on gpu02 ")
    assert verdict.summary.endswith("role `trainer` waits for role `server`")


def test_a_server_that_only_waits_is_named_if_the_others_wait_for_its_answer() -> None:
    asks = connection(address="10.0.0.1", port=4000, peer="10.0.0.2", peer_port=8000, awaited=True)
    client = elsewhere(wchan="wait_woken", sockets=(asks,))
    frames = (
        StackFrame(function="select", file="/lib/selectors.py", line=4),
        StackFrame(function="serve", file=USER, line=30),
    )

    verdict = judge_run(in_roles(client, client, elsewhere(wchan="do_poll", frames=frames)))

    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert verdict.summary.startswith("role `server`: rank 2 on gpu02 ")
    assert verdict.summary.endswith(" sent no answer, and role `trainer` waits for it")


def test_a_rank_that_waits_for_the_server_leads_to_the_server() -> None:
    asks = connection(address="10.0.0.1", port=4000, peer="10.0.0.2", peer_port=8000, awaited=True)
    first, late = waiting(seq={"0": (5, 4)}), elsewhere(seq={"0": (4, 4)}, wchan="wait_woken", sockets=(asks,))

    verdict = judge_run(in_roles(first, late, elsewhere(line=9)))

    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert verdict.summary.endswith("role `trainer` waits for role `server`")
