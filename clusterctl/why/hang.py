"""What was seen of the ranks of a hang: where each is, what it does there, and how that is said.

Who did not join, by what process groups count: of all that wait for somebody, the ranks that wait for nobody.

Who is missing where nothing is counted: by connections between ranks, by stacks, by what the kernel says.

Whom everybody waits for: what the kernel says of ranks first, then what their process groups count, then stacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from clusterctl.agent.protocol.record_types import TcpConnection
from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives
from clusterctl.why.collectives import MissingRanks
from clusterctl.why.evidence import Evidence, Node, Rank, RankSnapshot
from clusterctl.why.stack_position import (
    Activity,
    StackPosition,
    describe_kernel_wait,
    is_waiting_for_network,
    is_waiting_for_storage,
    locate_rank,
)
from clusterctl.why.verdict import MAX_NAMED, Class, Confidence, Culprit, Kind, Verdict, Waiting, ranks_phrase

_STUCK_SHIM_S = 4.0
"""The shim's thread writes every second: if older while the rank runs, something holds the interpreter lock."""
_BUSY = 0.5
_UNEXPLAINED = "no rank tells of itself, as with `job.inject: false`: nothing is counted, stacks and the kernel decide"
WAITS = (Activity.COLLECTIVE, Activity.BACKWARD, Activity.SETTING_UP)


class HangObservations:
    """What was seen of the ranks, and where each of them is."""

    def __init__(self, case: Evidence, ranks: Sequence[Rank], looks: Mapping[int, RankSnapshot]) -> None:
        self.case, self.looks = case, looks
        self.nodes = {rank.rank: rank.node for rank in ranks}
        self.places = {rank: locate_rank(look) for rank, look in looks.items()}
        self.unseen = tuple(rank.rank for rank in ranks if rank.rank not in looks)
        self.missing = tuple(
            f"rank {rank.rank}: {rank.look.error if rank.look is not None else 'nobody looked at it'}"
            for rank in ranks
            if rank.rank not in looks
        ) + tuple(f"rank {rank}: no stack to be had" for rank, look in looks.items() if look.frames is None)
        if not any(look.seq or look.entries or look.status_age is not None for look in looks.values()):
            self.missing += (_UNEXPLAINED,)

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
            culprits=tuple(self._culprit(rank, why(rank)) for rank in named[:MAX_NAMED]),
            waiting=self.waiting(rank for rank in self.looks if rank not in named),
            missing=self.missing,
            next=(f"clusterctl stacks {self.case.run}", f"clusterctl logs {self.case.run} --rank {fold_ranks(named)}"),
        )

    def undetermined(self, summary: str) -> Verdict:
        """Return the verdict of which rank it is nobody can tell, since some could not be looked at."""
        unseen = f"; nobody could look at {ranks_phrase(self.unseen)}" if self.unseen else ""
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
        return has_silent_shim(self.looks[rank]) and not any(
            has_silent_shim(self.looks[other]) and self.in_collective(other) for other in self._beside(rank)
        )

    def certainly_holds_lock(self, rank: int) -> bool:
        """Return whether it does and its node writes the files of other ranks, so that the disk is no reason."""
        look = self.looks[rank]
        beside = [self.looks[other] for other in self._beside(rank)]
        fresh = any(other.status_age is not None and not has_silent_shim(other) for other in beside)
        return self.holds_lock(rank) and (fresh or is_computing(look))

    def _beside(self, rank: int) -> list[int]:
        return [other for other in self.looks if other != rank and self.nodes[other] == self.nodes[rank]]

    def in_collective(self, rank: int) -> bool:
        """Return whether the stack of a rank says that it waits for its peers."""
        return self.places[rank].doing in (Activity.COLLECTIVE, Activity.BACKWARD) and not is_computing(
            self.looks[rank]
        )

    def waiting(self, ranks: Iterable[int]) -> tuple[Waiting, ...]:
        """Return ranks by the place at which they wait, most of them first."""
        by_place: dict[tuple[str | None, str | None], list[int]] = {}
        for rank in sorted(ranks):
            place = self.places[rank]
            op = collectives.current_operation(self.looks[rank]) or place.op
            by_place.setdefault((place.where, op), []).append(rank)
        ordered = sorted(by_place.items(), key=lambda each: -len(each[1]))
        return tuple(Waiting(ranks=fold_ranks(ranks), where=where, op=op) for (where, op), ranks in ordered)

    def _culprit(self, rank: int, why: str) -> Culprit:
        place = self.places.get(rank, StackPosition(doing=Activity.UNKNOWN, where=None, op=None))
        return Culprit(rank=rank, node=self.nodes[rank], where=place.where, op=place.op, evidence=why)

    def describe(self, ranks: Sequence[int]) -> str:
        """Return ranks for a sentence, with the node where it is one, and where they are."""
        named = sorted(ranks)
        wheres = {self.places[rank].where for rank in named if rank in self.places}
        at = next(iter(wheres)) if len(wheres) == 1 else None
        return ranks_phrase(named, (self.nodes[rank] for rank in named)) + (f" ({at})" if at else "")


