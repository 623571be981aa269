"""Code that is not synced, so that nobody can promise later attempts the same: a change since the start is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from clusterctl.run.nodes.fan_out import each
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.session.requests import CODE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.session.session import Session


_FILE = "code.json"


_NAMED = 3


def look(sessions: Mapping[str, Session], workdirs: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the hashes of the source files in the workdirs of these nodes; a node that cannot tell is left out."""

    def ask(node: str, session: Session) -> dict[str, str]:
        return CODE.call(session, {"workdir": workdirs[node], "unsynced": True})["files"]

    return each(dict(sessions), ask)[0]


def remember(run: RunDir, seen: Mapping[str, Mapping[str, str]]) -> None:
    """Keep with the run what its nodes had at the start."""
    write_atomically(run.path / _FILE, json.dumps(seen).encode())


def remembered(run: RunDir) -> dict[str, dict[str, str]]:
    """Return what the nodes had at the start of the run."""
    try:
        hashes: dict[str, dict[str, str]] = json.loads((run.path / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return hashes


def changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the files that differ, are new or are gone, by node; a node that was not there before has none."""
    changed = {}
    for node, files in now.items():
        old = before.get(node)
        if old is not None and (differing := sorted(p for p in {*old, *files} if old.get(p) != files.get(p))):
            changed[node] = differing
    return changed


def sentence(files: list[str], nodes: str) -> str:
    """Return what a person should know of changed files."""
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    named = ", ".join(f"`{path}`" for path in files[:_NAMED])
    return f"the code on {nodes} is not synced and has changed since the run was started: {named}{more}"
