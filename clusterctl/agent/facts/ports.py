"""Ports: whether one is free here."""

from __future__ import annotations

from clusterctl.agent.linux.ports import bind, owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def collect(wanted: list[int], root: str = "/") -> dict[str, Any]:
    """Return the group `ports`: each port is bound for a moment on all addresses."""
    return {"ports": [_free(int(port), root) for port in wanted]}


def _free(port: int, root: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"port": port, "free": True, "error": None, "owner": None}
    try:
        bind(port).close()
    except OSError as error:
        entry.update(free=False, error=error.strerror, owner=owner(root, port))
    return entry
