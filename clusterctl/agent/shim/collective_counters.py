"""Reads the sequence numbers of collectives from torch's flight recorder, and the time limit of the default group.

`collective_recorder` stands in for the flight recorder where the backend of a group has none. `blindness` says what
cannot be seen at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from . import collective_recorder
from .torch_names import FR_DUMP, NCCL_DUMP, WORLD, find_name, list_missing_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

    from .collective_recorder import GroupRecord
READINGS_BEFORE_DUMP = 5
READINGS_BETWEEN_TIMINGS = 10
"""A dump of a full recorder takes about 30 ms of this rank's CPU, so the times on the GPU are read less often."""
_MAX_KEPT = 40
_MAX_GROUPS = 32
_MAX_ENTRIES = 128
"""The agent reads as many entries."""
_DEFAULT_GROUP = "0"
_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/rendezvous.py")
_PEERS, _SETUP = ("src", "dst"), ("world_size", "rank")


class CollectiveCounters:
    """Reads the counters of collectives as soon as a default process group exists.

    Attributes:
        seq: The last enqueued and the last completed collective of each process group, by group id.
        backend: The backends of the default group, such as `gloo` or `cpu:gloo,cuda:nccl`.
        timeout_s: The time limit of the default group in seconds.
        setup: The default group: `address` of its store (`None` if unknown), `world_size`, `rank` of this process, and
            `is_joined` as soon as the group exists. `None` before this process creates the group.
        looks: The number of readings since the creation of the default group.
        held: The number of these readings in which the newest collective of the default group was running. If NCCL
            measures its collectives, the seconds that the GPU has spent in collectives, and `looks` are seconds too.
        blindness: What cannot be seen on this backend with this torch; `None` if everything is seen.
    """

    def __init__(self) -> None:
        self.seq: dict[str, tuple[int, int]] = {}
        self.backend: str | None = None
        self.timeout_s: float | None = None
        self.looks = self.held = 0
        self.setup: dict[str, Any] | None = None
        self.blindness: str | None = None
        self._group: Any = None
        self._messages = 0
        self._unchanged_readings = 0
        self._device_waits: DeviceWaits | None = None

    def update(self) -> bool:
        """Read all counters, and return whether any counter has changed since the last call."""
        group = getattr(find_name(WORLD), "default_pg", None)
        if group is None:  # The recorder reads its settings at its first use, which the user's program should make.
            self.setup = _read_setup() or self.setup
            return False
        if group is not self._group:
            self._group = group
            self.backend, self.timeout_s = _read_group_settings(group)
            address = (self.setup or {}).get("address")
            self.setup = _make_setup(address, int(group.size()), int(group.rank()), is_joined=True)
            self._device_waits = DeviceWaits() if are_collectives_timed(self.backend, os.environ) else None
        records = _list_records()
        seq = {**_read_sequence_numbers(), **{record.name: record.read_numbers() for record in records}}
        self.blindness = self._describe_blindness(records)
        messages = collective_recorder.count_messages()
        moved = seq != self.seq or messages != self._messages
        self.seq, self._messages = seq, messages
        self._unchanged_readings = 0 if moved else self._unchanged_readings + 1
        if self._device_waits is not None:
            self.looks += 1
            if self.looks % READINGS_BETWEEN_TIMINGS == 0:
                self.held = min(self.looks, self._device_waits.add(_dump_entries(NCCL_DUMP)))
        elif all(record.knows_ends for record in records):
            begun, ended = seq.get(_DEFAULT_GROUP, (0, 0))
            self.looks += 1
            self.held += begun > ended
        return moved

    def _describe_blindness(self, records: list[GroupRecord]) -> str | None:
        is_seen = id(self._group) in collective_recorder.records or collective_recorder.records_itself(self._group)
        on = f"on this backend ({self.backend}, torch {_read_version()})"
        if not is_seen or any(record.is_blind for record in records):
            return f"blind {on}: goes by stacks"
        if not all(record.knows_ends for record in records):
            return f"sees only the begin of collectives {on}"
        missing = list_missing_names()
        return f"torch {_read_version()} lacks {', '.join(missing)}" if missing else None

    def read_flight_record(self) -> list[dict[str, Any]] | None:
        """Return the newest flight recorder entries in the `READINGS_BEFORE_DUMP`th reading with unchanged counters.

        In all other readings return `None`, because a dump of a full recorder takes about 30 ms.
        """
        has_begun = self.seq or self._messages
        return _read_newest_entries() if has_begun and self._unchanged_readings == READINGS_BEFORE_DUMP else None


class DeviceWaits:
    """Adds the times that the GPU has spent in collectives, most of which it waits for other ranks.

    The CPU runs ahead of the GPU, so there is often an unfinished collective although the rank does not wait.
    """

    def __init__(self) -> None:
        self._last_id = -1
        self._total_ms = 0.0

    def add(self, entries: list[dict[str, Any]]) -> int:
        """Add the collectives of the default group that have ended since the last call, and return the whole seconds.

        Args:
            entries: The entries of torch's flight recorder. `duration_ms` is the time between two events on the GPU,
                and is missing before the end of the collective (`FlightRecorder::retire_id`,
                torch/csrc/distributed/c10d/FlightRecorderDetail.hpp).
        """
        new = [e for e in entries if "duration_ms" in e and e["record_id"] > self._last_id and not e["is_p2p"]]
        self._last_id = max((entry["record_id"] for entry in new), default=self._last_id)
        self._total_ms += sum(entry["duration_ms"] for entry in new if entry["process_group"][0] == _DEFAULT_GROUP)
        return int(self._total_ms / 1000)


