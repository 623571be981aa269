"""Where all that failed say they died of a peer: whom they missed, what that one said itself, what was counted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import exit_causes
from clusterctl.why.exit_causes import (
    MAX_NAMED_RANKS,
    describe_ranks,
    list_peer_victims,
    make_culprits,
    normalize_message,
)
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.why.evidence import Evidence, Rank, RankExit

_ABSENT_CLASSES = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_GAVE_UP_TEXT = re.compile(r"timed out|timeout", re.IGNORECASE)


def judge_peer_losses(case: Evidence, failed: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    """Return whom ranks lost that all say that they lost a peer.

    That one may have been stopped with them before it could end by itself: then its own last words tell, or whom the
    others missed, or who had begun nothing while the others waited; else the node whose address they name.
    """
    unended = [(rank, rank.end) for rank in case.ranks if rank.end is not None and rank.end.stopped]
    own = [(rank, end) for rank, end in unended if _has_a_reason(end)]
    if own:
        return _stopped_before_it_ended(case, own, failed)
    bereft = [*failed, *((rank, end) for rank, end in unended if end.secondary)]
    missed = _find_missed_ranks(case, bereft)
    return _not_joined(case, missed, bereft) if missed else _blame_node(case, failed)


def _has_a_reason(end: RankExit) -> bool:
    """Whether what a rank had written before it was stopped is the end of a rank that fails by itself."""
    return bool(end.traceback) and not end.secondary and exit_causes.classify_exit(end) is not Class.PEER_LOST


def _stopped_before_it_ended(
    case: Evidence, own: Sequence[tuple[Rank, RankExit]], failed: Sequence[tuple[Rank, RankExit]]
) -> Verdict:
    """Ranks that had said why they fail, and whose peers noticed before they were gone."""
    first, end = own[0]
    alike = all(normalize_message(other.message) == normalize_message(end.message) for _, other in own)
    return Verdict(
        kind=Kind.CRASH,
        cls=exit_causes.classify_exit(end),
        confidence=Confidence.LIKELY if alike else Confidence.AMBIGUOUS,
        summary=f"{describe_ranks([rank for rank, _ in own])} failed: {exit_causes.describe_exit(end)}; "
        f"{'it was' if len(own) == 1 else 'they were'} stopped with its peers, which lost it, before it was gone",
        culprits=make_culprits(own),
        waiting=list_peer_victims([rank for rank, _ in failed]),
        next=exit_causes.next_command(exit_causes.classify_exit(end), case.run, first.rank, first.node, end.message),
    )


def _find_missed_ranks(case: Evidence, bereft: Sequence[tuple[Rank, RankExit]]) -> list[Rank]:
    """Return for whom ranks waited until the first of them gave up, and thereby ended the others.

    Whom they name; else who has lost nobody; else who, when last counted, was in no collective while the others were.
    """
    texts = [f"{end.message}\n{end.tail}" for _, end in bereft]
    heard = [*texts, *(rank.end.tail for rank in case.ranks if rank.end is not None and rank.end.stopped)]
    numbers = {
        int(number) for text in heard for found in _ABSENT_CLASSES.findall(text) for number in re.findall(r"\d+", found)
    }
    named = [rank for rank in case.ranks if rank.rank in numbers]
    if named or not any(map(_GAVE_UP_TEXT.search, texts)):
        return named
    known = {rank.rank for rank, _ in bereft}
    others = [rank for rank in case.ranks if rank.rank not in known]
    return others if len(others) < len(known) else _find_idle_ranks(case, known)


def _find_idle_ranks(case: Evidence, bereft: set[int]) -> list[Rank]:
    """Return who was in no collective while most were, and all that lost somebody; nobody where not all are counted."""
    if any(rank.counted is None for rank in case.ranks):
        return []
    idle = [rank for rank in case.ranks if all(ended >= begun for begun, ended in (rank.counted or {}).values())]
    return idle if 2 * len(idle) < len(case.ranks) and bereft.isdisjoint(rank.rank for rank in idle) else []


def _not_joined(case: Evidence, missed: Sequence[Rank], bereft: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    numbers = fold_ranks([rank.rank for rank, _ in bereft])
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.NOT_JOINED,
        confidence=Confidence.LIKELY if len(missed) == 1 else Confidence.AMBIGUOUS,
        summary=f"{describe_ranks(missed)} did not join a collective, and "
        f"rank{'s' if len(bereft) > 1 else ''} {numbers} gave up waiting",
        culprits=tuple(
            Culprit(rank=rank.rank, node=rank.node, evidence="its peers waited for it in vain") for rank in missed
        ),
        waiting=list_peer_victims([rank for rank, _ in bereft]),
        next=exit_causes.next_command(Class.NOT_JOINED, case.run, missed[0].rank, missed[0].node),
    )


def _blame_node(case: Evidence, failed: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    """Nothing tells whom they lost, but perhaps where it was."""
    accused = _find_accused_node(case, failed)
    first, end = min(failed, key=lambda each: (each[1].latest, each[0].rank))
    if accused is not None:
        return Verdict(
            kind=Kind.CRASH,
            cls=Class.PEER_LOST,
            confidence=Confidence.AMBIGUOUS,
            summary=f"all ranks lost a peer; they name {accused}, and nobody there says why",
            culprits=_list_ranks_on(case, accused),
            waiting=list_peer_victims([r for r, _ in failed if r.node != accused]),
            next=exit_causes.next_command(Class.NODE_LOST, case.run, None, accused),
        )
    # A victim is never named alone: whom it lost may have been stopped by us before it ended by itself.
    named = failed if len(failed) > 1 else []
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.PEER_LOST,
        confidence=Confidence.AMBIGUOUS,
        summary=f"{describe_ranks([first])} was the first to lose a peer: {exit_causes.describe_exit(end)}",
        culprits=make_culprits(named),
        waiting=() if named else list_peer_victims([first]),
        next=exit_causes.next_command(Class.PEER_LOST, case.run, first.rank, first.node),
    )


def _list_ranks_on(case: Evidence, node: str) -> tuple[Culprit, ...]:
    """Return all ranks of a node, also those that we stopped before they could say a word; the node where it is one."""
    there = [rank for rank in case.ranks if rank.node == node]
    if len(there) < 2:
        return (Culprit(rank=None, node=node, evidence="its peers lost it"),)
    return tuple(
        Culprit(
            rank=rank.rank,
            node=node,
            evidence="its peers lost its node"
            if rank.end is None or rank.end.stopped or rank.end.well
            else exit_causes.describe_exit(rank.end),
        )
        for rank in there[:MAX_NAMED_RANKS]
    )


def _find_accused_node(case: Evidence, failed: Sequence[tuple[Rank, RankExit]]) -> str | None:
    """Return the one node of which ranks of other nodes say that they lost it."""
    by_address = {address: node.node for node in case.nodes.values() for address in node.addresses}
    named: set[str] = set()
    for rank, end in failed:
        text = f"{end.message}\n{end.tail}"
        named |= {node for address, node in by_address.items() if node != rank.node and f"[{address}]" in text}
    return named.pop() if len(named) == 1 else None
