"""An error that ended a start, as the controller's journal keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.errors import NodesError, UnhealthyError
from clusterctl.run.rules import events

if TYPE_CHECKING:
    from clusterctl.errors import ClusterctlError


def start_failed(error: ClusterctlError) -> events.StartFailed:
    """Return the event that says why a start has failed."""
    reason: dict[str, Any] = {
        "class": type(error).__name__,
        "message": str(error),
        "hint": error.hint,
        "exit_code": int(error.exit_code),
        "node": getattr(error, "node", None),
    }
    if isinstance(error, NodesError):
        reason["nodes"] = [
            {"node": e.node, "message": str(e), "hint": e.hint, "class": type(e).__name__} for e in error.errors
        ]
    if isinstance(error, UnhealthyError):
        reason["findings"] = [f.to_json() for f in error.findings]
    return events.StartFailed(error=reason)
