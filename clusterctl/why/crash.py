"""Whose end began it: the first that leaves or breaks the group, whatever its exit code. Its peers die of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.why import causes
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting
from clusterctl.wording import fold_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.why.case import Case, End, Rank

_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_MOST_NAMED = 8
_NOTICED_S = 120.0
"""Peers of a rank that ends notice it at their next collective: later than this, another reason may be theirs."""
_ABSENT = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_GAVE_UP = re.compile(r"timed out|timeout", re.IGNORECASE)


def judge(case: Case) -> Verdict | None:
    """Return who failed by itself first; `None` where nobody did."""
    ended = [(rank, rank.end) for rank in case.ranks if rank.end is not None and not rank.end.stopped]
    failed = [(rank, end) for rank, end in ended if not end.well]
    alive = [rank for rank in case.ranks if rank.end is None]
    if not failed:
        return None  # those that ended with 0 while others wait are another matter: `left`
    left = [(rank, end) for rank, end in ended if end.well]
    own = [(rank, end) for rank, end in failed if not end.secondary and causes.class_of(end) is not Class.PEER_LOST]
    if own:
        return _of_own(case, own, failed)
    if left:
        return _left_early(case, left, failed, alive)
    return _of_victims(case, failed)


def _of_own(case: Case, own: Sequence[tuple[Rank, End]], failed: Sequence[tuple[Rank, End]]) -> Verdict:
    """Ranks that failed for a reason of their own: the first; or all, where they failed alike."""
    first, end = min(own, key=lambda each: (each[1].latest, each[0].rank))
    cls = causes.class_of(end)
    if cls is Class.MISMATCH:
        return _unlike(case, first, [rank for rank, _ in failed])
    alike = [(r, e) for r, e in own if causes.class_of(e) is cls and _plain(e.message) == _plain(end.message)]
    rivals = [r for r, e in own if r.rank != first.rank and _may_precede((r, e), (first, end))]
    strangers = [r for r in rivals if r.rank not in {a.rank for a, _ in alike}]
    named = alike if len(alike) > 1 and len(alike) == len(own) else [(first, end)]
    confidence = _confidence(
        cls, certain=(not rivals or len(named) == len(own)) and causes.told(end), doubtful=bool(strangers)
    )
    if confidence is Confidence.AMBIGUOUS:
        named = [(r, e) for r, e in own if r.rank == first.rank or r in strangers]
    who = _who(named)
    victims = [r for r, _ in failed if r.rank not in {n.rank for n, _ in named}]
    summary = f"{who} {'failed alike' if len(named) > 1 and confidence is not Confidence.AMBIGUOUS else 'failed first'}"
    return Verdict(
        kind=Kind.START if cls is Class.NOT_STARTED else Kind.CRASH,
        cls=cls,
        confidence=confidence,
        summary=f"{summary}: {causes.said(end)}",
        culprits=_culprits(named),
        waiting=_victims(victims),
        next=causes.advice(cls, case.run, first.rank, first.node),
    )


def _may_precede(one: tuple[Rank, End], other: tuple[Rank, End]) -> bool:
    """Whether one end may have come before the other: by the clock of their node where they share one."""
    (rank, end), (other_rank, other_end) = one, other
    if rank.node == other_rank.node and end.on_node_clock is not None and other_end.on_node_clock is not None:
        return end.on_node_clock[0] <= other_end.on_node_clock[1]
    return end.earliest <= other_end.latest


def _unlike(case: Case, first: Rank, failed: Sequence[Rank]) -> Verdict:
    """A rank got what does not fit what it brought: it is one of two, and which is wrong is not told by its end."""
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.MISMATCH,
        confidence=Confidence.AMBIGUOUS,
        summary=f"ranks brought to one collective what does not fit; {_who([(first, None)])} noticed it first",
        waiting=(Waiting(ranks=fold_ranks([rank.rank for rank in failed]), where=None, op="noticed it"),),
        next=("clusterctl up --set env.TORCH_DISTRIBUTED_DEBUG=DETAIL", f"clusterctl logs {case.run}"),
    )


def _left_early(
    case: Case, left: Sequence[tuple[Rank, End]], failed: Sequence[tuple[Rank, End]], alive: Sequence[Rank]
) -> Verdict:
    """Ranks that ended with 0 while others were not through: these lost their peers, or wait for them."""
    first_loss = min((end.latest for _, end in failed), default=None)
    early = [(r, e) for r, e in left if first_loss is None or e.earliest <= first_loss]
    named = early or list(left)
    certain = bool(early) and (
        first_loss is None or all(e.latest < first_loss <= e.latest + _NOTICED_S for _, e in named)
    )
    # One that goes on where most are through may have done a step too many.
    many = len(named) > len(failed) + len(alive)
    rest = [(r, e) for r, e in failed] if many else []
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS if many else Confidence.CERTAIN if certain else Confidence.LIKELY,
        summary=f"{_who(named)} ended with 0 while others were not through",
        culprits=_culprits([*named, *rest]),
        waiting=_victims([r for r, _ in failed] or alive),
        next=causes.advice(Class.EXITED_EARLY, case.run, named[0][0].rank, None),
    )


def _of_victims(case: Case, failed: Sequence[tuple[Rank, End]]) -> Verdict:
    """Every rank says that it lost a peer: whom they missed, or the address that most of them name, tells which."""
    missed = _missed(case, failed)
    if missed:
        return _not_joined(case, missed, failed)
    accused = _accused(case, failed)
    first, end = min(failed, key=lambda each: (each[1].latest, each[0].rank))
    if accused is not None:
        return Verdict(
            kind=Kind.CRASH,
            cls=Class.PEER_LOST,
            confidence=Confidence.AMBIGUOUS,
            summary=f"all ranks lost a peer; they name {accused}, and nobody there says why",
            culprits=_all_on(case, accused),
            waiting=_victims([r for r, _ in failed if r.node != accused]),
            next=causes.advice(Class.NODE_LOST, case.run, None, accused),
        )
    # A victim is never named alone: whom it lost may have been stopped by us before it ended by itself.
    named = failed if len(failed) > 1 else []
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.PEER_LOST,
        confidence=Confidence.AMBIGUOUS,
        summary=f"rank {first.rank} on {first.node} was the first to lose a peer: {causes.said(end)}",
        culprits=_culprits(named),
        waiting=() if named else _victims([first]),
        next=causes.advice(Class.PEER_LOST, case.run, first.rank, first.node),
    )


def _all_on(case: Case, node: str) -> tuple[Culprit, ...]:
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
            else causes.said(rank.end),
        )
        for rank in there[:_MOST_NAMED]
    )


def _missed(case: Case, failed: Sequence[tuple[Rank, End]]) -> list[Rank]:
    """Return for whom the others waited until they gave up: whom they name, else who did not give up as well."""
    texts = [f"{end.message}\n{end.tail}" for _, end in failed]
    numbers = {int(number) for text in texts for found in _ABSENT.findall(text) for number in re.findall(r"\d+", found)}
    named = [rank for rank in case.ranks if rank.rank in numbers]
    if named or not all(map(_GAVE_UP.search, texts)):
        return named
    others = [rank for rank in case.ranks if rank.rank not in {r.rank for r, _ in failed}]
    return others if len(others) < len(failed) else []


def _not_joined(case: Case, missed: Sequence[Rank], failed: Sequence[tuple[Rank, End]]) -> Verdict:
    who, gave_up = _who([(rank, None) for rank in missed]), fold_ranks([rank.rank for rank, _ in failed])
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.NOT_JOINED,
        confidence=Confidence.LIKELY if len(missed) == 1 else Confidence.AMBIGUOUS,
        summary=f"{who} did not join a collective, and ranks {gave_up} gave up waiting",
        culprits=tuple(
            Culprit(rank=rank.rank, node=rank.node, evidence="its peers waited for it in vain") for rank in missed
        ),
        waiting=_victims([rank for rank, _ in failed]),
        next=causes.advice(Class.NOT_JOINED, case.run, missed[0].rank, missed[0].node),
    )


def _accused(case: Case, failed: Sequence[tuple[Rank, End]]) -> str | None:
    """Return the one node of which ranks of other nodes say that they lost it."""
    by_address = {address: node.node for node in case.nodes.values() for address in node.addresses}
    named: set[str] = set()
    for rank, end in failed:
        text = f"{end.message}\n{end.tail}"
        named |= {node for address, node in by_address.items() if node != rank.node and f"[{address}]" in text}
    return named.pop() if len(named) == 1 else None


def _confidence(cls: Class, *, certain: bool, doubtful: bool) -> Confidence:
    if doubtful:
        return Confidence.AMBIGUOUS
    if cls in (Class.UNKNOWN,):
        return Confidence.LIKELY
    return Confidence.CERTAIN if certain else Confidence.LIKELY


def _plain(message: str) -> str:
    """Return a message without what differs between ranks that fail alike: numbers and addresses."""
    return _DIGITS.sub("#", message)


def _who(named: Sequence[tuple[Rank, End | None]]) -> str:
    ranks = [rank.rank for rank, _ in named]
    nodes = list(dict.fromkeys(rank.node for rank, _ in named))
    on = f" on {nodes[0]}" if len(nodes) == 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)}{on}"


def _culprits(named: Sequence[tuple[Rank, End]]) -> tuple[Culprit, ...]:
    found = []
    for rank, end in sorted(named, key=lambda each: each[0].rank)[:_MOST_NAMED]:
        line, function = causes.where(end)
        found.append(Culprit(rank=rank.rank, node=rank.node, where=line, op=function, evidence=causes.said(end)))
    return tuple(found)


def _victims(ranks: Sequence[Rank]) -> tuple[Waiting, ...]:
    if not ranks:
        return ()
    return (Waiting(ranks=fold_ranks([rank.rank for rank in ranks]), where=None, op="lost a peer"),)
