"""Reads and validates the files that the shim in a worker writes. The worker could write such files too."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
import signal
from typing import TYPE_CHECKING, TypeVar, cast

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.syscalls import read_or_empty
from clusterctl.agent.protocol import validators
from clusterctl.agent.protocol.validators import (
    COUNT,
    PID,
    list_of,
    mapping_of,
    number,
    object_of,
    optional,
    string,
    tuple_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Callable

    from clusterctl.agent.protocol.record_types import (
        CallValues,
        ChildFailure,
        FlightRecorderEntry,
        GroupSetup,
        ShimProfileAnswer,
        StackDumpOffer,
        WorkerError,
        WorkerStatus,
        WorkerStatusSample,
    )

    T = TypeVar("T")

_STALE_S = 10.0
_WANTS_PYTHON, _HIDES_PYTHON = "wants-python", "hides-python"
_RANK_DIGITS, _MAX_RANKS = 7, 1024
_MAX_FLIGHT_RECORD_ENTRIES, _MAX_CALL_VALUES, _MAX_NAME_LENGTH = 128, 64, 200
_MAX_MESSAGE_LENGTH, _MAX_TRACEBACK_LENGTH = 8192, 32768


_TIME = optional(number())
_DISPLAY_FIELDS = {
    "frameworks": list_of(string(200), 64),
    "facts": mapping_of(string(200), validators.any_json(3, 256, 200), 256),
    "degraded": mapping_of(string(200), string(1024), 64),
}
_REPORT_FIELDS = (*("pid", "step", "source", "beats", "seq", "backend", "timeout_s", "looks", "held"), *_DISPLAY_FIELDS)
validate_status = object_of(
    {
        "pid": PID,
        "step": optional(COUNT),
        "source": optional(string(200)),
        "beats": COUNT,
        "seq": optional(mapping_of(string(1024), tuple_of(COUNT, COUNT), 4096)),
        "backend": optional(string(200)),
        "timeout_s": optional(number(0.0)),
        "start_time": COUNT,
        "tid": PID,
        "time": number(),
        "progress_time": _TIME,
        "main_time": _TIME,
        "phase": optional(object_of({"name": string(200), "since": number(), "limit_s": number(0.0)})),
        "looks": COUNT,
        "held": COUNT,
    }
)
"""Validates a status file of the shim. A node cannot derive this validator from `record_types.WorkerStatus`, because an
agent does not import `record_types`.
"""


def sanitize_status(report: WorkerStatus) -> WorkerStatus:
    """Return the valid content of a status file. Each invalid field of `_DISPLAY_FIELDS` becomes empty.

    Raises:
        FrameError: Another field is missing or invalid.
    """
    validate_status(report)
    return {**report, **{name: _sanitize_field(name, report.get(name)) for name in _DISPLAY_FIELDS}}  # type: ignore[typeddict-item]


def _sanitize_field(name: str, value: Any) -> Any:
    try:
        _DISPLAY_FIELDS[name](value)
    except validators.ValidationError:
        return [] if name == "frameworks" else {}
    return value


def read_status(status_dir: str, rank: int, now: float) -> WorkerStatusSample | None:
    """Return the status of a worker with ages in seconds; `None` without a valid file or after the end of the process.

    `unseen` is true if the file is old and the thread that writes it has ended. If this thread still exists, an old
    file shows that the process is stopped, or that C code does not let the thread run.
    """
    data = read_or_empty(os.path.join(status_dir, f"rank-{rank}.status.json"))
    try:
        status = sanitize_status(json.loads(data)) if data else None
    except (ValueError, RecursionError):
        return None
    process = proc.read_stat(status["pid"]) if status else None
    if status is None or process is None or process.start_time != status["start_time"]:
        return None
    sample = _convert_times(status, now)
    if sample["age_s"] > _STALE_S and not os.path.exists(f"/proc/{status['pid']}/task/{status['tid']}"):
        sample["unseen"] = True
    return sample


def _convert_times(status: WorkerStatus, now: float) -> WorkerStatusSample:
    def age(moment: float) -> float:
        return round(max(0.0, now - moment), 3)

    progress, main, phase = status["progress_time"], status["main_time"], status["phase"]
    report = {name: status[name] for name in _REPORT_FIELDS}  # type: ignore[literal-required]
    sample = {
        **report,
        "age_s": age(status["time"]),
        "progress_age_s": None if progress is None else age(progress),
        "main_age_s": None if main is None else age(main),
        "phase": phase and {"name": phase["name"], "age_s": age(phase["since"]), "limit_s": phase["limit_s"]},
    }
    return cast("WorkerStatusSample", sample)


def list_foreign_ranks(status_dir: str, own_ranks: Iterable[int]) -> list[int]:
    """Return the ranks that clusterctl has not started itself, such as the ranks that torchrun starts.

    Args:
        status_dir: The status directory of this attempt.
        own_ranks: The ranks that clusterctl has started.
    """
    own = set(own_ranks)
    names = glob.glob(os.path.join(glob.escape(status_dir), "rank-*.status.json"))
    ranks = (os.path.basename(name)[len("rank-") : -len(".status.json")] for name in names)
    found = [int(rank) for rank in ranks if rank.isdecimal() and rank.isascii() and len(rank) <= _RANK_DIGITS]
    return sorted(rank for rank in found if rank not in own)[:_MAX_RANKS]


def _read_json_file(path: str, parse: Callable[[Any], T]) -> T | None:
    """Return the parsed content of a file, or `None` if the file is missing or malformed."""
    try:
        return parse(json.loads(read_or_empty(path) or b"null"))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _read_rank_file(status_dir: str, rank: int, kind: str, parse: Callable[[Any], T]) -> T | None:
    return _read_json_file(os.path.join(status_dir, f"rank-{rank}.{kind}.json"), parse)


def _parse_identity(value: Any) -> proc.ProcessIdentity:
    return proc.ProcessIdentity(int(value["pid"]), int(value["start_time"]))


def read_stack_dump_offer(status_dir: str, rank: int) -> StackDumpOffer | None:
    """Return the signal and file for a rank's stack dumps; `None` if the ready file or its process is missing."""

    def parse(value: Any) -> StackDumpOffer:
        names = ("pid", "start_time", "signal", "fd", "dev", "ino", "main_thread")
        return cast("StackDumpOffer", {name: int(value[name]) for name in names})

    offer = _read_rank_file(status_dir, rank, "ready", parse)
    is_valid = offer is not None and proc.is_alive(proc.ProcessIdentity(offer["pid"], offer["start_time"]))
    return offer if is_valid else None


