"""Collects facts about the disks to which a run writes, and about mounts and checkpoints.

Each mount is tested in a child process of its own, because a dead file server never returns an error.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import os
import time

from clusterctl.agent.facts import child_tasks
from clusterctl.agent.linux import filesystems

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from clusterctl.agent.protocol.command_payload_types import Checkpoint, CheckpointFile


_MAX_REQUESTER = 100
"""The maximum length of the requester in the name of a test file. A file name may have 255 bytes."""


def collect_disks(
    root: str, workdir: str | None, other_folders: list[str], requester: str = "", checkpoint_pattern: str | None = None
) -> dict[str, Any]:
    """Return the facts of the group `disk`.

    The facts cover the root file system, /tmp, the home, the workdir, the checkpoint folder, and `other_folders`.

    Args:
        root: The prefix of the root file system.
        workdir: The folder of the code.
        other_folders: Further folders whose space is measured.
        requester: The node and the run of the request. The name of the test file contains this text.
        checkpoint_pattern: The glob pattern of the checkpoints in the cluster file.
    """
    places = [("root", root), ("tmp", os.environ.get("TMPDIR") or "/tmp"), ("home", os.path.expanduser("~"))]
    if workdir:
        places.append(("workdir", os.path.expanduser(workdir)))
    if workdir and checkpoint_pattern:
        places.append(("checkpoints", find_checkpoint_folder(os.path.expanduser(workdir), checkpoint_pattern)))
    places += [("path", os.path.expanduser(path)) for path in other_folders]
    return {"paths": [_measure_disk(path, what, requester) for what, path in places]}


def _measure_disk(path: str, what: str, requester: str) -> dict[str, Any]:
    """Return the space of a folder. If the folder does not exist yet, measure its nearest existing parent."""
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
    return {**entry, **_test_write(place, requester)} if what in ("workdir", "checkpoints", "path", "tmp") else entry


def _test_write(place: str, requester: str) -> dict[str, Any]:
    """Write, sync and remove a small file in a folder.

    Nodes with the same name may share the folder, so the file name ends in random characters.
    """
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in requester)[:_MAX_REQUESTER]
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
"""The maximum number of tested mounts. The mounts in the request come first."""


def collect_mounts(root: str, required: list[str], deadline: float) -> dict[str, Any]:
    """Return the facts of the group `mounts`."""
    table = filesystems.list_mounts(root)
    # If two mounts have the same mount point, the later mount is visible.
    fstypes = {mount.mount_point: mount.fstype for mount in table}
    folders = [os.path.expanduser(path) for path in required]
    folders += [place for place, kind in fstypes.items() if filesystems.may_hang(kind) and place not in folders]
    tasks: dict[str, child_tasks.Task] = {p: functools.partial(_list_mount, p) for p in folders[:MAX_MOUNTS]}
    results = child_tasks.run_tasks(tasks, deadline - 0.4 if deadline - time.monotonic() > 0.8 else deadline - 0.15)
    entries: list[dict[str, Any]] = []
    for path, result in results.items():
        mount = filesystems.find_mount(path, table)
        kind, device = (None, None) if mount is None else (mount.fstype, mount.device)
        outcome = {name: result.get(name) for name in ("status", "reason", "ms", "state", "wchan")}
        entries.append({"path": path, "fs": kind, "device": device, **outcome})
    return {"paths": entries, "left_out": max(0, len(folders) - MAX_MOUNTS)}


def _list_mount(path: str) -> dict[str, Any]:
    os.stat(path)
    with os.scandir(path) as entries:
        next(iter(entries), None)
    return {}


_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", ".lock")
_CHUNK_BYTES = 1 << 20
_MAX_CHECKPOINTS = 5000
"""The maximum number of checkpoints in an answer, which must fit into a frame."""


def list_complete_checkpoints(workdir: str, pattern: str) -> list[Checkpoint]:
    """Return the newest `_MAX_CHECKPOINTS` complete checkpoints, with the newest first.

    The time and size of a checkpoint are the time and size of its newest file. A link to another checkpoint (`latest`)
    is left out. A file is complete if it has its final name. A folder of torch.distributed.checkpoint is complete if it
    has the file `.metadata`, which is written last.
    """
    checkpoints: list[Checkpoint] = []
    paths = [path.rstrip("/") for path in _expand_pattern(workdir, pattern)]
    links = {path for path in paths if os.path.islink(path)}
    plain = {os.path.realpath(path) for path in paths if path not in links} if links else set()
    for path in paths:
        if path in links and os.path.realpath(path) in plain:
            continue
        name = os.path.basename(path)
        if name.startswith(".") or name.endswith(_UNFINISHED):
            continue
        version = _describe_if_complete(path)
        if version is not None:
            shown = path if os.path.isabs(os.path.expanduser(pattern)) else os.path.relpath(path, workdir)
            checkpoints.append({"path": shown, "mtime": version[0], "size": version[1]})
    return sorted(checkpoints, key=lambda one: one["mtime"], reverse=True)[:_MAX_CHECKPOINTS]


def find_checkpoint_folder(workdir: str, pattern: str) -> str:
    """Return the folder that contains all checkpoints: the part of the pattern before its first wildcard."""
    *folders, _ = os.path.join(workdir, os.path.expanduser(pattern)).split("/")
    return "/".join(itertools.takewhile(lambda name: not glob.has_magic(name), folders)) or "/"


def list_checkpoint_file_versions(workdir: str, pattern: str) -> list[tuple[float, int]]:
    """Return the time and size of every file of all checkpoints, including incomplete checkpoints."""
    return sorted({version for path in _expand_pattern(workdir, pattern) for version in _list_versions(path)})


def list_checkpoint_files(workdir: str, path: str, *, with_hashes: bool) -> list[CheckpointFile]:
    """Return the files of one checkpoint. Their names are relative to the parent folder of the checkpoint."""
    whole = os.path.join(os.path.expanduser(workdir), os.path.expanduser(path)).rstrip("/")
    found: list[CheckpointFile] = []
    for file in sorted(_list_files(whole)):
        with contextlib.suppress(OSError):
            info = os.stat(file)
            name = os.path.relpath(file, os.path.dirname(whole))
            digest = _hash_file(file) if with_hashes else ""
            found.append({"name": name, "mtime": info.st_mtime, "size": info.st_size, "sha256": digest})
    return found


def _expand_pattern(workdir: str, pattern: str) -> list[str]:
    whole = os.path.expanduser(pattern)
    return glob.glob(whole if os.path.isabs(whole) else os.path.join(glob.escape(workdir), whole), recursive=True)


def _describe_if_complete(path: str) -> tuple[float, int] | None:
    try:
        names = os.listdir(path) if os.path.isdir(path) else None
    except OSError:
        return None
    if names is None:
        return next((version for version in _list_versions(path) if version[1]), None)
    if ".metadata" in names:
        return next(_list_versions(os.path.join(path, ".metadata")), None)
    sharded = any(name.endswith(".distcp") for name in names)
    # Use the times of files, because the time of a folder does not change when an existing file is rewritten.
    return None if sharded else max(_list_versions(path), default=None)


def _list_versions(path: str) -> Iterator[tuple[float, int]]:
    """Yield the time and size of a file, or of all files in a folder."""
    for file in _list_files(path):
        with contextlib.suppress(OSError):
            info = os.stat(file)
            yield info.st_mtime, info.st_size


def _list_files(path: str) -> Iterator[str]:
    """Yield the path of a file, or of all files in a folder."""
    if not os.path.isdir(path):
        yield path
        return
    for place, _, names in os.walk(path):
        for name in names:
            yield os.path.join(place, name)


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def collect_newest_checkpoint(workdir: str, pattern: str) -> dict[str, Any]:
    """Return the facts of the group `checkpoint`: path and size of the newest complete checkpoint, or twice `None`."""
    checkpoints = list_complete_checkpoints(os.path.expanduser(workdir), pattern)
    if not checkpoints:
        return {"path": None, "bytes": None}
    path = os.path.join(os.path.expanduser(workdir), checkpoints[0]["path"])
    return {"path": path, "bytes": sum(size for _, size in _list_versions(path))}
