"""What a node's refusal is on our side, and errors that only a session knows."""

from __future__ import annotations

from typing import Any

from clusterctl.agent.protocol.commands import ErrorKind
from clusterctl.errors import (
    AgentError,
    ClusterctlError,
    NotFoundError,
    RefusedError,
)


class GarbledError(AgentError):
    """The node said what no agent of ours says: its words are damaged, or made up."""


class StaleEpochError(RefusedError):
    """The node obeys a later controller: this one has been replaced and must stop acting."""


def refusal_of(node: str, error: dict[str, Any]) -> ClusterctlError:
    """Return what an agent's refusal is on our side."""
    message, hint = str(error.get("message", "")), error.get("hint")
    # What stands behind `hint:` is advice of ours, unless it says whose it is.
    hint = f"the node says: {hint}" if hint else None
    match error.get("kind"):
        case ErrorKind.STALE_EPOCH.value:
            return StaleEpochError(f"{node}: {message}", hint=hint)
        case ErrorKind.REFUSED.value:
            return RefusedError(f"{node}: {message}", hint=hint)
        case ErrorKind.NOT_FOUND.value:
            return NotFoundError(f"{node}: {message}", hint=hint)
        case _:
            return AgentError(node, message, hint=hint)