def is_computing(look: RankSnapshot) -> bool:
    """Return whether a rank works."""
    return (look.cpu or 0.0) >= _BUSY and look.state == "R"


def has_silent_shim(look: RankSnapshot) -> bool:
    """Return whether the shim's own thread has not come to run for seconds, though nothing stops the rank."""
    return look.status_age is not None and look.status_age > _STUCK_SHIM_S and look.state not in ("T", "t", "D", "Z")


def classify_absence(seen: HangObservations, ranks: Sequence[int]) -> Class:
    """Return the class of a hang in which these ranks are missing."""
    if any(seen.holds_lock(rank) for rank in ranks):
        return Class.GIL_HELD
    return Class.STORAGE if any(is_waiting_for_storage(seen.looks[rank]) for rank in ranks) else Class.NOT_JOINED


def wait_phrase(ranks: Sequence[int]) -> str:
    """Return that ranks wait, for a sentence."""
    return f"{ranks_phrase(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _describe_activity(seen: HangObservations, rank: int) -> str:
    return "it keeps the interpreter lock" if seen.holds_lock(rank) else describe_kernel_wait(seen.looks[rank])


def reason_suffix(seen: HangObservations, ranks: Sequence[int]) -> str:
    """Return in words why these ranks are missing, where it is one reason for all."""
    reasons = {_describe_activity(seen, rank) for rank in ranks}
    words = reasons.pop() if len(reasons) == 1 else ""
    return f": {words}" if words else ""


def describe_absence(seen: HangObservations, rank: int) -> str:
    """Return in words what a rank does instead of joining."""
    look, place = seen.looks[rank], seen.places[rank]
    parts = [_describe_activity(seen, rank)]
    if place.doing is Activity.LOADING and look.children:
        children = ", ".join(
            f"{child['pid']} ({child['state']}, {child['wchan'] or 'running'})" for child in look.children[:4]
        )
        parts.append(f"its loader's processes: {children}")
    told = "; ".join(part for part in parts if part)
    return told or f"state {look.state or 'unknown'}" + (f" in {look.wchan}" if look.wchan else "")


_ELSEWHERE = (Activity.OWN, Activity.LOADING)


def judge_missing_ranks(seen: HangObservations) -> Verdict | None:
    """Ranks that have not begun what others wait in; of several groups the one whose ranks wait in none is the root."""
    found = collectives.find_missing_by_group(seen.looks)
    if not found:
        return None
    waiting = {rank for one in found for rank in one.waiting}
    late = {rank for one in found for rank in one.ranks}
    roots = [rank for rank in sorted(late - waiting) if not _is_in_collective(seen, rank)]
    if not roots:
        return _judge_cycle(seen, found, late | waiting)
    at_peers = [rank for rank in roots if seen.places[rank].doing in WAITS and not is_computing(seen.looks[rank])]
    if len(at_peers) == len(roots) < len(seen.looks):
        # They wait in a collective as well, in another one or in one that was never counted.
        return _verdict_on_missing(seen, found, roots, cls=Class.MISMATCH, certain=False)
    # Who waits in what is not counted (a key of the store) may wait for one of those that do not wait.
    free = [rank for rank in roots if rank not in at_peers] or roots
    # Whom nobody could look at may be missing as well.
    certain = len(roots) == 1 and collectives.current_operation(seen.looks[roots[0]]) is None and not seen.unseen
    cls = classify_absence(seen, free)
    certain = certain and (cls is not Class.GIL_HELD or seen.certainly_holds_lock(roots[0]))
    return _verdict_on_missing(seen, found, free, cls=cls, certain=certain)


