"""Processes that matter before a run: leftovers of ours, those stuck in the kernel, daemons that a node needs."""

from __future__ import annotations

import os
import time

from clusterctl.agent.facts import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARKER = b"CLUSTERCTL_RUN_ID="
_LOOKS, _PAUSE = 3, 0.1
"""How often, and after how many seconds each, a process in state D is looked at again."""
_KERNEL_THREAD = 0x200000
"""PF_KTHREAD of the flags in `/proc/PID/stat`: no environment, no memory of its own."""
_TIME_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "openntpd", "phc2sys")


def collect(root: str) -> dict[str, Any]:
    """Return the group `procs`."""
    runs, names, zombies = [], set(), 0
    stuck: list[tuple[str, str]] = []
    for name in paths.names(root, "/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        comm, state, parent, kernel = _stat(root, name)
        if comm is None:
            continue
        names.add(comm)
        zombies += state == "Z"
        # Looks of this very probe that hang are told of by what they looked at.
        if state == "D" and parent != os.getppid():
            stuck.append((name, comm))
        run = None if state == "Z" or kernel else run_of(root, name)
        # The probe and what started it carry the marker of the run on whose behalf they look.
        if run is not None and not _is_ancestor(root, name):
            runs.append({"run": run, "pid": int(name), "comm": comm})
    return {
        "runs": runs,
        "dstate": [_described(root, name, comm) for name, comm in _still_stuck(root, stuck)],
        "zombies": zombies,
        "fabric_manager": any(name.startswith("nv-fabricmanage") for name in names),
        "time_daemon": next((name for name in _TIME_DAEMONS if name in names), None),
    }


def _still_stuck(root: str, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those who stay in state D: for a moment anybody is who reads a disk or gets memory."""
    for _ in range(_LOOKS if found else 0):
        time.sleep(_PAUSE)
        found = [(name, comm) for name, comm in found if _stat(root, name)[:2] == (comm, "D")]
    return found


def _described(root: str, name: str, comm: str) -> dict[str, Any]:
    wchan = paths.text(root, f"/proc/{name}/wchan")
    return {"pid": int(name), "comm": comm, "wchan": wchan, "gpu": _holds_gpu(root, name)}


def run_of(root: str, pid: str | int) -> str | None:
    """Return the run that a process carries in its environment, or `None` (also where we may not look)."""
    environ = paths.content(paths.under(root, f"/proc/{pid}/environ")) or b""
    _, found, rest = (b"\0" + environ).partition(b"\0" + MARKER)
    return rest.partition(b"\0")[0].decode(errors="replace") if found else None


def _stat(root: str, pid: str) -> tuple[str | None, str, int, bool]:
    """Return name, state and parent of a process, and whether it is a thread of the kernel."""
    content = paths.text(root, f"/proc/{pid}/stat")
    if not content or ")" not in content:
        return None, "", 0, False
    head, _, tail = content.rpartition(")")
    words = tail.split()
    return head.partition("(")[2], words[0], int(words[1]), len(words) > 6 and bool(int(words[6]) & _KERNEL_THREAD)


def _is_ancestor(root: str, pid: str) -> bool:
    above = os.getpid()
    while above > 1:
        if above == int(pid):
            return True
        content = paths.text("/" if root == "/" else root, f"/proc/{above}/stat") or ""
        words = content.rpartition(")")[2].split()
        if len(words) < 2:
            return False
        above = int(words[1])
    return False


def _holds_gpu(root: str, pid: str) -> bool:
    base = paths.under(root, f"/proc/{pid}/fd")
    try:
        return any(os.readlink(f"{base}/{fd}").startswith("/dev/nvidia") for fd in os.listdir(base))
    except OSError:
        return False
