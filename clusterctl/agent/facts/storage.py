"""Free space and inodes where a run writes, whether a file can be written there, and whether mounts respond.

Each mount is listed in a child of its own, because a dead file server never returns an error.
"""

from __future__ import annotations

import contextlib
import os
import time

from clusterctl.agent.facts import child_tasks
from clusterctl.agent.linux import filesystems

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


_LONGEST = 100
"""Characters of a name in a test file's name; a file name may have 255 bytes."""


def collect_disks(
    root: str, workdir: str | None, more: list[str], owner: str = "", pattern: str | None = None
) -> dict[str, Any]:
    """Return the group `disk`: the root file system, /tmp, home, the working directory, checkpoints, and `more`.

    Args:
        root: Prefix of the root file system.
        workdir: The folder of the code.
        more: Other folders.
        owner: Node and run of the request. They are part of the test file's name, which other nodes may see.
        pattern: The glob of the checkpoints in the cluster file.
    """
    places = [("root", root), ("tmp", os.environ.get("TMPDIR") or "/tmp"), ("home", os.path.expanduser("~"))]
    if workdir:
        places.append(("workdir", os.path.expanduser(workdir)))
    if workdir and pattern:
        places.append(("checkpoints", _before_wildcards(os.path.expanduser(workdir), os.path.expanduser(pattern))))
    places += [("path", os.path.expanduser(path)) for path in more]
    return {"paths": [_measure(path, what, owner) for what, path in places]}


def _measure(path: str, what: str, owner: str) -> dict[str, Any]:
    """Measure the nearest existing folder: a working directory may not exist yet."""
    place = path
    while not os.path.isdir(place) and place not in ("/", ""):
        place = os.path.dirname(place)
    entry: dict[str, Any] = {"path": path, "what": what, "error": None, "writable": None}
    try:
        statvfs = os.statvfs(place)
    except OSError as error:
        return {**entry, "error": error.strerror}
    entry = {
        **entry,
        "total": statvfs.f_blocks * statvfs.f_frsize,
        "free": statvfs.f_bavail * statvfs.f_frsize,
        "used": (statvfs.f_blocks - statvfs.f_bfree) * statvfs.f_frsize,
        "inodes": statvfs.f_files,
        "inodes_free": statvfs.f_favail,
        "readonly": bool(statvfs.f_flag & os.ST_RDONLY),
    }
    return {**entry, **_test_write(place, owner)} if what in ("workdir", "checkpoints", "path", "tmp") else entry


def _before_wildcards(workdir: str, pattern: str) -> str:
    """Return the folder above everything that a glob can match."""
    folder = os.path.dirname(os.path.join(workdir, pattern))
    while any(sign in folder for sign in "*?["):
        folder = os.path.dirname(folder)
    return folder


def _test_write(place: str, owner: str) -> dict[str, Any]:
    """Write, sync and remove one small file, as a checkpoint would.

    Nodes that share the folder may have equal names and pids, so the file name ends in random characters.
    """
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in owner)[:_LONGEST]
    name = os.path.join(place, f".clusterctl-probe-{plain}-{os.urandom(6).hex()}")
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, b"clusterctl")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return {"writable": False, "error": error.strerror}
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return {"writable": True, "error": None}


MAX_MOUNTS = 32
"""The most mounts that are checked; those that the request names come first."""


def collect_mounts(root: str, required: list[str], deadline: float) -> dict[str, Any]:
    """Return the group `mounts`."""
    table = filesystems.list_mounts(root)
    # Of two mounts at one place, the later one is visible.
    fstypes = {mount.mount_point: mount.fstype for mount in table}
    folders = [os.path.expanduser(path) for path in required]
    folders += [place for place, kind in fstypes.items() if filesystems.may_hang(kind) and place not in folders]
    tasks = {path: _listing(path) for path in folders[:MAX_MOUNTS]}
    results = child_tasks.run_tasks(tasks, deadline - 0.4 if deadline - time.monotonic() > 0.8 else deadline - 0.15)
    entries: list[dict[str, Any]] = []
    for path, result in results.items():
        mount = filesystems.find_mount(path, table)
        kind, device = (None, None) if mount is None else (mount.fstype, mount.device)
        entries.append(
            {"path": path, "fs": kind, "device": device, "status": result.get("status"), "reason": result.get("reason"),
             "ms": result.get("ms"), "state": result.get("state"), "wchan": result.get("wchan")}
        )  # fmt: skip
    return {"paths": entries, "left_out": max(0, len(folders) - MAX_MOUNTS)}


def _listing(path: str) -> child_tasks.Task:
    def look() -> dict[str, Any]:
        os.stat(path)
        with os.scandir(path) as entries:
            next(iter(entries), None)
        return {}

    return look
