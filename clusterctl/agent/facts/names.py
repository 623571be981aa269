"""What names mean on this node: its own, and those of its peers."""

from __future__ import annotations

import _socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.types.found import network as shapes


def collect(peers: dict[str, str]) -> shapes.Names:
    """Return the group `names`. `peers` is node to address or name."""
    hostname = _socket.gethostname()
    addresses, error = _resolve(hostname)
    looked: dict[str, shapes.Named] = {}
    for node, name in peers.items():
        found, why = _resolve(name)
        looked[node] = {"name": name, "addresses": found, "error": why}
    return {"hostname": hostname, "addresses": addresses, "error": error, "peers": looked}


def resolve(name: str, port: int | None, kind: int) -> list[Any]:
    """Return what the system's resolver says, as `socket.getaddrinfo` does.

    The module `socket` makes enumerations of all numbers that the C module below it has, and that one loads a codec
    for text; together they cost as much as half of a look.

    Raises:
        OSError: There is no such name.
        UnicodeError: It cannot be one.
    """
    return _socket.getaddrinfo(name.encode() if name.isascii() else name, port, type=kind)


def _resolve(name: str) -> tuple[list[str], str | None]:
    try:
        entries = resolve(name, None, _socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return sorted({str(entry[4][0]) for entry in entries}), None
