"""Ranks that others have waited for since long, in a run that nobody calls stalled: they show signs of life."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import duration_text, fold_ranks
from clusterctl.why.places import place_of
from clusterctl.why.seen import WAITS
from clusterctl.why.slow.apart import LONG_S
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.why.case import Case, Standing

_MOST_NAMED = 8


def holding(standing: Mapping[int, Standing], ranks: int) -> tuple[int, ...]:
    """Return the ranks that are in no collective while most have been in one, and nobody has made progress, for long.

    Args:
        standing: By rank.
        ranks: How many there are: where one is not counted nobody is named.
    """
    if len(standing) < ranks or any(one.seconds < LONG_S for one in standing.values()):
        return ()
    free = tuple(sorted(rank for rank, one in standing.items() if not one.waits))
    return free if 2 * len(free) <= ranks else ()


def judge(case: Case) -> Verdict | None:
    """Return whom the others have waited for since long; `None` where nobody waits so."""
    named = holding(case.standing, len(case.ranks))
    if not named:
        return None
    nodes = {rank.rank: rank.node for rank in case.ranks}
    places = {nodes[rank] for rank in named}
    whole = len(places) == 1 and {rank for rank, node in nodes.items() if node in places} == set(named)
    waiting = fold_ranks([rank for rank in case.standing if rank not in named])
    since = duration_text(min(one.seconds for one in case.standing.values()))
    does = {case.standing[rank].does for rank in named}
    what = f": {does.pop()}" if len(does) == 1 and "" not in does else ""
    on = f" on {min(places)}" if len(places) == 1 else ""
    return Verdict(
        kind=Kind.SLOW,
        cls=Class.SLOW,
        confidence=Confidence.LIKELY if len(named) == 1 or whole else Confidence.AMBIGUOUS,
        summary=f"ranks {waiting} have waited in a collective for {since} for "
        f"rank{'s' if len(named) > 1 else ''} {fold_ranks(named)}{on}{what}",
        culprits=tuple(_culprit(case, rank, nodes[rank]) for rank in named[:_MOST_NAMED]),
        waiting=(Waiting(ranks=waiting, where=None, op="wait in collectives"),),
        next=(f"clusterctl stacks {case.run} --rank {fold_ranks(named)}", f"clusterctl logs {case.run}"),
    )


def _culprit(case: Case, rank: int, node: str) -> Culprit:
    look = next((each.look for each in case.ranks if each.rank == rank), None)
    place = place_of(look)
    known = place.where is not None and place.doing not in WAITS
    return Culprit(
        rank=rank,
        node=node,
        where=place.where if known else None,
        op=place.op if known else None,
        evidence=case.standing[rank].does or "it is in no collective",
    )