def find_roots(seen: HangObservations) -> set[int]:
    """Return the ranks that others wait for and that wait for nobody, whatever the reason."""
    return {
        rank
        for rank in collectives.find_late_ranks(seen.looks)
        if not seen.in_collective(rank) and not _is_in_collective(seen, rank)
    }


def _verdict_on_missing(
    seen: HangObservations, found: Sequence[MissingRanks], roots: Sequence[int], *, cls: Class, certain: bool
) -> Verdict:
    op = next((one.op for one in found if one.op), None) or "a collective"
    waiting = sorted({rank for one in found for rank in one.waiting} - set(roots))
    return seen.verdict(
        cls,
        Confidence.CERTAIN if certain else Confidence.LIKELY,
        f"{seen.describe(roots)} did not join {op}, in which {wait_phrase(waiting)}{reason_suffix(seen, roots)}",
        roots,
        lambda rank: describe_absence(seen, rank),
    )


def _is_in_collective(seen: HangObservations, rank: int) -> bool:
    """Return whether a rank has begun something that has not ended, and does not do anything else meanwhile."""
    return collectives.current_operation(seen.looks[rank]) is not None and seen.places[rank].doing not in _ELSEWHERE


def _judge_cycle(seen: HangObservations, found: Sequence[MissingRanks], held: Collection[int]) -> Verdict | None:
    """Everybody who is waited for waits as well: in a circle, or for ranks of which no group tells."""
    circle = _find_cycle(found)
    if circle:
        fewer = _smaller_group(found, circle)
        order = f": {ranks_phrase(fewer)} took them in another order" if fewer else ""
        return seen.verdict(
            Class.DEADLOCK,
            Confidence.LIKELY,
            f"ranks {fold_ranks(circle)} wait for each other in several process groups{order}",
            fewer or circle,
            lambda rank: f"in {collectives.current_operation(seen.looks[rank]) or seen.places[rank].op}",
        )
    free = [
        rank
        for rank, place in seen.places.items()
        if place.doing in _ELSEWHERE and collectives.current_operation(seen.looks[rank]) is None
    ]
    if free and not seen.unseen:
        return seen.verdict(
            classify_absence(seen, free),
            Confidence.LIKELY if len(free) == 1 else Confidence.AMBIGUOUS,
            f"{seen.describe(free)} waits in no process group, and {wait_phrase(sorted(held))}"
            + reason_suffix(seen, free),
            free,
            lambda rank: describe_absence(seen, rank),
        )
    alone = _find_message_rank(seen, found)
    if alone is not None and not seen.unseen:
        waiting = sorted(set(held) - {alone})
        return seen.verdict(
            Class.MISMATCH,
            Confidence.LIKELY,
            f"no rank answers the message of {seen.describe([alone])}, and {wait_phrase(waiting)} in a collective",
            [alone],
            lambda rank: f"in {collectives.current_operation(seen.looks[rank])}, and no other rank is in a message",
        )
    return seen.undetermined(f"{wait_phrase(sorted(held))}, and none of those that could be seen is missing")


def _find_message_rank(seen: HangObservations, found: Sequence[MissingRanks]) -> int | None:
    """Return the one rank that all wait for and that is in a message between two ranks, where no other is in one."""
    late = {rank for one in found for rank in one.ranks}
    inside = [rank for rank, look in seen.looks.items() if collectives.is_in_message(look)]
    return inside[0] if len(inside) == 1 and late == set(inside) else None


def _smaller_group(found: Sequence[MissingRanks], circle: Collection[int]) -> list[int]:
    """Return the ranks of a circle that wait in another group than most of it; none where there is no such side."""
    sides = sorted((sorted(set(one.waiting) & set(circle)) for one in found), key=len)
    rest = [side for side in sides[:-1] if side]
    if len(rest) != 1 or not len(rest[0]) < len(sides[-1]):
        return []
    return rest[0] if set(rest[0]).isdisjoint(sides[-1]) else []


