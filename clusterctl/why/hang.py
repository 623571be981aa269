"""Whom everybody waits for: what the kernel says of ranks first, then what their process groups count, then stacks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from clusterctl.why import collectives
from clusterctl.why.places import Doing, Place, at_storage, place_of, waits_for
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting
from clusterctl.wording import fold_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from clusterctl.why.case import Case, Look, Rank

_STUCK_SHIM_S = 4.0
"""The shim's thread writes every second: if older while the rank runs, something holds the interpreter lock."""
_BUSY = 0.5
_WAITS = (Doing.COLLECTIVE, Doing.BACKWARD, Doing.SETTING_UP)
_MOST_NAMED = 8


def judge(case: Case) -> Verdict | None:
    """Return whom the ranks that have not ended wait for; `None` where nobody looked at them."""
    # A rank that lost its peers long after it was seen tells by that look where it waited.
    ranks = [rank for rank in case.ranks if rank.end is None or rank.end.stopped or rank.end.secondary]
    for rule in (_nodes_lost, _not_started):
        verdict = rule(case, ranks)
        if verdict is not None:
            return verdict
    looks = {rank.rank: rank.look for rank in ranks if rank.look is not None and not rank.look.error}
    if not looks:
        return None
    seen = Seen(case, ranks, looks)
    rules: tuple[Callable[[Seen], Verdict | None], ...] = (
        _stopped,
        _in_kernel,
        _mismatched,
        _behind,
        _gil,
        _odd_one,
        _together,
    )
    return next((found for rule in rules if (found := rule(seen)) is not None), None)


class Seen:
    """What was seen of the ranks, and where each of them is."""

    def __init__(self, case: Case, ranks: Sequence[Rank], looks: Mapping[int, Look]) -> None:
        self.case, self.looks = case, looks
        self.nodes = {rank.rank: rank.node for rank in ranks}
        self.places = {rank: place_of(look) for rank, look in looks.items()}
        self.missing = tuple(
            f"rank {rank.rank}: {rank.look.error if rank.look is not None else 'nobody looked at it'}"
            for rank in ranks
            if rank.rank not in looks
        ) + tuple(f"rank {rank}: no stack to be had" for rank, look in looks.items() if look.frames is None)

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
        return f"{_ranks(named)}{on}" + (f" ({at})" if at else "")


def _nodes_lost(case: Case, ranks: Sequence[Rank]) -> Verdict | None:
    lost = sorted({rank.node for rank in ranks if case.nodes[rank.node].link == "lost"})
    if not lost:
        return None
    return Verdict(
        kind=Kind.HANG,
        cls=Class.NODE_LOST,
        confidence=Confidence.CERTAIN,
        summary=f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost: {case.nodes[lost[0]].why}",
        culprits=tuple(Culprit(rank=None, node=node, evidence=case.nodes[node].why) for node in lost),
        next=tuple(f"clusterctl health --node {node}" for node in lost[:3]),
    )


def missing_ranks(case: Case) -> Verdict | None:
    """Return nodes that are lost, or ranks that never started, whether or not anything stalls."""
    ranks = [rank for rank in case.ranks if rank.end is None]
    return _nodes_lost(case, ranks) or _not_started(case, ranks)


def _not_started(case: Case, ranks: Sequence[Rank]) -> Verdict | None:
    absent = [rank for rank in ranks if not rank.started]
    if not absent or len(absent) == len(case.ranks):
        return None
    numbers = [rank.rank for rank in absent]
    return Verdict(
        kind=Kind.START,
        cls=Class.NOT_STARTED,
        confidence=Confidence.CERTAIN,
        summary=f"rank{'s' if len(numbers) > 1 else ''} {fold_ranks(numbers)} never started",
        culprits=tuple(
            Culprit(rank=rank.rank, node=rank.node, evidence="its node has not told of its start")
            for rank in absent[:_MOST_NAMED]
        ),
        next=(f"clusterctl status {case.run}",),
    )


def _stopped(seen: Seen) -> Verdict | None:
    """Ranks that a signal or a debugger holds: nothing else can be the reason."""
    found = [rank for rank, look in seen.looks.items() if (look.state or "") in ("T", "t")]
    if not found:
        return None
    return seen.verdict(
        Class.STOPPED,
        Confidence.CERTAIN,
        f"{seen.called(found)} {'is' if len(found) == 1 else 'are'} stopped (state T): a signal or a debugger holds it",
        found,
        lambda _: "stopped by SIGSTOP, or by a debugger",
    )


