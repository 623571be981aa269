"""What a process has of the login that it comes of, and cannot be given later.

A zygote serves the run of another login only where all of this is equal: a rank is then what it would be if it were
started by that login.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

import clusterctl.agent
from clusterctl.agent.linux import relaunch, spawn
from clusterctl.agent.linux.syscalls import read_bytes

if TYPE_CHECKING:
    from typing import Callable

_STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"),
    *("Seccomp", "Seccomp_filters", "Cpus_allowed", "Mems_allowed"),
)
"""Lines of /proc/PID/status (proc_pid_status(5))."""
_NOT_OURS = ("Max file locks", "Max resident set", "Max open files", "Max core file size")
"""Limits of which one holds a tag, and those that the agent has changed for itself; the usual ones are added."""
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_SESSION = re.compile(r"/session-[^/]*\.scope")
"""A login of its own where there is a logind: nothing but its number differs from that of the same user's last one."""


def of_self() -> dict[str, Any]:
    """Return what this process has, as values that JSON keeps as they are."""
    status = dict(line.partition(":")[::2] for line in _text("/proc/self/status").splitlines())
    limits = [line for line in _text("/proc/self/limits").splitlines() if not line.startswith(_NOT_OURS)]
    return {
        "agent": _agent(),
        "status": {name: status.get(name, "").split() for name in _STATUS},
        "limits": [line.split() for line in limits],
        "usual": spawn.usual_limits(),
        "namespaces": {
            name: _or_nothing(functools.partial(os.readlink, f"/proc/self/ns/{name}")) for name in _NAMESPACES
        },
        "cgroups": _SESSION.sub("/session.scope", _text("/proc/self/cgroup")),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "files": {name: _text(f"/proc/self/{name}") for name in ("oom_score_adj", "attr/current", "loginuid")},
    }


def _agent() -> list[Any]:
    """Return which agent this is: an archive, named for its content, or modules that can be replaced where they lie."""
    place = relaunch.root()
    modules = os.path.join(clusterctl.agent.__path__[0], "__init__.py")
    return [place, _or_nothing(lambda: os.stat(modules).st_mtime_ns)]


def _text(path: str) -> str:
    return read_bytes(path).decode("utf-8", "replace")


def _or_nothing(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except OSError:
        return None