def _find_cycle(found: Sequence[MissingRanks]) -> list[int]:
    """Return the ranks that wait for each other; none where each chain of waiting has an end."""
    edges = {(rank, late) for one in found for rank in one.waiting for late in one.ranks}
    while True:
        inner = {rank for rank, _ in edges} & {late for _, late in edges}
        kept = {(rank, late) for rank, late in edges if rank in inner and late in inner}
        if kept == edges:
            return sorted(inner)
        edges = kept


_LOST = 2
"""So often a segment was sent again in vain: once may be chance."""
_LOOPBACK = ("127.", "::1")


def find_awaited_ranks(looks: Mapping[int, RankSnapshot], nodes: Mapping[int, str]) -> dict[int, int]:
    """Return from which rank each rank waits to read, where its main thread does and the other end is a rank's."""
    ends = {_socket_key(one, nodes[rank]): rank for rank, look in looks.items() for one in look.sockets}
    found = {}
    for rank, look in looks.items():
        for one in look.sockets:
            other = ends.get(_socket_key(one, nodes[rank], turned=True))
            if one["awaited"] and other is not None and other != rank and not one["unread"]:
                found[rank] = other
    return found


def find_broken_links(
    looks: Mapping[int, RankSnapshot], nodes: Mapping[int, str], known: Mapping[str, Node]
) -> list[tuple[str, str]]:
    """Return the pairs of nodes between which what ranks send is not acknowledged, the worst first."""
    by_address = {address: node.node for node in known.values() for address in node.addresses}
    ends = {_socket_key(one, nodes[rank]): nodes[rank] for rank, look in looks.items() for one in look.sockets}
    lost: Counter[tuple[str, str]] = Counter()
    for rank, look in looks.items():
        for one in look.sockets:
            other = ends.get(_socket_key(one, nodes[rank], turned=True)) or by_address.get(one["peer"])
            if one["lost"] >= _LOST and other is not None and other != nodes[rank]:
                first, second = sorted((nodes[rank], other))
                lost[first, second] += one["lost"]
    return [pair for pair, _ in lost.most_common()]


def find_slowest_socket(
    looks: Mapping[int, RankSnapshot], nodes: Mapping[int, str], pair: tuple[str, str]
) -> TcpConnection | None:
    """Return the connection from a rank of one of two nodes that has waited longest for an answer."""
    of_pair = [one for rank, look in looks.items() if nodes[rank] in pair for one in look.sockets]
    return max((one for one in of_pair if one["lost"] >= _LOST), key=lambda one: one["lost"], default=None)


def _socket_key(one: TcpConnection, node: str, *, turned: bool = False) -> tuple[str, ...]:
    """Return both ends of a connection; what is within a machine is told apart by its node."""
    here, there = f"{one['address']}:{one['port']}", f"{one['peer']}:{one['peer_port']}"
    inside = node if one["peer"].startswith(_LOOPBACK) else ""
    return (there, here, inside) if turned else (here, there, inside)


def judge_by_sockets(seen: HangObservations) -> Verdict | None:
    """Ranks that talk over sockets of their own: the one that others read from, and that reads from nobody."""
    if collectives.has_counts(seen.looks):
        return None
    reads = find_awaited_ranks(seen.looks, seen.nodes)
    circle = sorted(rank for rank in reads if _is_cyclic(reads, rank))
    if circle:
        return seen.verdict(
            Class.DEADLOCK,
            Confidence.LIKELY,
            f"{ranks_phrase(circle)} wait to read from each other",
            circle,
            lambda rank: f"it reads from rank {reads[rank]}",
        )
    roots = sorted(set(reads.values()) - set(reads))
    held = list(reads)
    if not roots:
        return None
    apart = [rank for rank in seen.looks if rank not in reads and rank not in roots]
    named = sorted({*roots, *apart})
    return seen.verdict(
        classify_absence(seen, named),
        Confidence.LIKELY if len(named) == 1 else Confidence.AMBIGUOUS,
        f"{seen.describe(named)} sent nothing, {wait_phrase(sorted(held))} to read from it{reason_suffix(seen, named)}",
        named,
        lambda rank: describe_absence(seen, rank),
    )


