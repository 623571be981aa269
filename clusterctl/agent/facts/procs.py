"""Processes that matter before a run: leftovers of ours, those stuck in the kernel, daemons that a node needs."""

from __future__ import annotations

import os
import time

from clusterctl.agent.facts import children
from clusterctl.agent.linux import paths
from clusterctl.agent.linux.proc import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARKER = b"CLUSTERCTL_RUN_ID="
_LOOKS, _PAUSE = 3, 0.1
"""How often, and after how many seconds each, a process in state D is looked at again."""
_LONG_PAUSE = 0.5
"""Seconds between looks at one that holds a GPU: nobody is blamed for a read that takes a moment."""
_INIT_NAMESPACE = "pid:[4026531836]"
"""The first PID namespace of every Linux machine (`PROC_PID_INIT_INO` of the kernel's `proc_ns.h`)."""
_KERNEL_THREAD = 0x200000
"""PF_KTHREAD of the flags in `/proc/PID/stat`: no environment, no memory of its own."""
_TIME_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "openntpd", "phc2sys")


def collect(root: str, certain: float = children.STUCK_SECONDS) -> dict[str, Any]:
    """Return the group `procs`.

    Args:
        root: Prefix of /proc.
        certain: Seconds of sleep in the kernel, without being woken once, after which a process counts as stuck there.
    """
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
        "dstate": _asleep(root, stuck, certain),
        "zombies": zombies,
        "own_namespace": own_namespace(root),
        "fabric_manager": any(name.startswith("nv-fabricmanage") for name in names),
        "time_daemon": next((name for name in _TIME_DAEMONS if name in names), None),
    }


def _asleep(root: str, found: list[tuple[str, str]], certain: float) -> list[dict[str, Any]]:
    """Describe who stays in state D: for a moment any process is that reads a disk or gets memory."""
    began = time.monotonic()
    for _ in range(_LOOKS if found else 0):
        time.sleep(_PAUSE)
        found = [(name, comm) for name, comm in found if _stat(root, name)[:2] == (comm, "D")]
    described = [_described(root, name, comm) for name, comm in found]
    holders = [entry for entry in described if entry["gpu"]]
    for entry in holders:
        entry["woken"] = children.asleep(root, entry["pid"])
    while any(entry["woken"] is not None for entry in holders) and _lasted(began) < certain:
        time.sleep(_LONG_PAUSE)
        for entry in holders:
            if entry["woken"] != children.asleep(root, entry["pid"]):
                entry["woken"] = None
    for entry in described:
        still = entry.pop("woken", None) is not None
        entry["stuck_s"] = round(_lasted(began), 1) if still else None
    return described


def _lasted(began: float) -> float:
    return time.monotonic() - began


def _described(root: str, name: str, comm: str) -> dict[str, Any]:
    wchan = paths.text(root, f"/proc/{name}/wchan")
    return {"pid": int(name), "comm": comm, "wchan": wchan, "gpu": _holds_gpu(root, name)}


def own_namespace(root: str) -> bool:
    """Tell whether this is a container that sees its own processes only."""
    try:
        return os.readlink(paths.under(root, "/proc/self/ns/pid")) != _INIT_NAMESPACE
    except OSError:
        return False


def run_of(root: str, pid: str | int) -> str | None:
    """Return the run that a process carries in its environment, or `None` (also where we may not look)."""
    environ = paths.content(paths.under(root, f"/proc/{pid}/environ")) or b""
    _, found, rest = (b"\0" + environ).partition(b"\0" + MARKER)
    return shown(rest.partition(b"\0")[0].decode(errors="replace")) if found else None


def _stat(root: str, pid: str) -> tuple[str | None, str, int, bool]:
    """Return name, state and parent of a process, and whether it is a thread of the kernel."""
    content = paths.text(root, f"/proc/{pid}/stat")
    if not content or ")" not in content:
        return None, "", 0, False
    head, _, tail = content.rpartition(")")
    words = tail.split()
    return (
        shown(head.partition("(")[2]),
        words[0],
        int(words[1]),
        len(words) > 6 and bool(int(words[6]) & _KERNEL_THREAD),
    )


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
        return any(os.readlink(f"{base}/{fd}").startswith(("/dev/nvidia", "/dev/kfd")) for fd in os.listdir(base))
    except OSError:
        return False
