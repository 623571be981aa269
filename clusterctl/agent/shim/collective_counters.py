"""Sequence numbers of collectives from torch's flight recorder, and the time limit of its process groups.

The names are torch's private ones (seen in 2.13). If one is missing, the status file says so under `degraded`.
"""

from __future__ import annotations

import contextlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
_C10D = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
# One recorder for gloo and newer backends, a ring of its own for the older NCCL backend.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
STILL_LOOKS = 5
_KEPT = 40
_GROUPS = 32
_DEFAULT = "0"
_PEERS = frozenset({"src", "dst"})


class CollectiveCounters:
    """Reads the counters, once there is a process group.

    Attributes:
        seq: Process group id -> (last enqueued, last completed) collective.
        backend: Backends of the default group, such as `gloo` or `cpu:gloo,cuda:nccl`.
        timeout_s: Its time limit in seconds.
        group_rank: The rank of this process in the default group, and how many that has.
        looks, held: Number of readings of the default group, and of those in which its newest collective was running.
    """

    def __init__(self) -> None:
        self.seq: dict[str, tuple[int, int]] = {}
        self.backend: str | None = None
        self.timeout_s: float | None = None
        self.group_rank: tuple[int, int] | None = None
        self.looks = self.held = 0
        self._group: Any = None
        self._still = 0

    def update(self) -> bool:
        """Read all counters; return whether any has moved.

        Raises:
            RuntimeError: This torch has no flight recorder.
        """
        group = getattr(getattr(sys.modules.get(_C10D), "_world", None), "default_pg", None)
        if group is None:  # the recorder reads its settings at first use, so let the user be first
            return False
        if group is not self._group:
            self._group = group
            self.backend, self.timeout_s = _describe(group)
            self.group_rank = (int(group.rank()), int(group.size()))
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
    frames = sys._current_frames()  # noqa: SLF001
    frame = frames.get(sys.modules["threading"].main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py") and not _PEERS.isdisjoint(code.co_varnames):
            values = frame.f_locals
            peer = next((values[name] for name in _PEERS if isinstance(values.get(name), int)), None)
            return None if peer is None else (code.co_name, peer)
        frame = frame.f_back
    return None


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
