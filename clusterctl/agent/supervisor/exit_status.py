"""How a worker ended: its exit status, its last output, and whether the kernel's OOM killer has killed it.

The waiter writes the exit status to an exit file. If there is no exit file and the worker has become a child of the
supervisor, the supervisor uses the wait status.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.linux import cgroup, proc
from clusterctl.agent.linux.syscalls import read_json, read_or_empty
from clusterctl.agent.node_state import run_dir

if TYPE_CHECKING:
    from clusterctl.agent.protocol.record_types import ExitRecord, WorkerError
    from clusterctl.agent.supervisor.workers import Worker

_UNKNOWN_WAITER_S = 2.0
"""The supervisor waits this many seconds for the exit file of a waiter with an unknown pid."""
_MAX_LOG_RECORDS = 20000
_CLOCK_DIFFERENCE_S = 5.0
"""Maximum difference in seconds between the clock of the kernel log and the monotonic clock."""


def collect_exit_record(worker: Worker, exit_file: str, release_space: Callable[[], None]) -> ExitRecord | None:
    """Return the exit record from the exit file or the wait status; `None` while the worker or its waiter is alive.

    Args:
        worker: The worker, whose `last_alive_at` this function updates.
        exit_file: The exit file of the worker.
        release_space: Function that frees disk space. It is called while the exit file is missing, because the disk may
            be full.
    """
    if proc.is_alive(worker.waiter):
        # The content of an exit file is final, even if the waiter still lives.
        end = run_dir.read_exit_record(exit_file)
        if end is None and not proc.is_alive(worker.identity):
            with contextlib.suppress(ProcessLookupError):
                # A signal may have stopped the waiter, which has to write the exit file.
                os.kill(worker.waiter.pid, signal.SIGCONT)
            release_space()
        return end
    if worker.wait_status is None and proc.is_alive(worker.identity):
        worker.last_alive_at = time.monotonic()
        return None
    end = run_dir.read_exit_record(exit_file)
    if end is None and not worker.waiter.pid and time.monotonic() - worker.last_alive_at < _UNKNOWN_WAITER_S:
        return None
    _reap_status(worker)
    return end or _make_exit_from_status(worker)


def _reap_status(worker: Worker) -> None:
    """Reap a worker that has become a child of this process, unless it was reaped before."""
    if worker.wait_status is None and worker.identity.pid:
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(worker.identity.pid, os.WNOHANG)
            worker.wait_status = status if pid else None


def _make_exit_from_status(worker: Worker) -> ExitRecord:
    """Return the exit record of a worker without a waiter; exit code and signal are `None` without a wait status."""
    now = time.monotonic()
    end: ExitRecord = {"exit_code": None, "signal": None, "earliest": worker.last_alive_at, "mono": now}
    if worker.wait_status is not None:
        if os.WIFSIGNALED(worker.wait_status):
            end["signal"] = os.WTERMSIG(worker.wait_status)
        else:
            end["exit_code"] = os.WEXITSTATUS(worker.wait_status)
    return end


@dataclass(frozen=True)
class OomKillCounts:
    """The kernel's counts of OOM kills, in this cgroup and on the machine, with the monotonic time of reading."""

    cgroup: int | None
    host: int | None
    read_at: float


def read_oom_kill_counts() -> OomKillCounts:
    """Read how often the OOM killer has killed a process so far."""
    match = re.search(rb"^oom_kill (\d+)$", read_or_empty("/proc/vmstat"), re.MULTILINE)
    return OomKillCounts(cgroup.count_oom_kills(), int(match[1]) if match else None, time.monotonic())


def find_oom_evidence(before: OomKillCounts, pid: int) -> tuple[str | None, OomKillCounts]:
    """Return the evidence that the OOM killer killed `pid`: `cgroup`, `kernel log`, `probably` or `None`.

    The second value has to be the argument `before` of the next call. The second value counts the kill that explains
    the end of `pid`, so that no kill explains two ends.
    """
    now = read_oom_kill_counts()
    if before.cgroup is not None and now.cgroup is not None and now.cgroup > before.cgroup:
        return "cgroup", replace(before, cgroup=before.cgroup + 1)
    logged = _is_in_kernel_log(pid, before.read_at)
    if logged:
        return "kernel log", before
    if logged is None and before.host is not None and now.host is not None and now.host > before.host:
        return "probably", replace(before, host=before.host + 1)
    return None, before