def _is_cyclic(reads: Mapping[int, int], rank: int) -> bool:
    """Return whether a chain of waiting leads back to where it begins."""
    at: int | None = rank
    for _ in reads:
        at = reads.get(at) if at is not None else None
        if at == rank:
            return True
    return False


def judge_by_stacks(seen: HangObservations) -> Verdict | None:
    """Without numbers: most ranks wait in the same operation, and a few are elsewhere."""
    waits = [rank for rank, place in seen.places.items() if place.doing in WAITS and not is_computing(seen.looks[rank])]
    if not waits and not collectives.has_counts(seen.looks):
        waits = [rank for rank, look in seen.looks.items() if is_waiting_for_network(look)]
    others = [rank for rank in seen.places if rank not in waits and seen.places[rank].doing is not Activity.UNKNOWN]
    if waits and others and len(others) <= len(waits):
        cls = classify_absence(seen, others)
        return seen.verdict(
            cls,
            Confidence.LIKELY if len(others) == 1 or 2 * len(others) < len(waits) else Confidence.AMBIGUOUS,
            f"{seen.describe(others)} is where no other rank is; {wait_phrase(waits)}" + reason_suffix(seen, others),
            others,
            lambda rank: describe_absence(seen, rank),
        )
    signatures = Counter((place.where, place.op) for place in seen.places.values())
    if len(signatures) < 2 or len(seen.places) < 3:
        return None
    rare = [rank for rank, place in seen.places.items() if signatures[place.where, place.op] == 1]
    most = max(signatures.values())
    if len(rare) != 1 or most < len(seen.places) - 1:
        return None
    alike = seen.places[rare[0]].doing in WAITS
    if alike and collectives.has_counts(seen.looks):
        return None  # the numbers say that it is not in another one; it may belong to another group
    return seen.verdict(
        Class.MISMATCH if alike else classify_absence(seen, rare),
        Confidence.LIKELY,
        f"{seen.describe(rare)} is where no other rank is" + reason_suffix(seen, rare),
        rare,
        lambda rank: describe_absence(seen, rank),
    )


def judge_by_kernel(seen: HangObservations) -> Verdict | None:
    """Without stacks and numbers: what the kernel says that most ranks wait for, and one does not."""
    if len(seen.looks) < 3 or any(look.frames for look in seen.looks.values()) or collectives.has_counts(seen.looks):
        return None
    does = {rank: describe_kernel_wait(look) or look.wchan or "" for rank, look in seen.looks.items()}
    (usual, most), *rest = Counter(does.values()).most_common()
    odd = [rank for rank, words in does.items() if words != usual]
    if not odd or not rest or most < 2 or most < len(odd):
        return None
    return seen.verdict(
        classify_absence(seen, odd),
        Confidence.LIKELY if len(odd) == 1 and describe_kernel_wait(seen.looks[odd[0]]) else Confidence.AMBIGUOUS,
        f"{ranks_phrase(odd)} does not wait for what the others wait for{reason_suffix(seen, odd)}",
        odd if most > len(odd) else list(does),
        lambda rank: describe_absence(seen, rank),
    )


_IDLE = 0.02


def judge_hang(case: Evidence) -> Verdict | None:
    """Return whom the ranks that have not ended wait for; `None` where nobody looked at them."""
    # A rank that lost its peers long after it was seen tells by that look where it waited.
    ranks = [rank for rank in case.ranks if rank.end is None or rank.end.stopped or rank.end.secondary]
    for rule in (_judge_lost_nodes, _judge_unstarted):
        verdict = rule(case, ranks)
        if verdict is not None:
            return verdict
    looks = {rank.rank: rank.look for rank in ranks if rank.look is not None and not rank.look.error}
    if not looks:
        return None
    seen = HangObservations(case, ranks, looks)
    rules: tuple[Callable[[HangObservations], Verdict | None], ...] = (
        _judge_stopped,
        _judge_kernel_waits,
        _judge_mismatches,
        judge_missing_ranks,
        _judge_gil,
        judge_by_sockets,
        judge_by_stacks,
        judge_by_kernel,
        _judge_all_together,
    )
    return next((found for rule in rules if (found := rule(seen)) is not None), None)


