"""Are the replicas on the head what the nodes hold? Asked before a controller goes on from their size."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import files
from clusterctl.agent.protocol.commands import Command
from clusterctl.errors import NotFoundError
from clusterctl.run.nodes.fan_out import ask_all, raise_first

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.session.conversation import Session

_COMPARED_BYTES = 64 * 1024
_COMPARED_OF_EARLIER = 4 * 1024
_CALL_SECONDS = 60.0


def differing(run: RunDir, node: str, session: Session, attempt: int, *, earlier: bool) -> list[str]:
    """Return the files of a node whose replica does not end as the node's file does at that place.

    A part that the node no longer has (before its first valid offset) cannot be compared, and counts as equal.

    Args:
        run: Where the replicas lie.
        node: Whose they are.
        session: A session with that node.
        attempt: The attempt whose files still grow.
        earlier: Compare those of earlier attempts too. No controller spoils what it wrote itself.

    Raises:
        ClusterctlError: The node did not answer.
    """
    ends = _ends(run.node(node), os.path.dirname(files.output_file(attempt, 0)), earlier=earlier)
    asked = {
        file: {"run": run.run, "node": node, "file": file, "offset": start, "length": size - start}
        for file, (start, size) in ends.items()
    }
    answers, errors = ask_all(session, Command.READ, asked, _CALL_SECONDS)
    raise_first({file: error for file, error in errors.items() if not isinstance(error, NotFoundError)})
    return [file for file, answer in answers.items() if _differs(run.node(node) / file, ends[file], answer)]


def _ends(base: Path, growing: str, *, earlier: bool) -> dict[str, tuple[int, int]]:
    """Return the replicas to compare by the file's own name: from where on, and their size.

    `growing` is the folder of the attempt that goes on; what lies in no such folder grows too.
    """
    found: dict[str, tuple[int, int]] = {}
    for path in base.rglob("*") if base.is_dir() else ():
        file, size = path.relative_to(base).as_posix(), path.stat().st_size
        ended = os.path.dirname(file) not in ("", growing)
        if size and path.is_file() and file != files.JOURNAL_FILE and (earlier or not ended):
            found[file] = (max(0, size - (_COMPARED_OF_EARLIER if ended else _COMPARED_BYTES)), size)
    return found


def _differs(path: Path, part: tuple[int, int], answer: dict[str, Any]) -> bool:
    start, size = part
    first_valid = max(start, int(answer.get("first_valid") or 0))
    theirs = base64.b64decode(answer["data"])[first_valid - int(answer["offset"]) :]
    with path.open("rb") as handle:
        handle.seek(first_valid)
        ours = handle.read(size - first_valid) if first_valid < size else b""
    return ours != theirs[: len(ours)] or len(theirs) < len(ours)
