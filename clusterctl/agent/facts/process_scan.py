"""Finds processes that matter before a run: leftovers of runs, processes stuck in the kernel, and required daemons."""

from __future__ import annotations

import os
import time

from clusterctl.agent.facts import child_tasks
from clusterctl.agent.linux import kernel_files, proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


RUN_ID_MARKER = b"CLUSTERCTL_RUN_ID="
_CHECKS, _PAUSE_S = 3, 0.1
"""The number of further checks of a process in state D, and the seconds before each check."""
_LONG_PAUSE_S = 0.5
"""The seconds between two checks of a process in state D that has opened a GPU."""
_INIT_NAMESPACE = "pid:[4026531836]"
"""The initial PID namespace of every Linux machine (`PROC_PID_INIT_INO` in the kernel's `proc_ns.h`)."""
_TIME_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "openntpd", "phc2sys")


def collect_processes(root: str, stuck_after_s: float = child_tasks.STUCK_AFTER_S) -> dict[str, Any]:
    """Return the facts of the group `procs`.

    Args:
        root: The prefix of /proc.
        stuck_after_s: A process that sleeps in the kernel for so many seconds without a wake-up counts as stuck.
    """
    names, zombies = set(), 0
    runs: list[dict[str, Any]] = []
    stuck: list[proc.ProcessStat] = []
    for name in kernel_files.list_names(root, "/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        stat = proc.read_stat(int(name), root)
        if stat is None:
            continue
        names.add(stat.comm)
        zombies += stat.state == "Z"
        # Leave out hung children of this probe, which are reported in their own groups.
        if stat.state == "D" and stat.ppid != os.getppid():
            stuck.append(stat)
        # Kernel threads have no environment.
        run = None if stat.state == "Z" or stat.is_kernel_thread else read_run_id(root, name)
        # Skip the probe and its ancestors: their environment contains the id of the run that has requested the probe.
        if run is not None and not _is_ancestor(root, stat.pid):
            runs.append({"run": run, "pid": stat.pid, "comm": stat.comm})
    return {
        "runs": runs,
        "dstate": _list_stuck(root, stuck, stuck_after_s),
        "zombies": zombies,
        "own_namespace": has_own_pid_namespace(root),
        "fabric_manager": any(name.startswith("nv-fabricmanage") for name in names),
        "time_daemon": next((name for name in _TIME_DAEMONS if name in names), None),
    }


def _list_stuck(root: str, sleepers: list[proc.ProcessStat], stuck_after_s: float) -> list[dict[str, Any]]:
    """Return the processes that stay in state D. Every process is in this state for a moment when it reads a disk."""
    began = time.monotonic()
    for _ in range(_CHECKS if sleepers else 0):
        time.sleep(_PAUSE_S)
        now = [proc.read_stat(one.pid, root) for one in sleepers]
        sleepers = [o for o, n in zip(sleepers, now) if n is not None and n.identity == o.identity and n.state == "D"]
    described: list[dict[str, Any]] = [
        {
            "pid": one.pid,
            "comm": one.comm,
            "wchan": proc.read_wait_channel(one.pid, root) or None,
            "gpu": _holds_gpu(root, one.pid),
            "stuck_s": None,
        }
        for one in sleepers
    ]
    # The number of wake-ups of each process that has opened a GPU; `None` once this number has changed.
    woken = {entry["pid"]: child_tasks.count_wakeups(root, entry["pid"]) for entry in described if entry["gpu"]}
    while any(often is not None for often in woken.values()) and time.monotonic() - began < stuck_after_s:
        time.sleep(_LONG_PAUSE_S)
        woken = {pid: often if often == child_tasks.count_wakeups(root, pid) else None for pid, often in woken.items()}
    for entry in described:
        if woken.get(entry["pid"]) is not None:
            entry["stuck_s"] = round(time.monotonic() - began, 1)
    return described


def has_own_pid_namespace(root: str) -> bool:
    """Return whether this process runs in a container that shows only its own processes."""
    try:
        return os.readlink(kernel_files.join_root(root, "/proc/self/ns/pid")) != _INIT_NAMESPACE
    except OSError:
        return False


def read_run_id(root: str, pid: str | int) -> str | None:
    """Return the run id in the environment of a process, or `None` if the id is missing or unreadable."""
    environ = kernel_files.read_bytes_or_none(kernel_files.join_root(root, f"/proc/{pid}/environ")) or b""
    _, marker, rest = (b"\0" + environ).partition(b"\0" + RUN_ID_MARKER)
    return proc.sanitize_name(rest.partition(b"\0")[0].decode(errors="replace")) if marker else None


def _is_ancestor(root: str, pid: int) -> bool:
    above = os.getpid()
    while above > 1:
        if above == pid:
            return True
        stat = proc.read_stat(above, root)
        above = 0 if stat is None else stat.ppid
    return False


def _holds_gpu(root: str, pid: int) -> bool:
    base = kernel_files.join_root(root, f"/proc/{pid}/fd")
    try:
        return any(os.readlink(f"{base}/{fd}").startswith(("/dev/nvidia", "/dev/kfd")) for fd in os.listdir(base))
    except OSError:
        return False
