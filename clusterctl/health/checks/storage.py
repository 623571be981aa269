"""Checks of disks and mounts: free space, free inodes, writable folders, mounts that answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clusterctl.formatting import format_size
from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.findings import Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Disks and mounts"
MIN_FREE = 1.0 * 1024**3
"""A file system with fewer free bytes is nearly full."""
AMPLE_FREE = 100.0 * 1024**3
"""A file system with at least this number of free bytes is healthy, whatever the percentage of used space."""


def _list_paths(node: CheckedNode) -> list[dict[str, Any]]:
    return [entry for entry in node.group().facts.get("paths") or [] if entry.get("total") is not None]


def _list_unmeasured(node: CheckedNode) -> Iterator[Outcome]:
    for entry in node.group().facts.get("paths") or []:
        if entry.get("total") is None:
            yield unknown(f"{entry['path']} cannot be measured: {entry.get('error')}")


def is_nearly_full(free: float, total: float, min_free: float) -> bool:
    """Return whether a file system is nearly full: less than `min_free` free, and more than half of it used."""
    return free < min_free and free * 2 < total


@remedy(Action.FREE_SPACE, "Free space: old runs (`clusterctl clean`), caches, checkpoints")
@node_check(
    "host.disk",
    _FAMILY,
    group="disk",
    thresholds={"warn": 85.0, "enough": AMPLE_FREE, "least": MIN_FREE, "checkpoints": 2.0},
)
def check_disk_space(node: CheckedNode) -> Iterator[Outcome]:
    """There is free space in the folders to which a run writes.

    A full disk can destroy the work of hours at the next checkpoint.

    Source: statvfs of working directory, checkpoints, temporary directory, home and /; size of the newest checkpoint
    Healthy: FAIL below `least` free bytes, or if the next checkpoint does not fit; WARN if fewer than `checkpoints`
        checkpoints fit. WARN from `warn` percent used if less than `enough` bytes are free: a file server with
        terabytes free is healthy at 96 %. The root file system is at most WARN, and PASS if it is read-only
    """
    adverse = [outcome for entry in _list_file_systems(node) if (outcome := _judge_space(node, entry)) is not None]
    yield from adverse
    yield from _list_unmeasured(node)
    if not adverse and _list_paths(node):
        yield ok(f"at least {format_size(min(entry['free'] for entry in _list_paths(node)))} free")


def _judge_space(node: CheckedNode, entry: dict[str, Any]) -> Outcome | None:
    """Return the outcome for too little space at a path, or `None`."""
    used, free = entry.get("used", entry["total"] - entry["free"]), entry["free"]
    percent = 100 * used / (used + free) if used + free else 0.0
    words = f"{entry['path']}: {percent:.0f} % full, {format_size(free)} free"
    more = {"value": free, "expected": node.limit("least")}
    if _is_image(entry):
        return None
    if is_nearly_full(free, entry["total"], node.limit("least")):
        return (warn if entry["what"] == "root" else fail)(words, **more)
    saved = node.group("checkpoint").facts.get("bytes") if entry["what"] == "checkpoints" else None
    if saved and free < saved * node.limit("checkpoints"):
        say = fail if free < saved else warn
        return say(
            f"{words}, a checkpoint takes {format_size(saved)}", value=free, expected=saved * node.limit("checkpoints")
        )
    crowded = percent >= node.limit("warn") and free < node.limit("enough")
    small = free < node.limit("least") and entry["what"] != "root"
    return warn(words, **more) if crowded or small else None


def _is_image(entry: dict[str, Any]) -> bool:
    return entry["what"] == "root" and bool(entry.get("readonly"))


_ORDER = ("checkpoints", "path", "workdir", "tmp", "home", "root")
"""Purposes of paths. If several paths are on one file system, the first purpose in this order names the file system."""


def _list_file_systems(node: CheckedNode) -> list[dict[str, Any]]:
    """Return one path for each file system. Paths with equal total and free space are on one file system."""
    first_by_size: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in sorted(_list_paths(node), key=lambda entry: _ORDER.index(entry["what"])):
        first_by_size.setdefault((entry["total"], entry["free"], entry["inodes"]), entry)
    return list(first_by_size.values())


@remedy(Action.FREE_SPACE, "Remove directories of many small files (caches, old environments)")
@node_check("host.inodes", _FAMILY, group="disk", thresholds={"warn": 85.0, "enough": 1e6, "least": 1e4})
def check_free_inodes(node: CheckedNode) -> list[Outcome]:
    """There are free inodes: a disk can run out of inodes before it runs out of space.

    Source: statvfs of the paths of `host.disk`
    Healthy: FAIL below `least` free inodes; WARN from `warn` percent used if fewer than `enough` inodes are free
    """
    bad = []
    for entry in _list_file_systems(node):
        free, total = entry["inodes_free"], entry["inodes"]
        if not total or _is_image(entry):
            continue
        percent, is_full = 100 * (1 - free / total), is_nearly_full(free, total, node.limit("least"))
        if is_full or (percent >= node.limit("warn") and free < node.limit("enough")):
            say = fail if is_full and entry["what"] != "root" else warn
            bad.append(say(f"{entry['path']}: {percent:.0f} % of inodes used, {free} free", value=free))
    return [*bad, *_list_unmeasured(node), *([] if bad or not _list_paths(node) else [ok("enough inodes everywhere")])]


@remedy(Action.CHECK_MOUNT, "Remount or repair the file system, or correct owner and mode of the directory")
@node_check("host.readonly", _FAMILY, group="disk")
def check_writable_folders(node: CheckedNode) -> Iterator[Outcome]:
    """A run can write its files.

    Source: the agent writes, syncs and removes a small file in working directory, temporary directory and checkpoints
    Healthy: all three folders can be written
    """
    tried = [entry for entry in _list_paths(node) if entry.get("writable") is not None]
    for entry in tried:
        if not entry["writable"]:
            why = "read-only file system" if entry.get("readonly") else entry.get("error")
            yield fail(f"{entry['path']} cannot be written: {why}", value=entry["path"])
    yield from _list_unmeasured(node)
    if not tried:
        yield unknown("the agent tried to write to no folder")
    elif all(entry["writable"] for entry in tried):
        yield ok(f"{len(tried)} folders can be written")


@remedy(
    Action.CHECK_MOUNT,
    "Remount it, or ask the owner of the server; a process that uses the mount hangs and cannot be killed",
)
@node_check("host.mounts", _FAMILY, group="mounts")
def check_mounts(node: CheckedNode) -> Outcome | list[Outcome]:
    """Every mount answers.

    If a file server is dead, every process that uses its mount hangs.

    Source: stat and listing of every network or FUSE mount and of `health.expect.mounts`, each in its own process
    Healthy: every mount answers in time
    """
    entries = node.group().facts.get("paths") or []
    if not entries:
        return skip("no network mounts, and none expected")
    bad = []
    for entry in entries:
        path, status, reason = entry["path"], entry["status"], entry.get("reason")
        place = f"{path} ({entry.get('fs') or 'path'})"
        if status == "denied":
            bad.append(unknown(f"{path}: {reason}"))
        elif status != "ok":
            bad.append(fail(f"{place} hangs: {reason}" if status == "timeout" else f"{place}: {reason}", value=path))
    return bad or ok(f"{len(entries)} mounts answer")
