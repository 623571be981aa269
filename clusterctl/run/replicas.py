"""Are the replicas on the head what the nodes hold? Asked before a controller goes on from their size."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from clusterctl.agent import protocol as wire
from clusterctl.agent.protocol import Command
from clusterctl.errors import NotFoundError

if TYPE_CHECKING:
    from clusterctl.run.store import RunDir
    from clusterctl.session import Session

COMPARED_BYTES = 64 * 1024
_CALL_SECONDS = 20.0


def differing(run: RunDir, node: str, session: Session) -> list[str]:
    """Return the files of a node whose replica does not end as the node's file does at that place.

    A part that the node no longer has (before its first valid offset) cannot be compared, and counts as equal.
    """
    base = run.node(node)
    if not base.is_dir():
        return []
    found = [p for p in base.rglob("*") if p.is_file() and p.name != wire.JOURNAL_FILE and p.stat().st_size]
    return [f for p in found if _differs(run, node, session, f := p.relative_to(base).as_posix())]


def _differs(run: RunDir, node: str, session: Session, file: str) -> bool:
    path = run.node(node) / file
    size = path.stat().st_size
    start = max(0, size - COMPARED_BYTES)
    asked = {"run": run.run, "node": node, "file": file, "offset": start, "length": size - start}
    try:
        answer = session.call(Command.READ, asked, timeout=_CALL_SECONDS)
    except NotFoundError:
        return False
    first_valid = max(start, int(answer.get("first_valid") or 0))
    theirs = base64.b64decode(answer["data"])[first_valid - int(answer["offset"]) :]
    with path.open("rb") as handle:
        handle.seek(first_valid)
        ours = handle.read(size - first_valid) if first_valid < size else b""
    return ours != theirs[: len(ours)] or len(theirs) < len(ours)
