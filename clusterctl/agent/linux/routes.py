"""Resolves host names, and finds the interface and source address of packets to a host."""

from __future__ import annotations

import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.command_payload_types import NetworkAddress, Route

_DISCARD_PORT = 9


def resolve_name(name: str, port: int | None, kind: int) -> list[Any]:
    """Call `socket.getaddrinfo`. For an ASCII name, avoid the slow import of the codec `idna`.

    Raises:
        OSError: The name does not exist.
        UnicodeError: The name is invalid.
    """
    return socket.getaddrinfo(name.encode() if name.isascii() else name, port, type=kind)


def find_route(target: str, addresses: list[NetworkAddress]) -> Route:
    """Return the source address and the interface of packets to a target, without sending a packet.

    Args:
        target: A host name or an IP address.
        addresses: The addresses of this machine (`list_addresses`).

    Raises:
        OSError: The name does not exist, or no route leads to the target.
        UnicodeError: The name is invalid.
    """
    failure = OSError("no address")
    for family, kind, number, _, destination in resolve_name(target, _DISCARD_PORT, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, number) as sock:
                sock.connect(destination)
                source = str(sock.getsockname()[0]).partition("%")[0]
        except OSError as error:
            failure = error
            continue
        loopback = "lo" if source.startswith("127.") else None
        interface = next((str(entry["interface"]) for entry in addresses if entry["address"] == source), loopback)
        return {"source": source, "interface": interface}
    raise failure


def is_ip_address(target: str) -> bool:
    """Return whether a target is an IP address and no host name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, target.partition("%")[0])
        except OSError:
            continue
        return True
    return False
