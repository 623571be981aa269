"""Whether mounts answer: a directory listing of each in a child of its own, because a dead server never says no."""

from __future__ import annotations

import os
import re
import time

from clusterctl.agent.facts import children
from clusterctl.agent.linux import filesystems, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST = 32
"""Mounts looked at; those that the request names come first."""


def collect(root: str, wanted: list[str], deadline: float) -> dict[str, Any]:
    """Return the group `mounts`."""
    table = _table(root)
    found = [os.path.expanduser(path) for path in wanted]
    found += [place for place, (kind, _) in table.items() if filesystems.may_hang(kind) and place not in found]
    tasks = {path: _listing(path) for path in found[:MOST]}
    results = children.run(tasks, deadline - 0.4 if deadline - time.monotonic() > 0.8 else deadline - 0.15)
    entries = []
    for path, result in results.items():
        kind, device = _home(path, table)
        keep = {key: result.get(key) for key in ("status", "reason", "ms", "state", "wchan")}
        entries.append({"path": path, "fs": kind, "device": device, **keep})
    return {"paths": entries, "left_out": max(0, len(found) - MOST)}


def _table(root: str) -> dict[str, tuple[str, str]]:
    table = {}
    for line in (paths.text(root, "/proc/self/mounts") or paths.text(root, "/proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) >= 3:
            table[_unescape(words[1])] = (words[2], _unescape(words[0]))
    return table


def _unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), word)


def _home(path: str, table: dict[str, tuple[str, str]]) -> tuple[str | None, str | None]:
    place = path
    while place not in table:
        if place in ("/", ""):
            return None, None
        place = os.path.dirname(place)
    return table[place]


def _listing(path: str) -> children.Task:
    def look() -> dict[str, Any]:
        os.stat(path)
        with os.scandir(path) as entries:
            next(iter(entries), None)
        return {}

    return look
