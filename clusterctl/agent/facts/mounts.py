"""Whether mounts answer: a directory listing of each in a child of its own, because a dead server never says no."""

from __future__ import annotations

import os
import time

from clusterctl.agent.facts import children
from clusterctl.agent.linux import filesystems

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.types.found import host as shapes

MOST = 32
"""Mounts looked at; those that the request names come first."""


def collect(root: str, wanted: list[str], deadline: float) -> shapes.Mounts:
    """Return the group `mounts`."""
    table = filesystems.mounts(root)
    # Of two at one place the later one is seen.
    kinds = {mount.point: mount.kind for mount in table}
    folders = [os.path.expanduser(path) for path in wanted]
    folders += [place for place, kind in kinds.items() if filesystems.may_hang(kind) and place not in folders]
    tasks = {path: _listing(path) for path in folders[:MOST]}
    results = children.run(tasks, deadline - 0.4 if deadline - time.monotonic() > 0.8 else deadline - 0.15)
    entries: list[shapes.Mount] = []
    for path, result in results.items():
        mount = filesystems.holder(path, table)
        kind, device = (None, None) if mount is None else (mount.kind, mount.device)
        entries.append(
            {"path": path, "fs": kind, "device": device, "status": result.get("status"), "reason": result.get("reason"),
             "ms": result.get("ms"), "state": result.get("state"), "wchan": result.get("wchan")}
        )  # fmt: skip
    return {"paths": entries, "left_out": max(0, len(folders) - MOST)}


def _listing(path: str) -> children.Task:
    def look() -> dict[str, Any]:
        os.stat(path)
        with os.scandir(path) as entries:
            next(iter(entries), None)
        return {}

    return look
