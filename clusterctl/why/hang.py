"""Whom everybody waits for: what the kernel says of ranks first, then what their process groups count, then stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.why import collectives, links, roots, uncounted
from clusterctl.why.places import Doing, at_storage
from clusterctl.why.seen import WAITS, Seen, because, how_absent, ranks_named, why_absent
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from clusterctl.why.case import Case, Rank

_MOST_NAMED = 8
_IDLE = 0.02


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
        roots.behind,
        _gil,
        uncounted.by_links,
        uncounted.odd_one,
        uncounted.by_kernel,
        _together,
    )
    return next((found for rule in rules if (found := rule(seen)) is not None), None)


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
    # A node that cannot be reached may have started them; and a start takes its time.
    known = case.over or (case.stalled and all(case.nodes[rank.node].link == "connected" for rank in absent))
    said = f"{'has' if len(numbers) == 1 else 'have'} not started yet"
    return Verdict(
        kind=Kind.START,
        cls=Class.NOT_STARTED,
        confidence=Confidence.CERTAIN if known else Confidence.LIKELY,
        summary=f"{ranks_named(numbers)} {'never started' if case.over or case.stalled else said}",
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
    others = roots.independent(seen) - set(found)
    if others:
        return _both(seen, Class.STOPPED, found, others)
    return seen.verdict(
        Class.STOPPED,
        Confidence.CERTAIN,
        f"{seen.called(found)} {'is' if len(found) == 1 else 'are'} stopped (state T): a signal or a debugger holds it",
        found,
        lambda _: "stopped by SIGSTOP, or by a debugger",
    )


def _both(seen: Seen, cls: Class, found: Sequence[int], others: Iterable[int]) -> Verdict:
    """Ranks that the kernel holds, and others that are missing as well: which of them began it is not told."""
    return seen.verdict(
        cls,
        Confidence.AMBIGUOUS,
        f"{seen.called(found)} {'is' if len(found) == 1 else 'are'} held by the kernel, "
        f"and {ranks_named(sorted(others))} did not join either",
        {*found, *others},
        lambda rank: why_absent(seen, rank),
    )


def _in_kernel(seen: Seen) -> Verdict | None:
    """Ranks in a wait that nothing interrupts, and those that wait for a file system."""
    # Who waits for its peers is there by chance: a page that is read, a line of output that is written.
    looks = {rank: look for rank, look in seen.looks.items() if not seen.in_collective(rank)}
    fixed = [rank for rank, look in looks.items() if look.state == "D"]
    stored = [rank for rank, look in looks.items() if at_storage(look)]
    behind = collectives.late(seen.looks)
    found = stored or fixed
    if behind.isdisjoint(found) and behind:
        return None
    others = roots.independent(seen) - set(found)
    if found and others:
        return _both(seen, Class.STORAGE if stored else Class.DSTATE, found, others)
    if not found or (len(found) == len(seen.looks) > 1 and not stored):
        return None
    cls = Class.STORAGE if stored else Class.DSTATE
    # Who is in and out of such a wait does something, and was caught there by chance.
    idle = all((looks[rank].cpu or 0.0) < _IDLE for rank in found) and not seen.unseen
    what = "waits for a file system" if stored else "is in a wait that nothing interrupts (state D)"
    return seen.verdict(
        cls,
        Confidence.CERTAIN if set(found) <= set(fixed) & behind and idle else Confidence.LIKELY,
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
    what = ", ".join(f"{ranks_named(ranks)} {name}" for name, ranks in first.by.items())
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


def _gil(seen: Seen) -> Verdict | None:
    """Ranks whose interpreter runs no thread but one."""
    found = [rank for rank in seen.looks if seen.holds_lock(rank)]
    if not found or len(found) == len(seen.looks) > 1:
        return None
    return seen.verdict(
        Class.GIL_HELD,
        Confidence.LIKELY,
        f"{seen.called(found)} keeps the interpreter lock: none of its other threads runs",
        found,
        lambda rank: f"its status is {seen.looks[rank].status_age:.0f} s old while it runs",
    )


def _together(seen: Seen) -> Verdict | None:
    """All ranks are at one place: nobody of them is missing."""
    cut = sorted({node.node for node in seen.case.nodes.values() if node.link == "unreachable"})
    if seen.unseen and not cut and all(place.doing in WAITS for place in seen.places.values()):
        return seen.nobody("all ranks that could be seen wait for the others")
    places = {(place.where, place.op) for place in seen.places.values()}
    doing = {place.doing for place in seen.places.values()}
    if len(places) == 1 and doing <= {Doing.OWN, Doing.LOADING}:
        return seen.verdict(
            how_absent(seen, list(seen.looks)),
            Confidence.LIKELY,
            f"all ranks are at {next(iter(places))[0]}" + because(seen, list(seen.looks)),
            seen.looks,
            lambda rank: why_absent(seen, rank),
        )
    if not doing & set(WAITS):
        return None
    return _all_held(seen, doing, cut)


def _all_held(seen: Seen, doing: Collection[Doing], cut: Sequence[str]) -> Verdict:
    """Nobody is missing: connections on which nothing is answered tell between which nodes, where there are any."""
    pairs = [] if set(doing) == {Doing.SETTING_UP} else links.broken(seen.looks, seen.nodes, seen.case.nodes)
    summary, cls = _between(seen, pairs) if pairs else _what_holds_all(seen, doing, cut)
    ends = dict.fromkeys(node for pair in pairs[:_MOST_NAMED] for node in pair)
    evidence = dict.fromkeys(ends, "what its ranks send to the other node is not answered")
    evidence |= {node: seen.case.nodes[node].why for node in cut}
    return Verdict(
        kind=Kind.HANG,
        cls=cls,
        confidence=Confidence.LIKELY if len(pairs) == 1 and collectives.in_step(seen.looks) else Confidence.AMBIGUOUS,
        summary=summary,
        culprits=tuple(Culprit(rank=None, node=node, evidence=words) for node, words in evidence.items()),
        waiting=seen.waiting(seen.looks),
        missing=seen.missing,
        next=("clusterctl health --check net", f"clusterctl stacks {seen.case.run}"),
    )


def _between(seen: Seen, pairs: Sequence[tuple[str, str]]) -> tuple[str, Class]:
    first, second = pairs[0]
    one = links.worst(seen.looks, seen.nodes, pairs[0])
    sent = f": {one.unacked} bytes were sent {one.lost} times again without an answer" if one is not None else ""
    more = f", and between {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return f"nothing arrives between {first} and {second}{more}{sent}; no rank is missing", Class.NETWORK


def _what_holds_all(seen: Seen, doing: Collection[Doing], cut: Sequence[str]) -> tuple[str, Class]:
    if set(doing) == {Doing.SETTING_UP}:
        words = "all ranks wait in the set-up of the process group: the store, or a peer, does not answer"
        return words, Class.STORE_LOST
    if cut:
        return f"all ranks wait in the same operation, and {', '.join(cut)} cannot be reached", Class.NETWORK
    if collectives.in_step(seen.looks):
        return "all ranks have joined the same collective, and it does not end: look at the network", Class.NETWORK
    return "all ranks wait in collectives, and none is missing", Class.ALL_JOINED
