"""Ranks that ended with 0 while others go on: these miss them only where they wait for somebody."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives, exit_causes, hang
from clusterctl.why.hang import WAITS, is_computing, name_ranks, wait_phrase
from clusterctl.why.stack_position import locate_rank
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from clusterctl.why.evidence import Evidence, Rank

_MAX_NAMED_EARLY = 8


def judge_early_exits(case: Evidence) -> Verdict | None:
    """Return the ranks that left others waiting; `None` where nobody left, or nobody is seen to wait."""
    left = [rank for rank in case.ranks if rank.end is not None and rank.end.well and not rank.end.stopped]
    alive = [rank for rank in case.ranks if rank.end is None]
    waiting = [rank for rank in alive if _is_waiting(rank)]
    if not left or not waiting:
        return None
    if not case.stalled and case.seen_at is not None:
        return None  # what was seen is of an earlier standstill
    surely = case.stalled and all(
        collectives.is_in_default_group(rank.look) for rank in waiting if rank.look is not None
    )
    if not case.stalled:
        return _perhaps(left, waiting)
    blamed = hang.judge_hang(case)
    others = () if blamed is None else blamed.culprits
    if blamed is not None and others:
        # Those that wait lack the one as the other.
        both = (*_early_culprits(left), *others)
        return replace(
            blamed,
            confidence=Confidence.AMBIGUOUS,
            culprits=both,
            summary=f"{blamed.summary}; {_describe_early_exits(left)}",
        )
    return Verdict(
        kind=Kind.HANG,
        cls=Class.EXITED_EARLY,
        confidence=_early_exit_confidence(left, waiting, alive) if surely else Confidence.LIKELY,
        summary=f"{_describe_early_exits(left)} while {wait_phrase([rank.rank for rank in waiting])} for their peers",
        culprits=_early_culprits(left)
        if len(left) <= len(waiting)
        else (*_early_culprits(left), *_early_culprits(waiting)),
        waiting=(Waiting(ranks=fold_ranks([rank.rank for rank in waiting]), where=None, op="wait for their peers"),),
        next=exit_causes.next_command(Class.EXITED_EARLY, case.run, left[0].rank, None),
    )


def _perhaps(left: list[Rank], waiting: list[Rank]) -> Verdict:
    """A look at one moment of a run that moves: those that are through may belong to no group that is still used."""
    numbers = name_ranks([rank.rank for rank in waiting])
    return Verdict(
        kind=Kind.HANG,
        cls=Class.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS,
        summary=f"{_describe_early_exits(left)}, and {numbers} may wait for their peers",
        culprits=(*_early_culprits(left), *_early_culprits(waiting)),
    )


def _early_exit_confidence(left: list[Rank], waiting: list[Rank], alive: list[Rank]) -> Confidence:
    if len(left) > len(waiting):
        return Confidence.AMBIGUOUS  # one that waits where most are through may be the one that is wrong
    return Confidence.CERTAIN if len(waiting) == len(alive) and len(left) < len(waiting) else Confidence.LIKELY


def _is_waiting(rank: Rank) -> bool:
    look = rank.look
    return look is not None and not look.error and locate_rank(look).doing in WAITS and not is_computing(look)


def _describe_early_exits(left: list[Rank]) -> str:
    return f"rank{'s' if len(left) > 1 else ''} {fold_ranks([rank.rank for rank in left])} ended with 0"


def _early_culprits(ranks: list[Rank]) -> tuple[Culprit, ...]:
    return tuple(
        Culprit(
            rank=rank.rank,
            node=rank.node,
            where=locate_rank(rank.look).where if rank.end is None else None,
            op=locate_rank(rank.look).op if rank.end is None else None,
            evidence="it still waits for its peers" if rank.end is None else exit_causes.describe_exit(rank.end),
        )
        for rank in ranks[:_MAX_NAMED_EARLY]
    )