def get_shim_thread_id(offer: StackDumpOffer, status_dir: str, rank: int) -> int:
    """Return the id of the shim's own thread in the process of `offer`, or 0 if the id is unknown."""

    def parse(value: Any) -> int:
        is_same = (value["pid"], value["start_time"]) == (offer["pid"], offer["start_time"])
        return int(value["tid"]) if is_same else 0

    return _read_rank_file(status_dir, rank, "status", parse) or 0


def read_profile_answer(status_dir: str, rank: int, request: str) -> ShimProfileAnswer | None:
    """Return the shim's answer to a request for a profile; `None` before the answer."""

    def parse(value: Any) -> ShimProfileAnswer | None:
        if value["request"] != request:
            return None
        reason = str(value.get("error") or value.get("end_reason") or "")
        return {"state": str(value["state"]), "time": float(value["time"]), "reason": reason}

    return _read_rank_file(status_dir, rank, "profiled", parse)


def read_process_group_sizes(status_dir: str) -> dict[int, int]:
    """Return the size of the default process group, by rank, for each rank of this node that has joined its group."""
    sizes: dict[int, int] = {}
    for path in glob.glob(os.path.join(glob.escape(status_dir), "rank-*.group.json"))[:_MAX_RANKS]:
        setup = _read_json_file(path, lambda value: _parse_setup(value) if value["is_joined"] else None)
        if setup is not None:
            sizes[setup["rank"]] = setup["world_size"]
    return sizes


def read_group_setup(status_dir: str, rank: int) -> GroupSetup | None:
    """Return the values with which a rank sets up its default process group; `None` before the setup."""
    return _read_rank_file(status_dir, rank, "group", _parse_setup)


def _parse_setup(value: Any) -> GroupSetup | None:
    address = None if value["address"] is None else str(value["address"])[:_MAX_NAME_LENGTH]
    world_size, rank = int(value["world_size"]), int(value["rank"])
    if not 0 <= rank < world_size < 10**_RANK_DIGITS:
        return None
    return {"address": address, "world_size": world_size, "rank": rank}


def read_swallowed_failure(status_dir: str, rank: int, leader_pid: int) -> tuple[WorkerError | None, int | None]:
    """Return the failure of a Python in a rank whose first process (`leader_pid`) ended with 0, or `None`.

    The second value is the size of the rank's output at the end of this Python, or `None` if this Python does not write
    directly to the output file.
    """

    def parse(value: Any) -> tuple[WorkerError, int | None] | None:
        who, end, program = _parse_identity(value), str(value["end"]), str(value["program"])[:_MAX_NAME_LENGTH]
        trace = str(value["traceback"])[-_MAX_TRACEBACK_LENGTH:] or None
        message = str(value["message"])[:_MAX_MESSAGE_LENGTH]
        if end not in ("running", "failed") or (end == "running" and (who.pid == leader_pid or proc.is_alive(who))):
            return None
        if end == "running":
            message = f"`{program}` (pid {who.pid}) ended without a report, possibly by a signal"
        if bare := re.match(r"(?:SystemExit: |os\._exit\()(-?\d+)\)?$", message):
            message = f"exit code {bare[1]} of {os.path.basename(program)}"
        return {"message": message, "traceback": trace}, int(value["output_size"]) or None

    return _read_rank_file(status_dir, rank, "python", parse) or (None, None)


