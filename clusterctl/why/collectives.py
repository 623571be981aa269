"""Who did not join a collective, and who began another one, by the numbers that process groups count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterctl.agent.protocol.record_types import FlightRecorderEntry
from clusterctl.why.evidence import RankSnapshot

_DEFAULT = "0"
"""Name of the default process group on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRanks:
    """Ranks that have not begun what others of their group wait in.

    Attributes:
        number: What the others have begun.
        op: Its name, where the flight recorder tells.
    """

    group: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    number: int
    op: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks of a group that have begun different things under one number; `by` is what, with who."""

    group: str
    number: int
    by: Mapping[str, tuple[int, ...]]

    @property
    def odd(self) -> tuple[int, ...]:
        """Those that are not with the most, where one thing was begun by the most."""
        *fewer, most = sorted(self.by.values(), key=len)
        return tuple(sorted(r for ranks in fewer for r in ranks)) if fewer and len(fewer[-1]) < len(most) else ()


def find_missing_by_group(looks: Mapping[int, RankSnapshot]) -> list[MissingRanks]:
    """Return, by process group, who has not begun what others wait in; groups of one rank say nothing."""
    begun = {rank: _begun(look) for rank, look in looks.items()}
    found: list[MissingRanks] = []
    for group in sorted({name for groups in begun.values() for name in groups}):
        members = {rank: groups[group] for rank, groups in begun.items() if group in groups}
        most = max(number for number, _ in members.values())
        late = tuple(rank for rank, (number, _) in sorted(members.items()) if number < most)
        waiting = tuple(rank for rank, (number, done) in sorted(members.items()) if number == most and not done)
        if late and waiting:
            op = _named(looks, waiting, group, most)
            found.append(MissingRanks(group=group, ranks=late, waiting=waiting, number=most, op=op))
    return found


def _begun(look: RankSnapshot) -> dict[str, tuple[int, bool]]:
    """Return the newest number that a rank has begun in each group, and whether it has ended.

    Without the recorder only the default group is known by a name that all ranks share.
    """
    if look.entries is None:
        return {group: (begun, ended >= begun) for group, (begun, ended) in look.seq.items() if group == _DEFAULT}
    found = {entry["group"]: (entry["number"], entry["done"]) for entry in look.entries if not entry["p2p"]}
    if _DEFAULT in look.seq and _DEFAULT not in found:
        # Other groups have been so busy that the newest entries hold none of this one.
        begun, ended = look.seq[_DEFAULT]
        found[_DEFAULT] = (begun, ended >= begun)
    return found


def find_late_ranks(looks: Mapping[int, RankSnapshot]) -> set[int]:
    """Return the ranks that have not begun what others wait in, and that wait in nothing."""
    found = find_missing_by_group(looks)
    return {rank for one in found for rank in one.ranks} - {rank for one in found for rank in one.waiting}


def find_mismatches(looks: Mapping[int, RankSnapshot]) -> list[Mismatch]:
    """Return where ranks of one group have begun different collectives under the same number."""
    by_place: dict[tuple[str, int], dict[int, FlightRecorderEntry]] = {}
    for rank, look in looks.items():
        for entry in look.entries or ():
            if not entry["p2p"]:
                by_place.setdefault((entry["group"], entry["number"]), {})[rank] = entry
    found = []
    for (group, number), entries in sorted(by_place.items()):
        if all(entry["done"] for entry in entries.values()):
            continue
        # Who sends and need not wait for an answer is through with its own at once: it counts as well.
        kinds = _kinds(entries)
        if len(kinds) > 1:
            found.append(Mismatch(group=group, number=number, by=kinds))
    return found


def is_in_step(looks: Mapping[int, RankSnapshot]) -> bool:
    """Return whether all ranks have begun the same, and none has ended it."""
    told = [_begun(look) for look in looks.values()]
    common = set.intersection(*(set(groups) for groups in told)) if told else set()
    return any(len({groups[name] for groups in told}) == 1 and not told[0][name][1] for name in common)


def current_operation(look: RankSnapshot) -> str | None:
    """Return what a rank has begun last and not ended."""
    return next((entry["op"] for entry in reversed(look.entries or ()) if not entry["done"]), None)


def is_in_message(look: RankSnapshot) -> bool:
    """Return whether what a rank has begun last and not ended is a message to, or from, one other rank."""
    return next((entry["p2p"] for entry in reversed(look.entries or ()) if not entry["done"]), False)


def is_in_default_group(look: RankSnapshot) -> bool:
    """Return whether a rank has begun something in the group of all ranks that has not ended."""
    begun = _begun(look).get(_DEFAULT)
    return begun is not None and not begun[1]


def has_counts(looks: Mapping[int, RankSnapshot]) -> bool:
    """Return whether ranks count what they begin."""
    return any(look.entries or look.seq for look in looks.values())


def _named(looks: Mapping[int, RankSnapshot], ranks: Sequence[int], group: str, number: int) -> str | None:
    names = (
        entry["op"]
        for rank in ranks
        for entry in looks[rank].entries or ()
        if (entry["group"], entry["number"]) == (group, number) and not entry["p2p"]
    )
    return next(names, None)


def _kinds(entries: Mapping[int, FlightRecorderEntry]) -> dict[str, tuple[int, ...]]:
    """Return who has begun what: the operation, and sizes and types where the operation is the same."""
    ops = {entry["op"] for entry in entries.values()}
    found: dict[str, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        alike = len(ops) == 1 and entry["op"] not in _OF_ANY_SIZE
        name = f"{entry['op']} of {entry['sizes']} {entry['dtypes']}".rstrip() if alike else entry["op"]
        found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


_OF_ANY_SIZE = frozenset({"all_gather", "allgather", "all_to_all", "alltoall", "gather", "scatter", "barrier"})
"""Operations to which ranks may bring different sizes."""
