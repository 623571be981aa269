"""What the shim inside a worker says of itself: its status file, its claim, and whether its stacks can be dumped."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import signal
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.syscalls import read_bytes
from clusterctl.agent.protocol import worker_status

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from clusterctl.agent.protocol.process_types import ChildFailure, FlightRecorderEntry, WorkerError
    from clusterctl.agent.protocol.sample_types import StackDumpOffer, WorkerStatus, WorkerStatusSample
_STALE_S = 10.0


def inside(status_dir: str, rank: int, now: float) -> WorkerStatusSample | None:
    """What the shim in a worker says, with ages (seconds) for times; `None` if it says nothing or its process is gone.

    Keys: pid, step, source, beats, seq, backend, timeout_s, frameworks, facts, degraded as the shim wrote them, and
    age_s (of the file), progress_age_s, main_age_s, phase {name, age_s, limit_s}; unseen: true where the file is old
    because nobody is left to write it, so that it tells nothing of now. One that is old because its process is stopped,
    or keeps the thread that writes it from running, tells of just that.
    """
    data = read_bytes(os.path.join(status_dir, f"rank-{rank}.status.json"))
    try:
        told = worker_status.sanitize_status(json.loads(data)) if data else None
    except (ValueError, RecursionError):  # user code may write anything anywhere; a bad file is no file
        return None
    process = proc.read_stat(told["pid"]) if told else None
    if told is None or process is None or process.start_time != told["start_time"]:
        return None
    found = _with_ages(told, now)
    if found["age_s"] > _STALE_S and not os.path.exists(f"/proc/{told['pid']}/task/{told['tid']}"):
        found["unseen"] = True
    return found


def _with_ages(told: WorkerStatus, now: float) -> WorkerStatusSample:
    def age(moment: float) -> float:
        return round(max(0.0, now - moment), 3)

    progress, main, phase = told["progress_time"], told["main_time"], told["phase"]
    return {
        "pid": told["pid"],
        "step": told["step"],
        "source": told["source"],
        "beats": told["beats"],
        "seq": told["seq"],
        "backend": told["backend"],
        "timeout_s": told["timeout_s"],
        "frameworks": told["frameworks"],
        "facts": told["facts"],
        "degraded": told["degraded"],
        "looks": told.get("looks", 0),
        "held": told.get("held", 0),
        "age_s": age(told["time"]),
        "progress_age_s": None if progress is None else age(progress),
        "main_age_s": None if main is None else age(main),
        "phase": phase and {"name": phase["name"], "age_s": age(phase["since"]), "limit_s": phase["limit_s"]},
    }


def claimed_elsewhere(status_dir: str, known: Iterable[int]) -> list[int]:
    """Ranks that started below another worker of ours, as under torchrun.

    Args:
        status_dir: Where the shims of this attempt write.
        known: Our own workers' ranks.
    """
    ours = set(known)
    names = glob.glob(os.path.join(glob.escape(status_dir), "rank-*.status.json"))
    ranks = (os.path.basename(name)[len("rank-") : -len(".status.json")] for name in names)
    # Any worker may put any name there.
    found = [int(rank) for rank in ranks if rank.isdecimal() and rank.isascii() and len(rank) <= _RANK_DIGITS]
    return sorted(rank for rank in found if rank not in ours)[:_MOST_CLAIMED]


def ready(status_dir: str, rank: int) -> StackDumpOffer | None:
    """What the shim of a rank has announced, `None` if nothing readable or if that process is gone."""
    try:
        said = json.loads(read_bytes(os.path.join(status_dir, f"rank-{rank}.ready.json")) or b"null")
        numbers: StackDumpOffer = {
            "pid": int(said["pid"]),
            "start_time": int(said["start_time"]),
            "signal": int(said["signal"]),
            "fd": int(said["fd"]),
            "dev": int(said["dev"]),
            "ino": int(said["ino"]),
            "main_thread": int(said["main_thread"]),
        }
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a worker may write anything there
        return None
    return numbers if proc.is_alive(proc.ProcessIdentity(numbers["pid"], numbers["start_time"])) else None


def group_places(status_dir: str) -> dict[int, int]:
    """Size of the default process group by rank in it, of all that were seen in one on this node."""
    places: dict[int, int] = {}
    for path in glob.glob(os.path.join(glob.escape(status_dir), "rank-*.group.json"))[:_MOST_CLAIMED]:
        try:
            rank, size = map(int, json.loads(read_bytes(path) or b"null"))
        except (ValueError, TypeError, OverflowError, RecursionError):  # a worker may write anything there
            continue
        if 0 <= rank < size < 10**_RANK_DIGITS:
            places[rank] = size
    return places


def swallowed_failure(status_dir: str, rank: int, leader: int) -> WorkerError | None:
    """How the Python of a rank failed whose first process (the pid `leader`) ended with 0: `{message, traceback}`.

    `None` where it ended well, still runs, or has said nothing.
    """
    try:
        said = json.loads(read_bytes(os.path.join(status_dir, f"rank-{rank}.python.json")) or b"null")
        who = proc.ProcessIdentity(int(said["pid"]), int(said["start_time"]))
        end, program, message = str(said["end"]), str(said["program"])[:_NAME], str(said["message"])[:_MOST_MESSAGE]
        trace = str(said["traceback"])[-_MOST_TRACEBACK:] or None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a worker may write anything there
        return None
    if who.pid == leader or (end == "running" and proc.is_alive(who)):
        return None
    if end == "running":
        return {"message": f"`{program}` (pid {who.pid}) ended without a word, as by a signal", "traceback": None}
    return {"message": message, "traceback": trace} if end == "failed" else None


def handled_signal(status_dir: str, rank: int) -> tuple[int, float] | None:
    """The last SIGTERM or SIGINT that the Python of a rank has handled, and when (monotonic); `None` without one."""
    try:
        said = json.loads(read_bytes(os.path.join(status_dir, f"rank-{rank}.signal.json")) or b"null")
        number, time = int(said["signal"]), float(said["time"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a worker may write anything there
        return None
    return (number, time) if number in (signal.SIGTERM, signal.SIGINT) and math.isfinite(time) else None


def worked_alone(status_dir: str, rank: int) -> bool:
    """Whether the Python of a rank has ended that had torch, and nothing of the rank was in a group with others."""
    base = os.path.join(status_dir, f"rank-{rank}")
    return os.path.exists(f"{base}.alone") and not os.path.exists(f"{base}.met")


def note_wanted_python(status_dir: str) -> None:
    """Note that the command of the workers names a Python."""
    with contextlib.suppress(OSError), open(os.path.join(status_dir, _WANTS_PYTHON), "w", encoding="ascii"):
        pass


def lacks_python(status_dir: str, rank: int) -> bool:
    """Whether the command of a rank names a Python, and none has begun in it."""
    wanted, seen = os.path.join(status_dir, _WANTS_PYTHON), os.path.join(status_dir, f"rank-{rank}.python")
    return os.path.exists(wanted) and not os.path.exists(seen)


def failed_child(status_dir: str, rank: int) -> ChildFailure | None:
    """The first child process of the Python of a rank that failed; `None` without one."""
    try:
        said = json.loads(read_bytes(os.path.join(status_dir, f"rank-{rank}.child.json")) or b"null")
        pid, message = int(said["pid"]), str(said["message"])[:_MOST_MESSAGE]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a worker may write anything there
        return None
    return {"pid": pid, "message": message} if 0 < pid < 1 << 31 and message else None


def recorded(status_dir: str, rank: int) -> list[FlightRecorderEntry] | None:
    """What the shim of a rank wrote of the flight recorder when its collectives stood still; `None` without it."""
    try:
        told = json.loads(read_bytes(os.path.join(status_dir, f"rank-{rank}.recorded.json")) or b"null")
        if not proc.is_alive(proc.ProcessIdentity(int(told["pid"]), int(told["start_time"]))):
            return None
        return [_entry(entry) for entry in told["entries"][:_MOST_RECORDED]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # a worker may write anything there
        return None


def _entry(told: dict[str, Any]) -> FlightRecorderEntry:
    return {
        "group": str(told["group"])[:_NAME],
        "number": int(told["number"]) % (1 << 62),
        "op": str(told["op"])[:_NAME],
        "sizes": str(told["sizes"])[:_NAME],
        "dtypes": str(told["dtypes"])[:_NAME],
        "done": bool(told["done"]),
        "p2p": bool(told["p2p"]),
    }


def thread_of(said: StackDumpOffer, status_dir: str, rank: int) -> int:
    """The shim's own thread, 0 where it is not known."""
    try:
        status = json.loads(read_bytes(os.path.join(status_dir, f"rank-{rank}.status.json")) or b"null")
        same = (status["pid"], status["start_time"]) == (said["pid"], said["start_time"])
        return int(status["tid"]) if same else 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


_RANK_DIGITS, _MOST_CLAIMED = 7, 1024
_WANTS_PYTHON = "wants-python"
_MOST_RECORDED, _NAME = 128, 200
_MOST_MESSAGE, _MOST_TRACEBACK = 8192, 32768
