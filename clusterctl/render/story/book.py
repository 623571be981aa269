"""The first lines of `status`: what run this is."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from clusterctl.formatting import format_duration
from clusterctl.render.log import rfc3339
from clusterctl.render.ranks import count
from clusterctl.render.terminal.console import safe

if TYPE_CHECKING:
    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.record.origin import Commit, Origin
    from clusterctl.run.rules.state import RunState

_SHORT = 10


def render_origin(state: RunState, origin: Origin | None, now: float, terminal: Terminal) -> list[str]:
    """Return who began a run, when, what it runs, and from which file and commit; nothing where nobody noted that."""
    if origin is None:
        return []
    dot = f" {terminal.glyphs.dot} "
    began = (
        ""
        if state.created is None
        else f"started {_clock(state.created)} ({format_duration(now - state.created)} ago) "
    )
    who = f"by {safe(origin.user)}@{safe(origin.host)}" if origin.user else ""
    ended = "" if state.ended is None else f"ended {_clock(state.ended)}"
    commit = "" if origin.commit is None else commit_words(origin.commit)
    lines = [(f"{began}{who}".strip(), ended), (safe(origin.command),), (safe(origin.file), commit)]
    return [f"  {dot.join(filter(None, parts))}" for parts in lines if any(parts)]


def commit_words(commit: Commit) -> str:
    """Return `commit 3f2a1c07b9 (main) + 2 changes`."""
    branch = f" ({safe(commit.branch)})" if commit.branch else ""
    changes = f" + {count(commit.changes, 'change')}" if commit.changes else ""
    return f"commit {safe(commit.commit)[:_SHORT]}{branch}{changes}"


def origin_json(origin: Origin | None) -> dict[str, Any] | None:
    """Return where a run comes from, for machines."""
    if origin is None:
        return None
    commit = origin.commit
    return {
        "user": origin.user,
        "host": origin.host,
        "file": origin.file,
        "folder": origin.folder,
        "command": origin.command,
        "commit": None if commit is None else commit.commit,
        "branch": None if commit is None else commit.branch or None,
        "changes": None if commit is None else commit.changes,
    }


def time_json(time: float | None) -> str | None:
    """Return a wall clock time for machines."""
    return None if time is None else rfc3339(time)


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"