def _in_kernel(seen: Seen) -> Verdict | None:
    """Ranks in a wait that nothing interrupts, and those that wait for a file system."""
    fixed = [rank for rank, look in seen.looks.items() if look.state == "D"]
    stored = [rank for rank, look in seen.looks.items() if at_storage(look)]
    found = stored or fixed
    if not found or (len(found) == len(seen.looks) > 1 and not stored):
        return None
    cls = Class.STORAGE if stored else Class.DSTATE
    what = "waits for a file system" if stored else "is in a wait that nothing interrupts (state D)"
    return seen.verdict(
        cls,
        Confidence.CERTAIN
        if len(found) < len(seen.looks) and all(rank in fixed for rank in found)
        else Confidence.LIKELY,
        f"{seen.called(found)} {what}",
        found,
        lambda rank: f"state {seen.looks[rank].state}, in {seen.looks[rank].wchan or 'a place that nobody knows'}",
    )


def _mismatched(seen: Seen) -> Verdict | None:
    """Ranks of one group that have begun different collectives under one number."""
    found = collectives.mismatches(seen.looks)
    if not found:
        return None
    first = found[0]
    what = ", ".join(f"{_ranks(ranks)} {name}" for name, ranks in first.by.items())
    odd = first.odd
    named = odd or tuple(rank for ranks in first.by.values() for rank in ranks)
    names = {rank: name for name, ranks in first.by.items() for rank in ranks}
    return seen.verdict(
        Class.MISMATCH,
        Confidence.CERTAIN if odd and len(odd) == 1 else Confidence.LIKELY if odd else Confidence.AMBIGUOUS,
        f"ranks have begun different collectives as number {first.number}: {what}",
        named,
        lambda rank: f"began {names[rank]}",
    )


def _behind(seen: Seen) -> Verdict | None:
    """Ranks that have not begun what others wait in; of several groups the one whose ranks wait in none is the root."""
    found = collectives.behind(seen.looks)
    if not found:
        return None
    waiting = {rank for one in found for rank in one.waiting}
    late = {rank for one in found for rank in one.ranks}
    roots = sorted(late - waiting)
    if not roots:
        return seen.verdict(
            Class.DEADLOCK,
            Confidence.LIKELY,
            f"ranks {fold_ranks(late)} wait for each other in several process groups",
            late,
            lambda rank: f"in {collectives.op_of(seen.looks[rank]) or seen.places[rank].op}",
        )
    op = next((one.op for one in found if one.op), None) or "a collective"
    at_peers = [rank for rank in roots if seen.places[rank].doing in _WAITS and not _computes(seen.looks[rank])]
    if len(at_peers) == len(roots) and len(roots) < len(seen.looks):
        # They wait in a collective as well, in another one or in one that was never counted.
        cls, confidence = Class.MISMATCH, Confidence.LIKELY
    else:
        cls = _how_absent(seen, roots)
        confidence = Confidence.CERTAIN if len(roots) == 1 else Confidence.LIKELY
    return seen.verdict(
        cls,
        confidence,
        f"{seen.called(roots)} did not join {op}, in which {_ranks(waiting - set(roots))} wait" + _because(seen, roots),
        roots,
        lambda rank: _why_absent(seen, rank),
    )


def _gil(seen: Seen) -> Verdict | None:
    """Ranks whose interpreter runs no thread but one."""
    found = [rank for rank, look in seen.looks.items() if _holds_lock(look)]
    if not found or len(found) == len(seen.looks) > 1:
        return None
    return seen.verdict(
        Class.GIL_HELD,
        Confidence.LIKELY,
        f"{seen.called(found)} keeps the interpreter lock: none of its other threads runs",
        found,
        lambda rank: f"its status is {seen.looks[rank].status_age:.0f} s old while it runs",
    )


