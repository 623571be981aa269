"""Reads the sequence numbers of collectives from torch's flight recorder, and the time limit of the default group.

This module uses private names of torch (as of 2.13). If such a name is missing, the field `degraded` of the status file
names the missing part.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Any
_C10D = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
# gloo and newer backends share one recorder; the older NCCL backend has a recorder of its own.
_DUMP_FUNCTIONS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
READINGS_BEFORE_DUMP = 5
_MAX_KEPT = 40
_MAX_GROUPS = 32
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
        held: The number of these readings in which the newest collective of the default group was running.
    """

    def __init__(self) -> None:
        self.seq: dict[str, tuple[int, int]] = {}
        self.backend: str | None = None
        self.timeout_s: float | None = None
        self.looks = self.held = 0
        self.setup: dict[str, Any] | None = None
        self._group: Any = None
        self._unchanged_readings = 0

    def update(self) -> bool:
        """Read all counters, and return whether any counter has changed since the last call.

        Raises:
            RuntimeError: This torch has no flight recorder.
        """
        group = getattr(getattr(sys.modules.get(_C10D), "_world", None), "default_pg", None)
        if group is None:  # The recorder reads its settings at its first use, which the user's program should make.
            self.setup = _read_setup() or self.setup
            return False
        if group is not self._group:
            self._group = group
            self.backend, self.timeout_s = _read_group_settings(group)
            address = (self.setup or {}).get("address")
            self.setup = _make_setup(address, int(group.size()), int(group.rank()), is_joined=True)
        seq = _read_sequence_numbers()
        moved = seq != self.seq
        self.seq = seq
        self._unchanged_readings = 0 if moved else self._unchanged_readings + 1
        begun, ended = seq.get(_DEFAULT_GROUP, (0, 0))
        self.looks += 1
        self.held += begun > ended
        return moved

    def read_flight_record(self) -> list[dict[str, Any]] | None:
        """Return the newest flight recorder entries in the `READINGS_BEFORE_DUMP`th reading with unchanged counters.

        In all other readings return `None`, because a dump of a full recorder takes about 30 ms.
        """
        return _read_newest_entries() if self.seq and self._unchanged_readings == READINGS_BEFORE_DUMP else None


def _get_dumps() -> list[Any]:
    bindings = sys.modules.get(_BINDINGS)
    dumps = [dump for dump in (getattr(bindings, name, None) for name in _DUMP_FUNCTIONS) if dump is not None]
    if not dumps:
        raise RuntimeError("this torch has no flight recorder")
    return dumps


def _read_newest_entries() -> list[dict[str, Any]]:
    import json

    entries = [entry for dump in _get_dumps() for entry in json.loads(dump(includeCollectives=True)).get("entries", [])]
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
    for entry in reversed(found):
        if call is not None and not entry["done"] and entry["op"] == call[0]:
            entry["peer"] = call[1]
            break
    return _list_unused_groups() + found


def _read_current_call() -> tuple[str, int] | None:
    """Return the function of `torch.distributed` that the main thread has called, and its source or destination rank.

    The recorder does not contain the source rank, so this function reads the rank from local variables of the call.
    """
    for code, values in _list_torch_calls(_PEERS):
        peer = next((values[name] for name in _PEERS if isinstance(values.get(name), int)), None)
        return None if peer is None else (code.co_name, peer)
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
    world: Any = getattr(sys.modules.get(_C10D), "_world", None)
    nothing = {"number": 0, "op": "", "sizes": "", "dtypes": "", "done": True, "p2p": False, "peer": None}
    names: list[str] = []
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        names = [str(n) for group, n in world.pg_names.items() if group._get_sequence_number_for_group() == 0]  # noqa: SLF001
    return [{"group": name, **nothing} for name in names[:_MAX_GROUPS]]


def _read_sequence_numbers() -> dict[str, tuple[int, int]]:
    dumps = _get_dumps()
    import json

    found: dict[str, tuple[int, int]] = {}
    for dump in dumps:
        for group, status in json.loads(dump(includeCollectives=False)).get("pg_status", {}).items():
            numbers = (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
            found[group] = max(found.get(group, numbers), numbers)
    return found


def _read_group_settings(group: Any) -> tuple[str | None, float | None]:
    """Return the backend and the shortest time limit of a group, each `None` if torch does not report it."""
    module = sys.modules[_C10D]
    try:
        backend: str | None = str(module._world.pg_map[group][0])  # noqa: SLF001
    except (AttributeError, KeyError, IndexError, TypeError):
        backend = None
    limits = []
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            limits.append(group._get_backend(device).options._timeout.total_seconds())  # noqa: SLF001
    return backend, min(limits, default=None)