def _judge_lost_nodes(case: Evidence, ranks: Sequence[Rank]) -> Verdict | None:
    lost = sorted({rank.node for rank in ranks if case.nodes[rank.node].link == "lost"})
    if not lost:
        return None
    return Verdict(
        kind=Kind.HANG,
        cls=Class.NODE_LOST,
        confidence=Confidence.CERTAIN,
        summary=f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost: {case.nodes[lost[0]].why}",
        culprits=tuple(Culprit(rank=None, node=node, evidence=case.nodes[node].why) for node in lost),
        next=tuple(f"clusterctl health --nodes {node}" for node in lost[:3]),
    )


def judge_missing_nodes(case: Evidence) -> Verdict | None:
    """Return nodes that are lost, or ranks that never started, whether or not anything stalls."""
    ranks = [rank for rank in case.ranks if rank.end is None]
    return _judge_lost_nodes(case, ranks) or _judge_unstarted(case, ranks)


def _judge_unstarted(case: Evidence, ranks: Sequence[Rank]) -> Verdict | None:
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
        summary=f"{ranks_phrase(numbers)} {'never started' if case.over or case.stalled else said}",
        culprits=tuple(
            Culprit(rank=rank.rank, node=rank.node, evidence="its node has not told of its start")
            for rank in absent[:MAX_NAMED]
        ),
        next=(f"clusterctl status {case.run}",),
    )


def _judge_stopped(seen: HangObservations) -> Verdict | None:
    """Ranks that a signal or a debugger holds: nothing else can be the reason."""
    found = [rank for rank, look in seen.looks.items() if (look.state or "") in ("T", "t")]
    if not found:
        return None
    others = find_roots(seen) - set(found)
    if others:
        return _judge_ambiguous(seen, Class.STOPPED, found, others)
    return seen.verdict(
        Class.STOPPED,
        Confidence.CERTAIN,
        f"{seen.describe(found)} {'is' if len(found) == 1 else 'are'} stopped (state T) by a signal or a debugger",
        found,
        lambda _: "stopped by SIGSTOP, or by a debugger",
    )


def _judge_ambiguous(seen: HangObservations, cls: Class, found: Sequence[int], others: Iterable[int]) -> Verdict:
    """Ranks that the kernel holds, and others that are missing as well: which of them began it is not told."""
    return seen.verdict(
        cls,
        Confidence.AMBIGUOUS,
        f"{seen.describe(found)} {'is' if len(found) == 1 else 'are'} held by the kernel, "
        f"and {ranks_phrase(sorted(others))} did not join either",
        {*found, *others},
        lambda rank: describe_absence(seen, rank),
    )


def _judge_kernel_waits(seen: HangObservations) -> Verdict | None:
    """Ranks in a wait that nothing interrupts, and those that wait for a file system."""
    # Who waits for its peers is there by chance: a page that is read, a line of output that is written.
    looks = {rank: look for rank, look in seen.looks.items() if not seen.in_collective(rank)}
    fixed = [rank for rank, look in looks.items() if look.state == "D"]
    stored = [rank for rank, look in looks.items() if is_waiting_for_storage(look)]
    behind = collectives.find_late_ranks(seen.looks)
    found = stored or fixed
    if behind.isdisjoint(found) and behind:
        return None
    others = find_roots(seen) - set(found)
    if found and others:
        return _judge_ambiguous(seen, Class.STORAGE if stored else Class.DSTATE, found, others)
    if not found or (len(found) == len(seen.looks) > 1 and not stored):
        return None
    cls = Class.STORAGE if stored else Class.DSTATE
    # Who is in and out of such a wait does something, and was caught there by chance.
    idle = all((looks[rank].cpu or 0.0) < _IDLE for rank in found) and not seen.unseen
    what = "waits for a file system" if stored else "is in a wait that nothing interrupts (state D)"
    return seen.verdict(
        cls,
        Confidence.CERTAIN if set(found) <= set(fixed) & behind and idle else Confidence.LIKELY,
        f"{seen.describe(found)} {what}",
        found,
        lambda rank: f"state {seen.looks[rank].state}, in {seen.looks[rank].wchan or 'a place that nobody knows'}",
    )