def _is_in_kernel_log(pid: int, since: float) -> bool | None:
    """Return whether the kernel log says that a process was killed after `since`; `None` if the log is unreadable.

    Args:
        pid: The process.
        since: Monotonic seconds.
    """
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    wanted = re.compile(rb"[Kk]illed process %d\b" % pid)
    try:
        for _ in range(_MAX_LOG_RECORDS):
            record = b""
            # EPIPE: the kernel overwrote the record during the read.
            with contextlib.suppress(BrokenPipeError):
                record = os.read(fd, 8192)
            # A record is `priority,sequence,microseconds,flags;text`.
            fields = record.split(b",", 3)
            if wanted.search(record) and int(fields[2]) / 1e6 >= since - _CLOCK_DIFFERENCE_S:
                return True
    except (OSError, ValueError, IndexError):
        return False
    finally:
        os.close(fd)
    return False


# --- the error and the last output of a worker

_TRACEBACK_MARKS = ("Traceback (most recent call last)", '  File "')
_MAX_FINAL_OUTPUT = 1024
_READ_FACTOR = 8
"""`read_output_tail` reads this number times `limit` bytes, because long stack dumps may follow an error message."""


def read_error_file(path: str) -> WorkerError | None:
    """Return `{message, traceback}` from the error file of `torch.distributed.elastic`, or `None`.

    The error file holds `{"message": text}` or `{"message": {"message": text, "extraInfo": {"py_callstack": text}}}`.
    """
    value = read_json(path)
    if value is None or "message" not in value:
        return None
    message = value["message"]
    if not isinstance(message, dict):
        return {"message": str(message)[:8192], "traceback": None}
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return {"message": str(message.get("message"))[:8192], "traceback": None if stack is None else str(stack)[-32768:]}


def read_final_output(path: str, *, has_failed: bool, stopped_size: int | None = None) -> str:
    """Return the end of the output of an ended worker, which may contain the reason of the exit.

    Args:
        path: The output file.
        has_failed: Whether the worker ended with an exit code other than 0. If false, the result is shorter, but a
            traceback is always complete.
        stopped_size: The size of the output when the worker was stopped, or `None`. If `stopped_size` is given, the
            result is only a traceback from before the stop, or "".
    """
    end = read_output_tail(path, size=stopped_size)
    if any(mark in end for mark in _TRACEBACK_MARKS):
        return end
    if stopped_size is not None:
        return ""
    return end if has_failed else end[-_MAX_FINAL_OUTPUT:]


def read_output_tail(path: str, limit: int = 8192, size: int | None = None) -> str:
    """Return the end of an output file for a person to read.

    If the output is longer than `limit`, the result leaves out stack frames of C++ and of threads.

    Args:
        path: The file.
        limit: Maximum number of bytes to return.
        size: Ignore all bytes after this offset.
    """
    try:
        with open(path, "rb") as file:
            whole = os.fstat(file.fileno()).st_size
            start = max(0, min(whole, whole if size is None else size) - _READ_FACTOR * limit)
            file.seek(start)
            end = file.read(_READ_FACTOR * limit if size is None else max(0, min(size - start, _READ_FACTOR * limit)))
    except OSError:
        return ""
    if len(end) > limit:
        # Without the frames, the result also contains the error message above them.
        end = b"".join([line for line in end.splitlines(keepends=True) if not _is_stack_frame(line)])
    return end[-limit:].decode("utf-8", "replace")


def _is_stack_frame(line: bytes) -> bool:
    """Return whether a line is a C++ stack frame, or a stack frame of a thread in a dump of `faulthandler`."""
    line = line.lstrip()
    of_thread = line.startswith(b'File "') and b" in " in line and b", in " not in line
    return of_thread or line.startswith((b"frame #", b"Thread 0x"))
