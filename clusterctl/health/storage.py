"""Disks and mounts where a run writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import View, node_check
from clusterctl.health.host import size
from clusterctl.health.model import Action, Outcome, failed, passed, skipped, unknown, warned

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Disks and mounts"
_GIB = 1024**3


def _places(view: View) -> list[dict[str, Any]]:
    return [entry for entry in view.group().data.get("paths") or [] if entry.get("total") is not None]


def _unseen(view: View) -> Iterator[Outcome]:
    for entry in view.group().data.get("paths") or []:
        if entry.get("total") is None:
            yield unknown(f"{entry['path']} cannot be measured: {entry.get('error')}")


@node_check(
    name="host.disk",
    family=_FAMILY,
    source="statvfs of /, temporary directory, home, working directory, checkpoints",
    threshold="less than `warn` percent used, FAIL from `fail` percent or under `least` bytes free",
    severity="FAIL",
    remedy="Free space: old runs (`clusterctl clean`), caches, checkpoints",
    action=Action.FREE_SPACE,
    group="disk",
    thresholds={"warn": 85.0, "fail": 95.0, "least": 1.0 * _GIB},
)
def disk(view: View) -> Iterator[Outcome]:
    """There is space where a run writes: a checkpoint that fails after hours costs the hours."""
    bad = False
    for entry in _folded(view):
        used, free = entry.get("used", entry["total"] - entry["free"]), entry["free"]
        percent = 100 * used / (used + free) if used + free else 0.0
        full = percent >= view.limit("fail") or free < view.limit("least")
        if full or percent >= view.limit("warn"):
            bad = True
            say = failed if full else warned
            yield say(
                f"{entry['path']}: {percent:.0f} % full, {size(free)} free",
                value=round(percent, 1),
                expected=view.limit("warn"),
            )
    yield from _unseen(view)
    if not bad and _places(view):
        yield passed(f"{size(min(entry['free'] for entry in _places(view)))} free at least")


def _folded(view: View) -> list[dict[str, Any]]:
    """Return one entry a file system: places that share total and free space are the same one."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in _places(view):
        key = (entry["total"], entry["free"], entry["inodes"])
        if key not in seen or entry["what"] in ("workdir", "path"):
            seen[key] = entry
    return list(seen.values())


@node_check(
    name="host.inodes",
    family=_FAMILY,
    source="statvfs of the same places",
    threshold="less than `warn` percent used, FAIL from `fail` percent",
    severity="FAIL",
    remedy="Remove directories of many small files (caches, old environments)",
    action=Action.FREE_SPACE,
    group="disk",
    thresholds={"warn": 85.0, "fail": 97.0},
)
def inodes(view: View) -> Iterator[Outcome]:
    """There are inodes left: a disk can be full with space to spare."""
    bad = False
    for entry in _folded(view):
        if not entry["inodes"]:
            continue
        percent = 100 * (1 - entry["inodes_free"] / entry["inodes"])
        if percent >= view.limit("warn"):
            bad = True
            say = failed if percent >= view.limit("fail") else warned
            yield say(
                f"{entry['path']}: {percent:.0f} % of inodes used", value=round(percent, 1), expected=view.limit("warn")
            )
    yield from _unseen(view)
    if not bad and _places(view):
        yield passed("enough inodes everywhere")


@node_check(
    name="host.readonly",
    family=_FAMILY,
    source=("one small file written, synced and removed in the working directory, temporary directory and checkpoints"),
    threshold="can be written",
    severity="FAIL",
    remedy="Remount or repair the file system, or correct owner and mode of the directory",
    action=Action.CHECK_MOUNT,
    group="disk",
)
def readonly(view: View) -> Iterator[Outcome]:
    """A run can write where it has to."""
    tried = [entry for entry in _places(view) if entry.get("writable") is not None]
    for entry in tried:
        if not entry["writable"]:
            why = "read-only file system" if entry.get("readonly") else entry.get("error")
            yield failed(f"{entry['path']} cannot be written: {why}", value=entry["path"])
    yield from _unseen(view)
    if not tried:
        yield unknown("nothing was written")
    elif all(entry["writable"] for entry in tried):
        yield passed(f"{len(tried)} places can be written")


@node_check(
    name="host.mounts",
    family=_FAMILY,
    source=(
        "stat and listing of every network or FUSE mount and of `health.expect.mounts`, each in a child of its own"
    ),
    threshold="answers in time",
    severity="FAIL",
    remedy="Remount it or ask who runs the server; what touches it now hangs and cannot be killed",
    action=Action.CHECK_MOUNT,
    group="mounts",
)
def mounts(view: View) -> Iterator[Outcome]:
    """Every mount answers. Mounted is not alive: a dead server hangs whoever asks."""
    entries = view.group().data.get("paths") or []
    for entry in entries:
        kind = entry.get("fs") or "path"
        if entry["status"] == "timeout":
            yield failed(f"{entry['path']} ({kind}) hangs: {entry.get('reason')}", value=entry["path"])
        elif entry["status"] == "denied":
            yield unknown(f"{entry['path']}: {entry.get('reason')}")
        elif entry["status"] != "ok":
            yield failed(f"{entry['path']} ({kind}): {entry.get('reason')}", value=entry["path"])
    if not entries:
        yield skipped("no network mounts and none expected")
    elif all(entry["status"] == "ok" for entry in entries):
        yield passed(f"{len(entries)} mounts answer")


CHECKS = (disk, inodes, readonly, mounts)
