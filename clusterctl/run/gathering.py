"""Evidence of all ranks, from all nodes at once, kept with the run as plain files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import Command
from clusterctl.run.links import each
from clusterctl.run.store import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.run.store import RunDir
    from clusterctl.session import Session

_DEADLINE = 4.0
_CALL_SECONDS = 15.0


def gather(run: RunDir, name: str, sessions: Mapping[str, Session]) -> dict[str, Any]:
    """Ask every node for states and stacks of its ranks; keep the answers in the folder `name` of the run.

    Returns:
        Node to its answer, or to `{"error": why}`.
    """

    def ask(node: str, session: Session) -> dict[str, Any]:
        asked = {"run": run.run, "node": node, "name": name, "ranks": None, "deadline": _DEADLINE}
        return session.call(Command.EVIDENCE, asked, timeout=_CALL_SECONDS)

    found, errors = each(dict(sessions), ask)
    answers: dict[str, Any] = {**found, **{node: {"error": str(error)} for node, error in errors.items()}}
    folder = run.path / name
    folder.mkdir(exist_ok=True)
    for node, answer in answers.items():
        write_atomically(folder / f"{node}.json", json.dumps(answer, indent=1).encode())
    return answers
