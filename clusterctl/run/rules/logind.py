"""What would harm a run later, judged from what nodes say at the first contact. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import RefusedError


def kills_at_logout(logind: Mapping[str, Any] | None) -> bool:
    """Return whether logind ends all processes of the user when the last login of theirs does; `None`: no logind."""
    return logind is not None and bool(logind.get("kill_user_processes")) and not logind.get("linger")


def refuse_kill_at_logout(hellos: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a start whose workers would not outlive our connections.

    Args:
        hellos: Node to what its agent said first.

    Raises:
        RefusedError: Some nodes end all processes at logout; says how to change that.
    """
    bad = [node for node, hello in hellos.items() if kills_at_logout(hello.get("logind"))]
    if not bad:
        return
    users = sorted({str(hellos[node].get("user")) for node in bad})
    raise RefusedError(
        f"{fold_hosts(bad)}: logind ends all processes of {' and '.join(users)} at logout (KillUserProcesses=yes), "
        "so workers would end with our connection",
        hint=f"on these nodes: {' and '.join(f'`loginctl enable-linger {user}`' for user in users)}",
    )


def describe_head_warning(logind: Mapping[str, Any] | None, user: str) -> str | None:
    """Return what a person should know of this head before logging out, or `None`."""
    if not kills_at_logout(logind):
        return None
    return (
        f"this head ends all processes of {user} at logout (KillUserProcesses=yes), the controller too, and the run "
        f"then goes on unattended; `loginctl enable-linger {user}` keeps it"
    )
