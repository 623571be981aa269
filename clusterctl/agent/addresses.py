"""The network addresses of this machine, and which of them a packet to a peer would carry."""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Any

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_DISCARD_PORT = 9


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


def _text(pointer: int | None) -> tuple[str, str] | None:
    """Return family and text of a `struct sockaddr`, for the internet families."""
    if not pointer:
        return None
    family = struct.unpack("H", ctypes.string_at(pointer, 2))[0]
    if family == socket.AF_INET:
        return "inet", socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return "inet6", socket.inet_ntop(socket.AF_INET6, ctypes.string_at(pointer + 8, 16))
    return None


def addresses() -> list[dict[str, Any]]:
    """Return `[{interface, address, family, up, loopback}]` of this network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return []
    found: list[dict[str, Any]] = []
    try:
        entry = first
        while ctypes.cast(entry, ctypes.c_void_p).value is not None:
            one = entry.contents
            address = _text(one.address)
            if address is not None:
                flags = int(one.flags)
                up, loopback = bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK)
                name = one.name.decode("utf-8", "surrogateescape")
                found.append(
                    {"interface": name, "address": address[1], "family": address[0], "up": up, "loopback": loopback}
                )
            entry = one.next
    finally:
        libc.freeifaddrs(first)
    return found


def route(target: str, known: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return `{source, interface}` of the way to a target, or `None` where there is no way. No packet is sent."""
    try:
        resolved = socket.getaddrinfo(target, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, number, _, where in resolved:
        try:
            with socket.socket(family, kind, number) as sock:
                sock.connect(where)
                source = str(sock.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
        return {"source": source, "interface": _holder(source, known)}
    return None


def _holder(source: str, known: list[dict[str, Any]]) -> str | None:
    for one in known:
        if one["address"] == source:
            return str(one["interface"])
    return "lo" if source.startswith("127.") else None


def is_literal(target: str) -> bool:
    """Whether a target needs no look-up of names."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, target.partition("%")[0])
        except OSError:
            continue
        return True
    return False
