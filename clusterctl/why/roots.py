"""Who did not join, by what process groups count: of all that wait for somebody, the ranks that wait for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives
from clusterctl.why.places import Doing
from clusterctl.why.seen import WAITS, because, computes, how_absent, ranks_named, wait_of, why_absent
from clusterctl.why.verdict import Class, Confidence, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from clusterctl.why.collectives import Behind
    from clusterctl.why.seen import Seen

_ELSEWHERE = (Doing.OWN, Doing.LOADING)


def behind(seen: Seen) -> Verdict | None:
    """Ranks that have not begun what others wait in; of several groups the one whose ranks wait in none is the root."""
    found = collectives.behind(seen.looks)
    if not found:
        return None
    waiting = {rank for one in found for rank in one.waiting}
    late = {rank for one in found for rank in one.ranks}
    roots = [rank for rank in sorted(late - waiting) if not _waits(seen, rank)]
    if not roots:
        return _through_others(seen, found, late | waiting)
    at_peers = [rank for rank in roots if seen.places[rank].doing in WAITS and not computes(seen.looks[rank])]
    if len(at_peers) == len(roots) < len(seen.looks):
        # They wait in a collective as well, in another one or in one that was never counted.
        return _absent(seen, found, roots, cls=Class.MISMATCH, certain=False)
    # Who waits in what is not counted (a key of the store) may wait for one of those that do not wait.
    free = [rank for rank in roots if rank not in at_peers] or roots
    # Whom nobody could look at may be missing as well.
    certain = len(roots) == 1 and collectives.op_of(seen.looks[roots[0]]) is None and not seen.unseen
    cls = how_absent(seen, free)
    certain = certain and (cls is not Class.GIL_HELD or seen.surely_holds_lock(roots[0]))
    return _absent(seen, found, free, cls=cls, certain=certain)


def independent(seen: Seen) -> set[int]:
    """Return the ranks that others wait for and that wait for nobody, whatever the reason."""
    return {rank for rank in collectives.late(seen.looks) if not seen.in_collective(rank) and not _waits(seen, rank)}


def _absent(seen: Seen, found: Sequence[Behind], roots: Sequence[int], *, cls: Class, certain: bool) -> Verdict:
    op = next((one.op for one in found if one.op), None) or "a collective"
    waiting = sorted({rank for one in found for rank in one.waiting} - set(roots))
    return seen.verdict(
        cls,
        Confidence.CERTAIN if certain else Confidence.LIKELY,
        f"{seen.called(roots)} did not join {op}, in which {wait_of(waiting)}{because(seen, roots)}",
        roots,
        lambda rank: why_absent(seen, rank),
    )


def _waits(seen: Seen, rank: int) -> bool:
    """Return whether a rank has begun something that has not ended, and does not do anything else meanwhile."""
    return collectives.op_of(seen.looks[rank]) is not None and seen.places[rank].doing not in _ELSEWHERE


def _through_others(seen: Seen, found: Sequence[Behind], held: Collection[int]) -> Verdict | None:
    """Everybody who is waited for waits as well: in a circle, or for ranks of which no group tells."""
    circle = _circle(found)
    if circle:
        fewer = _fewer(found, circle)
        order = f": {ranks_named(fewer)} took them in another order" if fewer else ""
        return seen.verdict(
            Class.DEADLOCK,
            Confidence.LIKELY,
            f"ranks {fold_ranks(circle)} wait for each other in several process groups{order}",
            fewer or circle,
            lambda rank: f"in {collectives.op_of(seen.looks[rank]) or seen.places[rank].op}",
        )
    free = [
        rank
        for rank, place in seen.places.items()
        if place.doing in _ELSEWHERE and collectives.op_of(seen.looks[rank]) is None
    ]
    if free and not seen.unseen:
        return seen.verdict(
            how_absent(seen, free),
            Confidence.LIKELY if len(free) == 1 else Confidence.AMBIGUOUS,
            f"{seen.called(free)} waits in no process group, and {wait_of(sorted(held))}" + because(seen, free),
            free,
            lambda rank: why_absent(seen, rank),
        )
    alone = _with_a_message(seen, found)
    if alone is not None and not seen.unseen:
        waiting = sorted(set(held) - {alone})
        return seen.verdict(
            Class.MISMATCH,
            Confidence.LIKELY,
            f"{seen.called([alone])} waits in a message that nobody answers, and {wait_of(waiting)} in a collective",
            [alone],
            lambda rank: f"in {collectives.op_of(seen.looks[rank])}, and no other rank is in a message",
        )
    return seen.nobody(f"{wait_of(sorted(held))}, and none of those that could be seen is missing")


def _with_a_message(seen: Seen, found: Sequence[Behind]) -> int | None:
    """Return the one rank that all wait for and that is in a message between two ranks, where no other is in one."""
    late = {rank for one in found for rank in one.ranks}
    inside = [rank for rank, look in seen.looks.items() if collectives.in_message(look)]
    return inside[0] if len(inside) == 1 and late == set(inside) else None


def _fewer(found: Sequence[Behind], circle: Collection[int]) -> list[int]:
    """Return the ranks of a circle that wait in another group than most of it; none where there is no such side."""
    sides = sorted((sorted(set(one.waiting) & set(circle)) for one in found), key=len)
    rest = [side for side in sides[:-1] if side]
    if len(rest) != 1 or not len(rest[0]) < len(sides[-1]):
        return []
    return rest[0] if set(rest[0]).isdisjoint(sides[-1]) else []


def _circle(found: Sequence[Behind]) -> list[int]:
    """Return the ranks that wait for each other; none where each chain of waiting has an end."""
    edges = {(rank, late) for one in found for rank in one.waiting for late in one.ranks}
    while True:
        inner = {rank for rank, _ in edges} & {late for _, late in edges}
        kept = {(rank, late) for rank, late in edges if rank in inner and late in inner}
        if kept == edges:
            return sorted(inner)
        edges = kept
