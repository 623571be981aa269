"""How a worker ended, and how we know that the kernel killed it for memory.

It is the word of its waiter, or else its wait status where it became our own child.
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
from clusterctl.agent.linux.syscalls import read_bytes
from clusterctl.agent.node_state import run_dir

if TYPE_CHECKING:
    from clusterctl.agent.linux.proc import ProcessIdentity
    from clusterctl.agent.protocol.process_types import ExitRecord
    from clusterctl.agent.supervisor.workers import Worker

_UNKNOWN_WAITER_S = 2.0
"""How long a waiter of which nobody knows the pid may take to write down how its worker ended."""
_MAX_LOG_RECORDS = 20000
_CLOCK_DIFFERENCE_S = 5.0
"""Seconds by which the clock of the kernel log may differ from the monotonic one."""


def collect_exit(worker: Worker, path: str, make_way: Callable[[], None]) -> ExitRecord | None:
    """Return how a worker ended, from its exit file or its wait status; `None` while it or its waiter is alive.

    Args:
        worker: Who; it is noted when it was last seen alive.
        path: Its exit file.
        make_way: Called while its waiter has yet to write that, for which the disk may be too full.
    """
    if proc.is_alive(worker.waiter):
        # Between the file and the end of the waiter lies nothing that could go wrong.
        end = run_dir.read_exit_record(path)
        if end is None and not proc.is_alive(worker.identity):
            _continue_waiter(worker.waiter)
            make_way()
        return end
    if worker.wait_status is None and proc.is_alive(worker.identity):
        worker.last_alive_at = time.monotonic()
        return None
    end = run_dir.read_exit_record(path)
    if end is None and not worker.waiter.pid and time.monotonic() - worker.last_alive_at < _UNKNOWN_WAITER_S:
        return None
    _reap_status(worker)
    return end or _make_exit_from_status(worker)


def _continue_waiter(who: ProcessIdentity) -> None:
    """Let a waiter go on that has something to write down and was stopped, by whomever."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(who.pid, signal.SIGCONT)


def _reap_status(worker: Worker) -> None:
    """Reap a worker that became our own child, where nobody has done so yet."""
    if worker.wait_status is None and worker.identity.pid:
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(worker.identity.pid, os.WNOHANG)
            worker.wait_status = status if pid else None


def _make_exit_from_status(worker: Worker) -> ExitRecord:
    """Return how a worker ended whose waiter was gone: by its status where it became our child, else nobody knows."""
    now = time.monotonic()
    end: ExitRecord = {"exit_code": None, "signal": None, "earliest": worker.last_alive_at, "mono": now}
    if worker.wait_status is not None:
        if os.WIFSIGNALED(worker.wait_status):
            end["signal"] = os.WTERMSIG(worker.wait_status)
        else:
            end["exit_code"] = os.WEXITSTATUS(worker.wait_status)
    return end


def _read_host_oom_kills() -> int | None:
    match = re.search(rb"^oom_kill (\d+)$", read_bytes("/proc/vmstat"), re.MULTILINE)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class OomKillCounts:
    """The kernel's counts of such kills, at one moment (monotonic seconds)."""

    cgroup: int | None
    host: int | None
    mono: float


def read_oom_kill_counts() -> OomKillCounts:
    """Return the counts as they are now."""
    return OomKillCounts(cgroup.count_oom_kills(), _read_host_oom_kills(), time.monotonic())


def find_oom_evidence(before: OomKillCounts, pid: int) -> tuple[str | None, OomKillCounts]:
    """Return what tells that a SIGKILL of `pid` came for memory: `cgroup`, `kernel log`, `probably`, or `None`.

    Also returns the counts to hold the next one against: a kill that explains one worker's end explains no other's.
    """
    now = read_oom_kill_counts()
    if before.cgroup is not None and now.cgroup is not None and now.cgroup > before.cgroup:
        return "cgroup", replace(before, cgroup=before.cgroup + 1)
    logged = _is_in_kernel_log(pid, before.mono)
    if logged:
        return "kernel log", before
    if logged is None and before.host is not None and now.host is not None and now.host > before.host:
        return "probably", replace(before, host=before.host + 1)
    return None, before


def _is_in_kernel_log(pid: int, since: float) -> bool | None:
    """Whether the kernel log names the process as killed since then; `None` where it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    wanted = re.compile(rb"[Kk]illed process %d\b" % pid)
    try:
        for _ in range(_MAX_LOG_RECORDS):
            record = b""
            # EPIPE: the record was overwritten while we read.
            with contextlib.suppress(BrokenPipeError):
                record = os.read(fd, 8192)
            if wanted.search(record) and _parse_log_time(record) >= since - _CLOCK_DIFFERENCE_S:
                return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _parse_log_time(record: bytes) -> float:
    """Return the time of a record of `/dev/kmsg`: `priority,sequence,microseconds,flags;text`."""
    fields = record.split(b",", 3)
    return int(fields[2]) / 1e6 if len(fields) == 4 and fields[2].isdigit() else 0.0
