"""The network addresses of this machine, and the source address of packets to a peer."""

from __future__ import annotations

import ctypes
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.command_types import NetworkAddress, Route

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_DISCARD_PORT = 9
# Linux's own numbers. Importing `socket`, which only routes need, takes longer than all of this.
_FAMILIES = {2: ("inet", 4), 10: ("inet6", 8)}
"""Name of each address family, and where its address begins."""
_MAX_ADDRESS_CHARS = 46
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("peer", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def _parse_sockaddr(pointer: int | None) -> tuple[str, str] | None:
    """Return family and text of a `struct sockaddr`, or `None` for other families than IPv4 and IPv6."""
    family = struct.unpack("H", ctypes.string_at(pointer, 2))[0] if pointer else None
    if not pointer or family not in _FAMILIES:
        return None
    name, offset = _FAMILIES[family]
    text = ctypes.create_string_buffer(_MAX_ADDRESS_CHARS)
    _LIBC.inet_ntop(family, ctypes.c_void_p(pointer + offset), text, _MAX_ADDRESS_CHARS)
    return name, text.value.decode()


def list_addresses() -> list[NetworkAddress]:
    """Return `[{interface, address, family, up, loopback}]` of this network namespace."""
    first = ctypes.POINTER(_Ifaddrs)()
    if _LIBC.getifaddrs(ctypes.byref(first)) != 0:
        return []
    every: list[NetworkAddress] = []
    try:
        entry = first
        while ctypes.cast(entry, ctypes.c_void_p).value is not None:
            one = entry.contents
            address = _parse_sockaddr(one.address)
            if address is not None:
                flags = int(one.flags)
                up, loopback = bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK)
                name = one.name.decode("utf-8", "surrogateescape")
                every.append(
                    {"interface": name, "address": address[1], "family": address[0], "up": up, "loopback": loopback}
                )
            entry = one.next
    finally:
        _LIBC.freeifaddrs(first)
    return every


def resolve_name(name: str, port: int | None, kind: int) -> list[Any]:
    """Resolve a name, as `socket.getaddrinfo` does, without loading a text codec for plain names.

    Raises:
        OSError: The name does not exist.
        UnicodeError: The name is invalid.
    """
    import socket

    return socket.getaddrinfo(name.encode() if name.isascii() else name, port, type=kind)


def find_route(target: str, known: list[NetworkAddress]) -> Route:
    """Return source address and interface of packets to a target. No packet is sent.

    Raises:
        OSError: There is no such name, or no route.
        UnicodeError: The name is invalid.
    """
    import socket

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
        interface = next((str(one["interface"]) for one in known if one["address"] == source), loopback)
        return {"source": source, "interface": interface}
    raise failure


def is_ip_address(target: str) -> bool:
    """Return whether a target is an IP address, so that no name is looked up."""
    import socket

    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, target.partition("%")[0])
        except OSError:
            continue
        return True
    return False
