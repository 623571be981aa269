"""Ranks that ended with 0 while others go on: these miss them only where they wait for somebody."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import causes, collectives, hang
from clusterctl.why.places import place_of
from clusterctl.why.seen import WAITS, computes, ranks_named, wait_of
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from clusterctl.why.case import Case, Rank

_MOST_NAMED = 8


def judge(case: Case) -> Verdict | None:
    """Return the ranks that left others waiting; `None` where nobody left, or nobody is seen to wait."""
    left = [rank for rank in case.ranks if rank.end is not None and rank.end.well and not rank.end.stopped]
    alive = [rank for rank in case.ranks if rank.end is None]
    waiting = [rank for rank in alive if _waits(rank)]
    if not left or not waiting:
        return None
    if not case.stalled and case.seen_at is not None:
        return None  # what was seen is of an earlier standstill
    surely = case.stalled and all(collectives.in_default(rank.look) for rank in waiting if rank.look is not None)
    if not case.stalled:
        return _perhaps(left, waiting)
    blamed = hang.judge(case)
    others = () if blamed is None else blamed.culprits
    if blamed is not None and others:
        # Those that wait lack the one as the other.
        both = (*_culprits(left), *others)
        return replace(
            blamed, confidence=Confidence.AMBIGUOUS, culprits=both, summary=f"{blamed.summary}; {_ended(left)}"
        )
    return Verdict(
        kind=Kind.HANG,
        cls=Class.EXITED_EARLY,
        confidence=_confidence(left, waiting, alive) if surely else Confidence.LIKELY,
        summary=f"{_ended(left)} while {wait_of([rank.rank for rank in waiting])} for their peers",
        culprits=_culprits(left) if len(left) <= len(waiting) else (*_culprits(left), *_culprits(waiting)),
        waiting=(Waiting(ranks=fold_ranks([rank.rank for rank in waiting]), where=None, op="wait for their peers"),),
        next=causes.advice(Class.EXITED_EARLY, case.run, left[0].rank, None),
    )


def _perhaps(left: list[Rank], waiting: list[Rank]) -> Verdict:
    """A look at one moment of a run that moves: those that are through may belong to no group that is still used."""
    numbers = ranks_named([rank.rank for rank in waiting])
    return Verdict(
        kind=Kind.HANG,
        cls=Class.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS,
        summary=f"{_ended(left)}, and {numbers} may wait for their peers",
        culprits=(*_culprits(left), *_culprits(waiting)),
    )


def _confidence(left: list[Rank], waiting: list[Rank], alive: list[Rank]) -> Confidence:
    if len(left) > len(waiting):
        return Confidence.AMBIGUOUS  # one that waits where most are through may be the one that is wrong
    return Confidence.CERTAIN if len(waiting) == len(alive) and len(left) < len(waiting) else Confidence.LIKELY


def _waits(rank: Rank) -> bool:
    look = rank.look
    return look is not None and not look.error and place_of(look).doing in WAITS and not computes(look)


def _ended(left: list[Rank]) -> str:
    return f"rank{'s' if len(left) > 1 else ''} {fold_ranks([rank.rank for rank in left])} ended with 0"


def _culprits(ranks: list[Rank]) -> tuple[Culprit, ...]:
    return tuple(
        Culprit(
            rank=rank.rank,
            node=rank.node,
            where=place_of(rank.look).where if rank.end is None else None,
            op=place_of(rank.look).op if rank.end is None else None,
            evidence="it still waits for its peers" if rank.end is None else causes.said(rank.end),
        )
        for rank in ranks[:_MOST_NAMED]
    )
