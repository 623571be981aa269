"""What was seen of the ranks of a hang: where each is, what it does there, and how that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives
from clusterctl.why.places import Doing, Place, at_storage, place_of, waits_for
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from clusterctl.why.case import Case, Look, Rank

_STUCK_SHIM_S = 4.0
"""The shim's thread writes every second: if older while the rank runs, something holds the interpreter lock."""
_BUSY = 0.5
_MOST_NAMED = 8
_UNTOLD = "no rank tells of itself, as with `job.inject: false`: nothing is counted, stacks and the kernel decide"
WAITS = (Doing.COLLECTIVE, Doing.BACKWARD, Doing.SETTING_UP)


class Seen:
    """What was seen of the ranks, and where each of them is."""

    def __init__(self, case: Case, ranks: Sequence[Rank], looks: Mapping[int, Look]) -> None:
        self.case, self.looks = case, looks
        self.nodes = {rank.rank: rank.node for rank in ranks}
        self.places = {rank: place_of(look) for rank, look in looks.items()}
        self.unseen = tuple(rank.rank for rank in ranks if rank.rank not in looks)
        self.missing = tuple(
            f"rank {rank.rank}: {rank.look.error if rank.look is not None else 'nobody looked at it'}"
            for rank in ranks
            if rank.rank not in looks
        ) + tuple(f"rank {rank}: no stack to be had" for rank, look in looks.items() if look.frames is None)
        if not any(look.seq or look.entries or look.status_age is not None for look in looks.values()):
            self.missing += (_UNTOLD,)

    def verdict(
        self, cls: Class, confidence: Confidence, summary: str, ranks: Iterable[int], why: Callable[[int], str]
    ) -> Verdict:
        """Return a verdict on these ranks; the others wait."""
        named = sorted(ranks)
        return Verdict(
            kind=Kind.HANG,
            cls=cls,
            confidence=confidence,
            summary=summary,
            culprits=tuple(self._culprit(rank, why(rank)) for rank in named[:_MOST_NAMED]),
            waiting=self.waiting(rank for rank in self.looks if rank not in named),
            missing=self.missing,
            next=(f"clusterctl stacks {self.case.run}", f"clusterctl logs {self.case.run} --rank {fold_ranks(named)}"),
        )

    def nobody(self, summary: str) -> Verdict:
        """Return the verdict of which rank it is nobody can tell, since some could not be looked at."""
        unseen = f"; nobody could look at {ranks_named(self.unseen)}" if self.unseen else ""
        return Verdict(
            kind=Kind.HANG,
            cls=Class.NOT_JOINED,
            confidence=Confidence.UNKNOWN,
            summary=summary + unseen,
            waiting=self.waiting(self.looks),
            missing=self.missing,
            next=(f"clusterctl stacks {self.case.run}",),
        )

    def holds_lock(self, rank: int) -> bool:
        """Return whether a rank keeps the interpreter lock, and its node is not just slow to write."""
        return holds_lock(self.looks[rank]) and not any(
            holds_lock(self.looks[other]) and self.in_collective(other) for other in self._beside(rank)
        )

    def surely_holds_lock(self, rank: int) -> bool:
        """Return whether it does and its node writes the files of other ranks, so that the disk is no reason."""
        look = self.looks[rank]
        beside = [self.looks[other] for other in self._beside(rank)]
        fresh = any(other.status_age is not None and not holds_lock(other) for other in beside)
        return self.holds_lock(rank) and (fresh or computes(look))

    def _beside(self, rank: int) -> list[int]:
        return [other for other in self.looks if other != rank and self.nodes[other] == self.nodes[rank]]

    def in_collective(self, rank: int) -> bool:
        """Return whether the stack of a rank says that it waits for its peers."""
        return self.places[rank].doing in (Doing.COLLECTIVE, Doing.BACKWARD) and not computes(self.looks[rank])

    def waiting(self, ranks: Iterable[int]) -> tuple[Waiting, ...]:
        """Return ranks by the place at which they wait, most of them first."""
        by_place: dict[tuple[str | None, str | None], list[int]] = {}
        for rank in sorted(ranks):
            place = self.places[rank]
            op = collectives.op_of(self.looks[rank]) or place.op
            by_place.setdefault((place.where, op), []).append(rank)
        ordered = sorted(by_place.items(), key=lambda each: -len(each[1]))
        return tuple(Waiting(ranks=fold_ranks(ranks), where=where, op=op) for (where, op), ranks in ordered)

    def _culprit(self, rank: int, why: str) -> Culprit:
        place = self.places.get(rank, Place(doing=Doing.UNKNOWN, where=None, op=None))
        return Culprit(rank=rank, node=self.nodes[rank], where=place.where, op=place.op, evidence=why)

    def called(self, ranks: Sequence[int]) -> str:
        """Return ranks for a sentence, with the node where it is one, and where they are."""
        named = sorted(ranks)
        nodes = {self.nodes[rank] for rank in named}
        wheres = {self.places[rank].where for rank in named if rank in self.places}
        on = f" on {next(iter(nodes))}" if len(nodes) == 1 else ""
        at = next(iter(wheres)) if len(wheres) == 1 else None
        return f"{ranks_named(named)}{on}" + (f" ({at})" if at else "")


def computes(look: Look) -> bool:
    """Return whether a rank works."""
    return (look.cpu or 0.0) >= _BUSY and look.state == "R"


def holds_lock(look: Look) -> bool:
    """Return whether the shim's own thread has not come to run for seconds, though nothing stops the rank."""
    return look.status_age is not None and look.status_age > _STUCK_SHIM_S and look.state not in ("T", "t", "D", "Z")


def how_absent(seen: Seen, ranks: Sequence[int]) -> Class:
    """Return the class of a hang in which these ranks are missing."""
    if any(seen.holds_lock(rank) for rank in ranks):
        return Class.GIL_HELD
    return Class.STORAGE if any(at_storage(seen.looks[rank]) for rank in ranks) else Class.NOT_JOINED


def ranks_named(ranks: Iterable[int]) -> str:
    """Return ranks for a sentence."""
    named = list(ranks)
    return f"rank{'s' if len(named) > 1 else ''} {fold_ranks(named)}"


def wait_of(ranks: Sequence[int]) -> str:
    """Return that ranks wait, for a sentence."""
    return f"{ranks_named(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _does(seen: Seen, rank: int) -> str:
    return "it keeps the interpreter lock" if seen.holds_lock(rank) else waits_for(seen.looks[rank])


def because(seen: Seen, ranks: Sequence[int]) -> str:
    """Return in words why these ranks are missing, where it is one reason for all."""
    reasons = {_does(seen, rank) for rank in ranks}
    words = reasons.pop() if len(reasons) == 1 else ""
    return f": {words}" if words else ""


def why_absent(seen: Seen, rank: int) -> str:
    """Return in words what a rank does instead of joining."""
    look, place = seen.looks[rank], seen.places[rank]
    parts = [_does(seen, rank)]
    if place.doing is Doing.LOADING and look.children:
        children = ", ".join(f"{child.pid} ({child.state}, {child.wchan or 'running'})" for child in look.children[:4])
        parts.append(f"its loader's processes: {children}")
    told = "; ".join(part for part in parts if part)
    return told or f"state {look.state or 'unknown'}" + (f" in {look.wchan}" if look.wchan else "")
