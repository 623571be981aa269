"""How we know that the kernel killed a process for memory."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, replace

from clusterctl.agent.linux import cgroup
from clusterctl.agent.linux.syscalls import read_bytes

_MAX_RECORDS = 20000
_CLOCKS_APART = 5.0
"""Seconds by which the clock of the kernel log may differ from the monotonic one."""


def _host_kills() -> int | None:
    found = re.search(rb"^oom_kill (\d+)$", read_bytes("/proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Counts:
    """The kernel's counts of such kills, at one moment (monotonic seconds)."""

    cgroup: int | None
    host: int | None
    mono: float


def counts() -> Counts:
    """Return the counts as they are now."""
    return Counts(cgroup.oom_kills(), _host_kills(), time.monotonic())


def evidence(before: Counts, pid: int) -> tuple[str | None, Counts]:
    """Return what tells that a SIGKILL of `pid` came for memory: `cgroup`, `kernel log`, `probably`, or `None`.

    Also returns the counts to hold the next one against: a kill that explains one worker's end explains no other's.
    """
    now = counts()
    if before.cgroup is not None and now.cgroup is not None and now.cgroup > before.cgroup:
        return "cgroup", replace(before, cgroup=before.cgroup + 1)
    logged = _in_kernel_log(pid, before.mono)
    if logged:
        return "kernel log", before
    if logged is None and before.host is not None and now.host is not None and now.host > before.host:
        return "probably", replace(before, host=before.host + 1)
    return None, before


def _in_kernel_log(pid: int, since: float) -> bool | None:
    """Whether the kernel log names the process as killed since then; `None` where it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    wanted = re.compile(rb"[Kk]illed process %d\b" % pid)
    try:
        for _ in range(_MAX_RECORDS):
            record = b""
            # EPIPE: the record was overwritten while we read.
            with contextlib.suppress(BrokenPipeError):
                record = os.read(fd, 8192)
            if wanted.search(record) and _logged_at(record) >= since - _CLOCKS_APART:
                return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _logged_at(record: bytes) -> float:
    """Return the time of a record of `/dev/kmsg`: `priority,sequence,microseconds,flags;text`."""
    fields = record.split(b",", 3)
    return int(fields[2]) / 1e6 if len(fields) == 4 and fields[2].isdigit() else 0.0
