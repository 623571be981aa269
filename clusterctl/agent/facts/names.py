"""What names mean on this node: its own, and those of its peers."""

from __future__ import annotations

import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def collect(peers: dict[str, str]) -> dict[str, Any]:
    """Return the group `names`. `peers` is node to address or name."""
    hostname = socket.gethostname()
    addresses, error = _resolve(hostname)
    looked = {}
    for node, name in peers.items():
        found, why = _resolve(name)
        looked[node] = {"name": name, "addresses": found, "error": why}
    return {"hostname": hostname, "addresses": addresses, "error": error, "peers": looked}


def _resolve(name: str) -> tuple[list[str], str | None]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return sorted({str(entry[4][0]) for entry in found}), None
