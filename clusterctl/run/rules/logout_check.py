"""Checks whether logind would end a run at a logout. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import RefusedError


def kills_at_logout(logind: Mapping[str, Any] | None) -> bool:
    """Return whether logind ends all processes of the user after the last logout; `None` means no logind."""
    return logind is not None and bool(logind.get("kill_user_processes")) and not logind.get("linger")


def refuse_kill_at_logout(hellos: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a start whose workers would end with the connection.

    Args:
        hellos: The first answer of each node's agent.

    Raises:
        RefusedError: Some nodes end all processes at logout. The hint has the command that changes this.
    """
    bad = [node for node, hello in hellos.items() if kills_at_logout(hello.get("logind"))]
    if not bad:
        return
    users = sorted({str(hellos[node].get("user")) for node in bad})
    raise RefusedError(
        f"{fold_hosts(bad)}: logind ends all processes of {' and '.join(users)} at logout (KillUserProcesses=yes), "
        "so workers would end together with clusterctl's connection",
        hint=f"on these nodes: {' and '.join(f'`loginctl enable-linger {user}`' for user in users)}",
    )


def describe_head_logout_warning(logind: Mapping[str, Any] | None, user: str) -> str | None:
    """Return a warning if a logout from this head would end the controller, else `None`."""
    if not kills_at_logout(logind):
        return None
    return (
        f"this head ends all processes of {user} at logout (KillUserProcesses=yes), the controller too, and the run "
        f"then goes on unattended; `loginctl enable-linger {user}` prevents this"
    )
