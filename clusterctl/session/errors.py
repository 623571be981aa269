"""Errors of a session with a node, and the exception for a node's refusal."""

from __future__ import annotations

from typing import Any

from clusterctl.agent.protocol.commands import ErrorKind
from clusterctl.errors import AgentError, ClusterctlError, NotFoundError, RefusedError


class ProtocolError(AgentError):
    """The node sent bytes that no agent of ours sends: they are damaged or forged."""


class StaleEpochError(RefusedError):
    """The node obeys a later controller. This controller has been replaced and must stop acting."""


def error_from_wire(node: str, error: dict[str, Any]) -> ClusterctlError:
    """Convert the refusal of an agent to an exception."""
    message, hint = str(error.get("message", "")), error.get("hint")
    # A hint without an author would read as our advice.
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