def read_handled_signal(status_dir: str, rank: int) -> tuple[int, float] | None:
    """Return the last SIGTERM or SIGINT that the Python of a rank has handled, and the monotonic time; or `None`."""

    def parse(value: Any) -> tuple[int, float] | None:
        number, time = int(value["signal"]), float(value["time"])
        return (number, time) if number in (signal.SIGTERM, signal.SIGINT) and math.isfinite(time) else None

    return _read_rank_file(status_dir, rank, "signal", parse)


def has_worked_alone(status_dir: str, rank: int) -> bool:
    """Return whether a rank has loaded torch and ended, and no process of the rank has met a peer."""
    base = os.path.join(status_dir, f"rank-{rank}")
    return os.path.exists(f"{base}.alone") and not os.path.exists(f"{base}.met")


def create_python_marker(status_dir: str, name: str) -> None:
    """Create the marker `wants-python` or `hides-python`, which describes the command of the workers."""
    with contextlib.suppress(OSError), open(os.path.join(status_dir, name), "w", encoding="ascii"):
        pass


def lacks_python(status_dir: str, rank: int) -> bool:
    """Return whether the command of a rank names a Python but no Python has started in the rank."""
    wanted, started = os.path.join(status_dir, _WANTS_PYTHON), os.path.join(status_dir, f"rank-{rank}.python")
    return os.path.exists(wanted) and not os.path.exists(started)


def has_python_with_shim(status_dir: str, rank: int) -> bool:
    """Return whether a Python with the shim has started in a rank, and no Python without the shim is known there."""
    has_begun = os.path.exists(os.path.join(status_dir, f"rank-{rank}.python"))
    is_hidden = os.path.exists(os.path.join(status_dir, _HIDES_PYTHON))
    return not os.path.isdir(status_dir) or (has_begun and not is_hidden)


def read_failed_child(status_dir: str, rank: int, *, has_failed: bool) -> ChildFailure | None:
    """Return the first failed child process of a rank's Python, or `None`.

    If the rank itself has failed, the result may also be a Python that a shell has started and that an exception has
    ended.
    """

    def parse(value: Any) -> ChildFailure | None:
        record = {"end": "failed", "traceback": "none", **dict(value)}
        if record["end"] != "failed" or not record["traceback"]:
            return None
        pid, message = int(value["pid"]), str(value["message"])[:_MAX_MESSAGE_LENGTH]
        return {"pid": pid, "message": message} if 0 < pid < 1 << 31 and message else None

    child = _read_rank_file(status_dir, rank, "child", parse)
    return child or (_read_rank_file(status_dir, rank, "python", parse) if has_failed else None)


def read_call_values(status_dir: str, rank: int, now: float) -> CallValues | None:
    """Return the values that the shim has read together with the last stacks; `None` if they are not recent."""

    def parse(value: Any) -> CallValues | None:
        if not proc.is_alive(_parse_identity(value)) or not 0 <= now - float(value["time"]) <= _STALE_S:
            return None
        return {
            "values": {
                str(name)[:_MAX_NAME_LENGTH]: str(text)[:_MAX_NAME_LENGTH]
                for name, text in list(value["values"].items())[:_MAX_CALL_VALUES]
            },
            "awaited_keys": [str(key)[:_MAX_NAME_LENGTH] for key in value["awaited_keys"][:_MAX_CALL_VALUES]],
            "set_keys": [str(key)[:_MAX_NAME_LENGTH] for key in value["set_keys"][:_MAX_CALL_VALUES]],
        }

    return _read_rank_file(status_dir, rank, "values", parse)


def read_flight_record(status_dir: str, rank: int) -> list[FlightRecorderEntry] | None:
    """Return the entries that the shim copied from torch's flight recorder when the collectives stopped, or `None`."""

    def parse(value: Any) -> list[FlightRecorderEntry] | None:
        if not proc.is_alive(_parse_identity(value)):
            return None
        return [
            {
                "group": str(entry["group"])[:_MAX_NAME_LENGTH],
                "number": int(entry["number"]) % (1 << 62),
                "op": str(entry["op"])[:_MAX_NAME_LENGTH],
                "sizes": str(entry["sizes"])[:_MAX_NAME_LENGTH],
                "dtypes": str(entry["dtypes"])[:_MAX_NAME_LENGTH],
                "done": bool(entry["done"]),
                "p2p": bool(entry["p2p"]),
                "peer": None if entry["peer"] is None else int(entry["peer"]) % (1 << 31),
            }
            for entry in value["entries"][-_MAX_FLIGHT_RECORD_ENTRIES:]
        ]

    return _read_rank_file(status_dir, rank, "recorded", parse)
