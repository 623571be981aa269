"""Sequence numbers of collectives from torch's flight recorder, and the time limit of its process groups.

The names are torch's private ones (seen in 2.13). If one is missing, the status file says so under `degraded`.
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
# One recorder for gloo and newer backends, a ring of its own for the older NCCL backend.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
STILL_LOOKS = 5
_KEPT = 40
_GROUPS = 32
_DEFAULT = "0"
_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/rendezvous.py")
_PEERS, _SETUP = ("src", "dst"), ("world_size", "rank")


class CollectiveCounters:
    """Reads the counters, once there is a process group.

    Attributes:
        seq: Process group id -> (last enqueued, last completed) collective.
        backend: Backends of the default group, such as `gloo` or `cpu:gloo,cuda:nccl`.
        timeout_s: Its time limit in seconds.
        setup: Address of the store, world size and rank with which this process sets up the default group.
        group_rank: The rank of this process in the default group, and how many that has.
        looks, held: Number of readings of the default group, and of those in which its newest collective was running.
    """

    def __init__(self) -> None:
        self.seq: dict[str, tuple[int, int]] = {}
        self.backend: str | None = None
        self.timeout_s: float | None = None
        self.group_rank: tuple[int, int] | None = None
        self.looks = self.held = 0
        self.setup: dict[str, Any] | None = None
        self._group: Any = None
        self._still = 0

    def update(self) -> bool:
        """Read all counters; return whether any has moved.

        Raises:
            RuntimeError: This torch has no flight recorder.
        """
        group = getattr(getattr(sys.modules.get(_C10D), "_world", None), "default_pg", None)
        if group is None:  # the recorder reads its settings at first use, so let the user be first
            self.setup = _read_setup() or self.setup
            return False
        if group is not self._group:
            self._group = group
            self.backend, self.timeout_s = _describe(group)
            self.group_rank = (int(group.rank()), int(group.size()))
            self.setup = {"address": None, "world_size": self.group_rank[1], "rank": self.group_rank[0]}
        seq = _sequence_numbers()
        moved = seq != self.seq
        self.seq = seq
        self._still = 0 if moved else self._still + 1
        begun, ended = seq.get(_DEFAULT, (0, 0))
        self.looks += 1
        self.held += begun > ended
        return moved

    def read_flight_record(self) -> list[dict[str, Any]] | None:
        """Return the newest entries of the flight recorder, once for each time that the counters stop; else `None`.

        To write out all entries takes some 30 ms if the ring is full.
        """
        return _newest_entries() if self.seq and self._still == STILL_LOOKS else None


def _recorders() -> list[Any]:
    bindings = sys.modules.get(_BINDINGS)
    dumps = [dump for dump in (getattr(bindings, name, None) for name in _DUMPS) if dump is not None]
    if not dumps:
        raise RuntimeError("this torch has no flight recorder")
    return dumps


def _newest_entries() -> list[dict[str, Any]]:
    import json

    entries = [entry for dump in _recorders() for entry in json.loads(dump(includeCollectives=True)).get("entries", [])]
    call = _read_current_call()
    last = [entry for entry in entries[:-_KEPT] if not entry["retired"]][-_KEPT:] + entries[-_KEPT:]
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
    return _unused_groups() + found


def _read_current_call() -> tuple[str, int] | None:
    """Return the function of `torch.distributed` in which the main thread is, and its source or destination.

    The recorder does not know the source. It is a local variable of the call, as a rank of the default group.
    """
    for code, values in _list_torch_calls(_PEERS):
        peer = next((values[name] for name in _PEERS if isinstance(values.get(name), int)), None)
        return None if peer is None else (code.co_name, peer)
    return None


def _read_setup() -> dict[str, Any] | None:
    """Return the values with which the main thread sets up the default group; `None` if it does not."""
    for _, values in _list_torch_calls(_SETUP):
        world_size, rank = (values.get(name) for name in _SETUP)
        if isinstance(world_size, int) and isinstance(rank, int) and rank >= 0 and world_size > 0:
            host = values.get("hostname", values.get("master_addr"))
            port = values.get("port", values.get("master_port"))
            if host is None and values.get("init_method") in (None, "env://"):
                host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            return {"address": f"{host}:{port}" if host and port else None, "world_size": world_size, "rank": rank}
    return None


def _list_torch_calls(variables: Collection[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield code and local variables of the calls of the main thread in torch.distributed with such variables."""
    frames = sys._current_frames()  # noqa: SLF001
    frame = frames.get(sys.modules["threading"].main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_FILES) and not set(variables).isdisjoint(code.co_varnames):
            yield code, frame.f_locals
        frame = frame.f_back


def _unused_groups() -> list[dict[str, Any]]:
    """Return an entry with number 0 for each group of this rank in which it has started nothing yet.

    The recorder does not know these groups, but the other ranks may wait for this rank in one of them.
    """
    world: Any = getattr(sys.modules.get(_C10D), "_world", None)
    nothing = {"number": 0, "op": "", "sizes": "", "dtypes": "", "done": True, "p2p": False, "peer": None}
    names: list[str] = []
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        names = [str(n) for group, n in world.pg_names.items() if group._get_sequence_number_for_group() == 0]  # noqa: SLF001
    return [{"group": name, **nothing} for name in names[:_GROUPS]]


def _sequence_numbers() -> dict[str, tuple[int, int]]:
    dumps = _recorders()
    import json

    found: dict[str, tuple[int, int]] = {}
    for dump in dumps:
        for group, status in json.loads(dump(includeCollectives=False)).get("pg_status", {}).items():
            numbers = (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
            found[group] = max(found.get(group, numbers), numbers)
    return found


def _describe(group: Any) -> tuple[str | None, float | None]:
    """Return backend and shortest time limit of a group; `None` for what cannot be read."""
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
