"""Ports: whether one is free here."""

from __future__ import annotations

from clusterctl.agent.linux.ports import bind, owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import network as shapes


def collect(wanted: list[int], root: str = "/") -> shapes.Ports:
    """Return the group `ports`: each port is bound for a moment on all addresses."""
    return {"ports": [_free(int(port), root) for port in wanted]}


def _free(port: int, root: str) -> shapes.Port:
    try:
        bind(port).close()
    except OSError as error:
        return {"port": port, "free": False, "error": error.strerror, "owner": owner(root, port)}
    return {"port": port, "free": True, "error": None, "owner": None}