def _odd_one(seen: Seen) -> Verdict | None:
    """Without numbers: most ranks wait in the same operation, and a few are elsewhere."""
    waits = [rank for rank, place in seen.places.items() if place.doing in _WAITS and not _computes(seen.looks[rank])]
    others = [rank for rank in seen.places if rank not in waits and seen.places[rank].doing is not Doing.UNKNOWN]
    if waits and others and len(others) <= len(waits):
        cls = _how_absent(seen, others)
        return seen.verdict(
            cls,
            Confidence.LIKELY if len(others) == 1 or 2 * len(others) < len(waits) else Confidence.AMBIGUOUS,
            f"{seen.called(others)} is where no other rank is; ranks {fold_ranks(waits)} wait" + _because(seen, others),
            others,
            lambda rank: _why_absent(seen, rank),
        )
    signatures = Counter((place.where, place.op) for place in seen.places.values())
    if len(signatures) < 2 or len(seen.places) < 3:
        return None
    rare = [rank for rank, place in seen.places.items() if signatures[place.where, place.op] == 1]
    most = max(signatures.values())
    if len(rare) != 1 or most < len(seen.places) - 1:
        return None
    alike = seen.places[rare[0]].doing in _WAITS
    return seen.verdict(
        Class.MISMATCH if alike else _how_absent(seen, rare),
        Confidence.LIKELY,
        f"{seen.called(rare)} is where no other rank is" + _because(seen, rare),
        rare,
        lambda rank: _why_absent(seen, rank),
    )


def _together(seen: Seen) -> Verdict | None:
    """All ranks are at one place: nobody of them is missing."""
    cut = sorted({node.node for node in seen.case.nodes.values() if node.link == "unreachable"})
    places = {(place.where, place.op) for place in seen.places.values()}
    doing = {place.doing for place in seen.places.values()}
    if len(places) == 1 and doing <= {Doing.OWN, Doing.LOADING}:
        return seen.verdict(
            _how_absent(seen, list(seen.looks)),
            Confidence.LIKELY,
            f"all ranks are at {next(iter(places))[0]}" + _because(seen, list(seen.looks)),
            seen.looks,
            lambda rank: _why_absent(seen, rank),
        )
    if not doing & set(_WAITS):
        return None
    if Doing.SETTING_UP in doing and len(doing) == 1:
        summary, cls = (
            "all ranks wait in the set-up of the process group: the store, or a peer, does not answer",
            Class.STORE_LOST,
        )
    elif cut:
        summary, cls = f"all ranks wait in the same operation, and {', '.join(cut)} cannot be reached", Class.NETWORK
    elif collectives.in_step(seen.looks):
        summary, cls = (
            "all ranks have joined the same collective, and it does not end: look at the network",
            Class.NETWORK,
        )
    else:
        summary, cls = "all ranks wait in collectives, and none is missing", Class.ALL_JOINED
    return Verdict(
        kind=Kind.HANG,
        cls=cls,
        confidence=Confidence.AMBIGUOUS,
        summary=summary,
        culprits=tuple(Culprit(rank=None, node=node, evidence=seen.case.nodes[node].why) for node in cut),
        waiting=seen.waiting(seen.looks),
        missing=seen.missing,
        next=("clusterctl health --check net", f"clusterctl stacks {seen.case.run}"),
    )


def _computes(look: Look) -> bool:
    return (look.cpu or 0.0) >= _BUSY and look.state == "R"


def _holds_lock(look: Look) -> bool:
    return look.status_age is not None and look.status_age > _STUCK_SHIM_S and look.state not in ("T", "t", "D", "Z")


def _how_absent(seen: Seen, ranks: Sequence[int]) -> Class:
    if any(_holds_lock(seen.looks[rank]) for rank in ranks):
        return Class.GIL_HELD
    return Class.STORAGE if any(at_storage(seen.looks[rank]) for rank in ranks) else Class.NOT_JOINED


def _ranks(ranks: Iterable[int]) -> str:
    named = list(ranks)
    return f"rank{'s' if len(named) > 1 else ''} {fold_ranks(named)}"


def _does(look: Look) -> str:
    return "it keeps the interpreter lock" if _holds_lock(look) else waits_for(look)


def _because(seen: Seen, ranks: Sequence[int]) -> str:
    reasons = {_does(seen.looks[rank]) for rank in ranks}
    words = reasons.pop() if len(reasons) == 1 else ""
    return f": {words}" if words else ""


def _why_absent(seen: Seen, rank: int) -> str:
    look, place = seen.looks[rank], seen.places[rank]
    parts = [_does(look)]
    if place.doing is Doing.LOADING and look.children:
        children = ", ".join(f"{child.pid} ({child.state}, {child.wchan or 'running'})" for child in look.children[:4])
        parts.append(f"its loader's processes: {children}")
    told = "; ".join(part for part in parts if part)
    return told or f"state {look.state or 'unknown'}" + (f" in {look.wchan}" if look.wchan else "")
