"""Compares the collectives that ranks have begun, to find late ranks and ranks with a different operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from clusterctl.agent.protocol.record_types import FlightRecorderEntry
from clusterctl.why.evidence_types import RankSnapshot
from clusterctl.why.stack_position import Activity, is_computing, is_waiting_in_handle, locate_rank

_DEFAULT = "0"
"""The name of the default process group on every rank."""
_ANY_SOURCE = "*->"
_MAX_PAIRS = 16
"""The shim lists the messages of as many pairs."""
_MESSAGE = "->"
"""Part of the name under which the shim counts the messages from one rank of a group to another (`0:1->2`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRanks:
    """Ranks that have not begun a collective, or their part of a message, for which other ranks of their group wait.

    Attributes:
        number: The number of the collective in its process group.
        op: The name of the collective; `None` if the flight recorder does not know it.
    """

    group: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    number: int
    op: str | None

    @property
    def is_message(self) -> bool:
        """Whether this is a message between two ranks."""
        return _MESSAGE in self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks of a group that have begun different operations with the same number.

    Attributes:
        contradicted: Ranks that wait for data of another rank, or have data for it, while that rank names a different
            source or destination.
    """

    group: str
    number: int
    ranks_by_operation: Mapping[str, tuple[int, ...]]
    contradicted: tuple[int, ...] = ()

    @property
    def minority_ranks(self) -> tuple[int, ...]:
        """The ranks with another operation than most ranks; none if two operations are equally frequent."""
        *fewer, most = sorted(self.ranks_by_operation.values(), key=len)
        return tuple(sorted(r for ranks in fewer for r in ranks)) if fewer and len(fewer[-1]) < len(most) else ()


def find_late_by_group(snapshots: Mapping[int, RankSnapshot]) -> list[LateRanks]:
    """Return, for each process group, the ranks that have not begun the collective in which others wait.

    The messages from one rank to another count as the collectives of a group of two.
    """
    begun = {rank: _list_begun(snapshot) for rank, snapshot in snapshots.items()}
    by_group: dict[str, dict[int, tuple[int, bool]]] = {}
    for rank, groups in begun.items():
        for group, place in groups.items():
            by_group.setdefault(group, {})[rank] = place
    for rank, group in _list_unused_pairs(snapshots, by_group):
        by_group[group][rank] = (0, True)
    found: list[LateRanks] = []
    for group, members in sorted(by_group.items()):
        most = max(number for number, _ in members.values())
        late = tuple(rank for rank, (number, _) in sorted(members.items()) if number < most)
        waiting = tuple(rank for rank, (number, done) in sorted(members.items()) if number == most and not done)
        if late and waiting:
            names = (
                entry["op"]
                for rank in waiting
                for entry in snapshots[rank].entries or ()
                if (entry["group"], entry["number"]) == (group, most) and entry["p2p"] == (_MESSAGE in group)
            )
            found.append(LateRanks(group=group, ranks=late, waiting=waiting, number=most, op=next(names, None)))
    return found


def _list_begun(snapshot: RankSnapshot) -> dict[str, tuple[int, bool]]:
    """Return, by group, the number of the newest operation that a rank has begun, and whether the operation has ended.

    Without the flight recorder only the default group has the same name on all ranks.
    """
    if snapshot.entries is None:
        return {group: (begun, ended >= begun) for group, (begun, ended) in snapshot.seq.items() if group == _DEFAULT}
    found = {entry["group"]: (entry["number"], entry["done"]) for entry in snapshot.entries if not entry["p2p"]}
    if _DEFAULT in snapshot.seq and _DEFAULT not in found:
        # The newest entries of the flight recorder may all belong to other groups, which have more operations.
        begun, ended = snapshot.seq[_DEFAULT]
        found[_DEFAULT] = (begun, ended >= begun)
    messages = [entry for entry in snapshot.entries if _MESSAGE in entry["group"]]
    awaited = list_awaited_messages(snapshot)
    # The peers of a rank that receives from any rank cannot count its messages.
    counted = [entry for entry in messages if _ANY_SOURCE not in entry["group"]]
    return found | {entry["group"]: (entry["number"], entry not in awaited) for entry in counted}


def list_awaited_messages(snapshot: RankSnapshot) -> list[FlightRecorderEntry]:
    """Return the messages for which the main thread may wait: in `send` or `recv`, or in the `wait` of a handle."""
    position = locate_rank(snapshot)
    entries = [entry for entry in snapshot.entries or () if not entry["done"]]
    unfinished = [entry for entry in entries if _MESSAGE in entry["group"]]
    if is_computing(snapshot) or any(position.op == entry["op"] for entry in entries if not entry["p2p"]):
        return []
    match position.activity:
        case Activity.COLLECTIVE:
            return unfinished[-1:]
        case Activity.OWN:
            return unfinished if is_waiting_in_handle(snapshot) else []
        case _:
            return []


def _list_unused_pairs(
    snapshots: Mapping[int, RankSnapshot], by_group: Mapping[str, Collection[int]]
) -> list[tuple[int, str]]:
    """Return each rank with each pair in which others have begun a message with it, and the rank has begun none.

    Ranks with more pairs than the shim lists, and ranks that also receive from any rank, do not count.
    """
    ranks = {}
    for rank, one in snapshots.items():
        pairs = [entry["group"] for entry in one.entries or () if _MESSAGE in entry["group"]]
        if one.setup and one.entries is not None and len(pairs) < _MAX_PAIRS and _ANY_SOURCE not in "".join(pairs):
            ranks[one.setup["rank"]] = rank
    names = [name for name in by_group if name.startswith(f"{_DEFAULT}:")]
    ends = ((name, int(end)) for name in names for end in _split_pair(name))
    return [(ranks[end], name) for name, end in ends if end in ranks and ranks[end] not in by_group[name]]


def _split_pair(group: str) -> tuple[str, str]:
    """Return the source and the destination in the name of a pair of ranks."""
    source, _, destination = group.rpartition(":")[2].partition(_MESSAGE)
    return source, destination


def find_odd_receivers(
    snapshots: Mapping[int, RankSnapshot], found: Collection[LateRanks], cycle: Collection[int]
) -> list[int]:
    """Return the ranks of a cycle that alone wait for a message of this kind, if the others do what most ranks do.

    Most ranks send to the same rank, or receive from the same rank, as when one rank collects the parts of all others.
    """
    names = {e["group"] for one in snapshots.values() for e in one.entries or () if _MESSAGE in e["group"]}
    pairs = list(map(_split_pair, names))
    sources, destinations = Counter(source for source, _ in pairs), Counter(destination for _, destination in pairs)
    alike: dict[int, int] = {}
    for group in found:
        if group.is_message:
            source, destination = _split_pair(group.group)
            alike |= dict.fromkeys(group.waiting, max(sources[source], destinations[destination]))
    usual = [rank for rank in cycle if 2 * alike.get(rank, 0) > len(snapshots)]
    odd = [rank for rank in cycle if alike.get(rank) == 1]
    return odd if usual and len(odd) + len(usual) == len(cycle) else []


def count_messages(snapshots: Mapping[int, RankSnapshot]) -> dict[int, int]:
    """Return how many messages each rank has begun to send or to receive; nothing if a rank has too many pairs."""
    numbers = {
        rank: [entry["number"] for entry in one.entries or () if _MESSAGE in entry["group"]]
        for rank, one in snapshots.items()
    }
    if any(len(own) >= _MAX_PAIRS for own in numbers.values()):
        return {}
    return {rank: sum(own) for rank, own in numbers.items()}


def find_differing_messages(snapshots: Mapping[int, RankSnapshot]) -> dict[int, str]:
    """Return two ranks that wait for each other in one message with different sizes or tags, and these as words.

    If other ranks wait with the sizes and tag of one of the two, only the other one is in the result.
    """
    awaited = [(rank, entry) for rank, one in snapshots.items() for entry in list_awaited_messages(one)]
    usual = Counter(entry["sizes"] for _, entry in awaited)
    ends: dict[tuple[str, int], dict[int, str]] = {}
    for rank, entry in awaited:
        ends.setdefault((entry["group"], entry["number"]), {})[rank] = entry["sizes"]
    found = next((sizes for sizes in ends.values() if len(set(sizes.values())) > 1), {})
    rare = {rank: sizes for rank, sizes in found.items() if usual[sizes] == 1}
    return rare if len(rare) < len(found) else found


def find_highest_message(snapshots: Mapping[int, RankSnapshot], groups: Collection[str]) -> int:
    """Return the highest number of messages between two ranks, apart from these groups; 0 without messages."""
    entries = (entry for snapshot in snapshots.values() for entry in snapshot.entries or ())
    return max((e["number"] for e in entries if _MESSAGE in e["group"] and e["group"] not in groups), default=0)


def find_late_ranks(snapshots: Mapping[int, RankSnapshot]) -> set[int]:
    """Return the ranks that have not begun a collective in which others wait, and that wait in no collective.

    Messages do not count, because the rank that waits for a message may be wrong.
    """
    found = [group for group in find_late_by_group(snapshots) if not group.is_message]
    return {rank for one in found for rank in one.ranks} - {rank for one in found for rank in one.waiting}


def find_mismatches(snapshots: Mapping[int, RankSnapshot]) -> list[Mismatch]:
    """Return the groups and numbers at which ranks have begun different collectives."""
    by_place: dict[tuple[str, int], dict[int, FlightRecorderEntry]] = {}
    for rank, snapshot in snapshots.items():
        for entry in snapshot.entries or ():
            if not entry["p2p"]:
                by_place.setdefault((entry["group"], entry["number"]), {})[rank] = entry
    found = []
    for (group, number), entries in sorted(by_place.items()):
        if all(entry["done"] for entry in entries.values()):
            continue
        # Operations that have ended count too: a rank that only sends may end its operation at once.
        operations = _group_by_operation(entries)
        if len(operations) > 1:
            found.append(Mismatch(group=group, number=number, ranks_by_operation=operations))
        elif (differing := _find_differing_peers(group, number, entries)) is not None:
            found.append(differing)
    return found


def _find_differing_peers(group: str, number: int, entries: Mapping[int, FlightRecorderEntry]) -> Mismatch | None:
    """Return ranks that have begun the same operation with different sources or destinations; `None` if none did."""
    peers = {rank: peer for rank, entry in sorted(entries.items()) if (peer := entry["peer"]) is not None}
    by_peer = {peer: tuple(rank for rank in peers if peers[rank] == peer) for peer in peers.values()}
    if len(by_peer) < 2:
        return None
    op = next(entry["op"] for entry in entries.values())
    # A rank may name itself as its peer. While such a rank waits, it contradicts neither itself nor a rank that names
    # it.
    contradicted = tuple(
        rank
        for rank, peer in peers.items()
        if peer in entries and (entries[peer]["done"] or peers.get(peer, peer) != peer)
    )
    return Mismatch(
        group=group,
        number=number,
        ranks_by_operation={f"{op} with rank {peer}": ranks for peer, ranks in by_peer.items()},
        contradicted=contradicted if len(contradicted) < len(peers) else (),
    )


def are_in_same_collective(snapshots: Mapping[int, RankSnapshot]) -> bool:
    """Return whether all ranks have begun the same operation and no rank has ended it."""
    begun = [_list_begun(snapshot) for snapshot in snapshots.values()]
    common = set.intersection(*(set(groups) for groups in begun)) if begun else set()
    return any(len({groups[name] for groups in begun}) == 1 and not begun[0][name][1] for name in common)


def find_current_operation(snapshot: RankSnapshot) -> str | None:
    """Return the newest operation that a rank has begun and not ended."""
    return next((entry["op"] for entry in _list_unfinished(snapshot)), None)


def is_in_point_to_point(snapshot: RankSnapshot) -> bool:
    """Return whether the newest unfinished operation of a rank is a send to another rank, or a receive from one."""
    return next((entry["p2p"] for entry in _list_unfinished(snapshot)), False)


def _list_unfinished(snapshot: RankSnapshot) -> list[FlightRecorderEntry]:
    """Return the operations that a rank has begun and not ended, newest first; of the messages, those awaited."""
    awaited = list_awaited_messages(snapshot)
    entries = reversed(snapshot.entries or ())
    return [entry for entry in entries if not entry["done"] and (_MESSAGE not in entry["group"] or entry in awaited)]


def is_in_default_group(snapshot: RankSnapshot) -> bool:
    """Return whether a rank has begun an operation of the default group that has not ended."""
    begun = _list_begun(snapshot).get(_DEFAULT)
    return begun is not None and not begun[1]


def has_collective_counts(snapshots: Mapping[int, RankSnapshot]) -> bool:
    """Return whether any rank reports numbers of collectives."""
    return any(snapshot.entries or snapshot.seq for snapshot in snapshots.values())


def _group_by_operation(entries: Mapping[int, FlightRecorderEntry]) -> dict[str, tuple[int, ...]]:
    """Return ranks by operation. If all ranks have begun the same operation, its name includes sizes and types."""
    ops = {entry["op"] for entry in entries.values()}
    found: dict[str, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        alike = len(ops) == 1 and entry["op"] not in _OF_ANY_SIZE
        name = f"{entry['op']} of {entry['sizes']} {entry['dtypes']}".rstrip() if alike else entry["op"]
        found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


_OF_ANY_SIZE = frozenset({"all_gather", "allgather", "all_to_all", "alltoall", "gather", "scatter", "barrier"})
"""Operations in which ranks may pass tensors of different sizes."""