def are_collectives_timed(backend: str | None, environ: Mapping[str, str]) -> bool:
    """Return whether NCCL measures the time of its collectives on the GPU."""
    # `c10::utils::check_env` and `getCvarBool` of torch read these texts as true.
    wanted = environ.get("TORCH_NCCL_ENABLE_TIMING", "").lower() in ("1", "y", "yes", "t", "true")
    return wanted and "nccl" in (backend or "") and find_name(NCCL_DUMP) is not None


def _list_records() -> list[GroupRecord]:
    """Return the records of the groups that exist and that torch does not record."""
    groups = getattr(find_name(WORLD), "pg_names", {})
    found = (collective_recorder.records.get(id(group)) for group in list(groups))
    return [record for record in found if record is not None]


def _read_version() -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", "")).partition("+")[0]


def _dump_entries(name: str) -> list[dict[str, Any]]:
    dump = find_name(name)
    return [] if dump is None else list(json.loads(dump(includeCollectives=True)).get("entries", []))


def _read_newest_entries() -> list[dict[str, Any]]:
    records = _list_records()
    recorded = {record.name for record in records}
    # An entry of `c10d:` comes from a hook of the program; the backend, or the shim, has recorded the operation too.
    entries = [
        entry
        for name in (FR_DUMP, NCCL_DUMP)
        for entry in _dump_entries(name)
        if str(entry["process_group"][0]) not in recorded and not str(entry["profiling_name"]).startswith("c10d:")
    ]
    call = _read_current_call()
    last = [entry for entry in entries[:-_MAX_KEPT] if not entry["retired"]][-_MAX_KEPT:] + entries[-_MAX_KEPT:]
    found = [
        {
            "group": str(entry["process_group"][0]),
            "number": int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
            "op": str(entry["profiling_name"]).rpartition(":")[2],
            "sizes": str(entry["input_sizes"]),
            "dtypes": ",".join(map(str, entry["input_dtypes"])),
            "done": bool(entry["retired"]),
            "p2p": bool(entry["is_p2p"]),
            "peer": None,
        }
        for entry in last
    ]
    found += [entry for record in records for entry in record.list_entries()]
    for entry in reversed(found):
        if call is not None and not entry["done"] and entry["op"] == call[0]:
            entry["peer"] = call[1]
            break
    # A message that nobody waits for may end later than the collectives, which are then the present operation.
    others = _list_unused_groups() + collective_recorder.list_messages()
    return others + found[-(_MAX_ENTRIES - len(others)) :]


def _read_current_call() -> tuple[str, int] | None:
    """Return the function of `torch.distributed` that the main thread has called, and its source or destination rank.

    The recorder does not contain the source rank, so this function reads the rank from local variables of the call.
    """
    name = ""
    # `gather_object` calls `gather` with the rank in the group alone.
    for code, values in _list_torch_calls(_PEERS):
        name = name or code.co_name
        peer = next((values[each] for each in _PEERS if isinstance(values.get(each), int)), None)
        if peer is not None:
            return name, peer
    return None


def _read_setup() -> dict[str, Any] | None:
    """Return the values with which the main thread is creating the default group, or `None`."""
    for _, values in _list_torch_calls(_SETUP):
        world_size, rank = (values.get(name) for name in _SETUP)
        if isinstance(world_size, int) and isinstance(rank, int) and rank >= 0 and world_size > 0:
            host = values.get("hostname", values.get("master_addr"))
            port = values.get("port", values.get("master_port"))
            if host is None and values.get("init_method") in (None, "env://"):
                host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            return _make_setup(f"{host}:{port}" if host and port else None, world_size, rank, is_joined=False)
    return None


def _make_setup(address: str | None, world_size: int, rank: int, *, is_joined: bool) -> dict[str, Any]:
    return {"address": address, "world_size": world_size, "rank": rank, "is_joined": is_joined}


def _list_torch_calls(variables: Collection[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the code and the local variables of each torch.distributed call that has a local variable in `variables`.

    Only calls on the stack of the main thread are considered.
    """
    frames = sys._current_frames()  # noqa: SLF001
    frame = frames.get(sys.modules["threading"].main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_FILES) and not set(variables).isdisjoint(code.co_varnames):
            yield code, frame.f_locals
        frame = frame.f_back


def _list_unused_groups() -> list[dict[str, Any]]:
    """Return an entry with number 0 for each process group in which this rank has started no operation yet.

    The flight recorder does not contain such a group, but other ranks may wait for this rank in the group.
    """
    world: Any = find_name(WORLD)
    nothing = {"number": 0, "op": "", "sizes": "", "dtypes": "", "done": True, "p2p": False, "peer": None}
    names: list[str] = []
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        for group, name in world.pg_names.items():
            record = collective_recorder.records.get(id(group))
            begun = group._get_sequence_number_for_group() if record is None else record.read_numbers()[0]  # noqa: SLF001
            names += [] if begun else [str(name)]
    return [{"group": name, **nothing} for name in names[:_MAX_GROUPS]]


def _read_sequence_numbers() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for dump in filter(None, map(find_name, (FR_DUMP, NCCL_DUMP))):
        for group, status in json.loads(dump(includeCollectives=False)).get("pg_status", {}).items():
            numbers = (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
            found[group] = max(found.get(group, numbers), numbers)
    return found


def _read_group_settings(group: Any) -> tuple[str | None, float | None]:
    """Return the backend and the shortest time limit of a group, each `None` if torch does not report it."""
    try:
        backend: str | None = str(find_name(WORLD).pg_map[group][0])
    except (AttributeError, KeyError, IndexError, TypeError):
        backend = None
    limits = []
    for one in collective_recorder.list_backends(group):
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            limits.append(one.options._timeout.total_seconds())  # noqa: SLF001
    return backend, min(limits, default=None)