def _judge_mismatches(seen: HangObservations) -> Verdict | None:
    """Ranks of one group that have begun different collectives under one number."""
    found = collectives.find_mismatches(seen.looks)
    if not found:
        return None
    first = found[0]
    what = ", ".join(f"{ranks_phrase(ranks)} {name}" for name, ranks in first.by.items())
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


def _judge_gil(seen: HangObservations) -> Verdict | None:
    """Ranks whose interpreter runs no thread but one."""
    found = [rank for rank in seen.looks if seen.holds_lock(rank)]
    if not found or len(found) == len(seen.looks) > 1:
        return None
    return seen.verdict(
        Class.GIL_HELD,
        Confidence.LIKELY,
        f"{seen.describe(found)} keeps the interpreter lock: none of its other threads runs",
        found,
        lambda rank: f"its status is {seen.looks[rank].status_age:.0f} s old while it runs",
    )


def _judge_all_together(seen: HangObservations) -> Verdict | None:
    """All ranks are at one place: nobody of them is missing."""
    cut = sorted({node.node for node in seen.case.nodes.values() if node.link == "unreachable"})
    if seen.unseen and not cut and all(place.doing in WAITS for place in seen.places.values()):
        return seen.undetermined("all ranks that could be seen wait for the others")
    places = {(place.where, place.op) for place in seen.places.values()}
    doing = {place.doing for place in seen.places.values()}
    if len(places) == 1 and doing <= {Activity.OWN, Activity.LOADING}:
        return seen.verdict(
            classify_absence(seen, list(seen.looks)),
            Confidence.LIKELY,
            f"all ranks are at {next(iter(places))[0]}" + reason_suffix(seen, list(seen.looks)),
            seen.looks,
            lambda rank: describe_absence(seen, rank),
        )
    if not doing & set(WAITS):
        return None
    return _judge_links(seen, doing, cut)


def _judge_links(seen: HangObservations, doing: Collection[Activity], cut: Sequence[str]) -> Verdict:
    """Nobody is missing: connections on which nothing is answered tell between which nodes, where there are any."""
    pairs = [] if set(doing) == {Activity.SETTING_UP} else find_broken_links(seen.looks, seen.nodes, seen.case.nodes)
    summary, cls = _describe_node_pairs(seen, pairs) if pairs else _describe_common_wait(seen, doing, cut)
    ends = dict.fromkeys(node for pair in pairs[:MAX_NAMED] for node in pair)
    evidence = dict.fromkeys(ends, "what its ranks send to the other node is not answered")
    evidence |= {node: seen.case.nodes[node].why for node in cut}
    return Verdict(
        kind=Kind.HANG,
        cls=cls,
        confidence=Confidence.LIKELY
        if len(pairs) == 1 and collectives.is_in_step(seen.looks)
        else Confidence.AMBIGUOUS,
        summary=summary,
        culprits=tuple(Culprit(rank=None, node=node, evidence=words) for node, words in evidence.items()),
        waiting=seen.waiting(seen.looks),
        missing=seen.missing,
        next=("clusterctl health --check net", f"clusterctl stacks {seen.case.run}"),
    )


def _describe_node_pairs(seen: HangObservations, pairs: Sequence[tuple[str, str]]) -> tuple[str, Class]:
    first, second = pairs[0]
    one = find_slowest_socket(seen.looks, seen.nodes, pairs[0])
    sent = f": {one['unacked']} bytes were sent {one['lost']} times again without an answer" if one is not None else ""
    more = f", and between {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return f"nothing arrives between {first} and {second}{more}{sent}; no rank is missing", Class.NETWORK


def _describe_common_wait(seen: HangObservations, doing: Collection[Activity], cut: Sequence[str]) -> tuple[str, Class]:
    if set(doing) == {Activity.SETTING_UP}:
        words = "all ranks wait in the set-up of the process group: the store, or a peer, does not answer"
        return words, Class.STORE_LOST
    if cut:
        return f"all ranks wait in the same operation, and {', '.join(cut)} cannot be reached", Class.NETWORK
    if collectives.is_in_step(seen.looks):
        return "all ranks have joined the same collective, and it does not end: look at the network", Class.NETWORK
    return "all ranks wait in collectives, and none is missing", Class.ALL_JOINED
