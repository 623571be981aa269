"""What torch would have dumped of its flight recorder where a run stands, made of the entries that its evidence holds."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.protocol.record_types import FlightRecorderEntry
    from clusterctl.why.evidence_types import Evidence

VERSION: Final = "2.10"
DEFAULT: Final = "0"
Dump = dict[str, Any]


def of_case(case: Evidence) -> dict[int, Dump]:
    """Return the dump of each rank that has written its entries; others could not have dumped anything either.

    Evidence holds the newest entries alone, so all ranks begin with the first number that all of them still have.
    """
    known = {
        rank.rank: rank.snapshot.entries for rank in case.ranks if rank.snapshot is not None and rank.snapshot.entries
    }
    groups = members(known, world=[rank.rank for rank in case.ranks])
    begin = {group: _first(known.values(), group) for group in groups}
    config = {
        group: {"name": group, "desc": _called(group), "ranks": str(sorted(ranks))} for group, ranks in groups.items()
    }
    return {rank: _dump(entries, config, begin) for rank, entries in known.items()}


def nameless(dumps: Mapping[int, Dump]) -> dict[int, Dump]:
    """Return dumps as gloo writes them: without the names and the ranks of process groups."""
    return {rank: {**dump, "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}} for rank, dump in dumps.items()}


def members(known: Mapping[int, Sequence[FlightRecorderEntry]], world: Sequence[int]) -> dict[str, set[int]]:
    """Return the ranks of each process group: those that know of it, and all of the default one."""
    found: dict[str, set[int]] = {DEFAULT: set(world)}
    for rank, entries in known.items():
        for entry in entries:
            found.setdefault(entry["group"], set()).add(rank)
    return found


def _first(known: Any, group: str) -> int:
    firsts = [
        min(entry["number"] for entry in entries if entry["group"] == group and not entry["p2p"])
        for entries in known
        if any(entry["group"] == group and entry["number"] and not entry["p2p"] for entry in entries)
    ]
    return max(firsts, default=0)


def _called(group: str) -> str:
    return "default_pg" if group == DEFAULT else "undefined"


def _dump(entries: Sequence[FlightRecorderEntry], config: Mapping[str, Any], begin: Mapping[str, int]) -> Dump:
    kept = [
        entry for entry in entries if entry["number"] and (entry["p2p"] or entry["number"] >= begin[entry["group"]])
    ]
    status = {}
    for group in {entry["group"] for entry in entries}:
        own = [entry for entry in entries if entry["group"] == group and not entry["p2p"]]
        status[group] = {
            "last_enqueued_collective": max((entry["number"] for entry in own), default=0),
            "last_started_collective": -1,
            "last_completed_collective": max((entry["number"] for entry in own if entry["done"]), default=0),
        }
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {group: dict(one) for group, one in config.items()},
        "pg_status": status,
        "entries": [
            _entry(number, entry, len(ast.literal_eval(config[entry["group"]]["ranks"])))
            for number, entry in enumerate(kept)
        ],
    }


def _entry(number: int, entry: FlightRecorderEntry, world: int) -> dict[str, Any]:
    sizes = ast.literal_eval(entry["sizes"]) if entry["sizes"] else []
    dtypes = entry["dtypes"].split(",") if entry["dtypes"] else []
    return {
        "record_id": number,
        "pg_id": int(entry["group"]) if entry["group"].isdigit() else 0,
        "process_group": (entry["group"], _called(entry["group"])),
        "collective_seq_id": 0 if entry["p2p"] else entry["number"],
        "p2p_seq_id": entry["number"] if entry["p2p"] else 0,
        "op_id": number + 1,
        "profiling_name": f"gloo:{entry['op']}",
        "input_sizes": sizes,
        "output_sizes": _out(entry["op"], sizes, world),
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "scheduled",
        "time_created_ns": number,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": entry["done"],
        "timeout_ms": 1_800_000,
        "is_p2p": entry["p2p"],
        "frames": [],
    }


def _out(op: str, sizes: list[list[int]], world: int) -> list[list[int]]:
    """Return the sizes of what comes out, which evidence does not hold: other than those of what goes in for two."""
    if "gather" in op:
        return [[size[0] * world, *size[1:]] for size in sizes if size]
    if "reduce_scatter" in op:
        return [[size[0] // world, *size[1:]] for size in sizes if size]
    return sizes
