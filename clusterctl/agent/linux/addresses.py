"""The network addresses of this machine."""

from __future__ import annotations

import ctypes
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_payload_types import NetworkAddress

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
# The keys are AF_INET and AF_INET6 as numbers, because an import of `socket` would take longer than the whole listing.
_FAMILIES = {2: ("inet", 4), 10: ("inet6", 8)}
"""Name of each address family, and the offset of the address in `struct sockaddr`."""
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
    """Return family and address of a `struct sockaddr`, or `None` if the family is not IPv4 or IPv6."""
    family = struct.unpack("H", ctypes.string_at(pointer, 2))[0] if pointer else None
    if not pointer or family not in _FAMILIES:
        return None
    name, offset = _FAMILIES[family]
    text = ctypes.create_string_buffer(_MAX_ADDRESS_CHARS)
    _LIBC.inet_ntop(family, ctypes.c_void_p(pointer + offset), text, _MAX_ADDRESS_CHARS)
    return name, text.value.decode()


def list_addresses() -> list[NetworkAddress]:
    """Return the IP addresses of all interfaces in this network namespace."""
    first = ctypes.POINTER(_Ifaddrs)()
    if _LIBC.getifaddrs(ctypes.byref(first)) != 0:
        return []
    addresses: list[NetworkAddress] = []
    try:
        entry = first
        while ctypes.cast(entry, ctypes.c_void_p).value is not None:
            fields = entry.contents
            address = _parse_sockaddr(fields.address)
            if address is not None:
                flags = int(fields.flags)
                up, loopback = bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK)
                name = fields.name.decode("utf-8", "surrogateescape")
                addresses.append(
                    {"interface": name, "address": address[1], "family": address[0], "up": up, "loopback": loopback}
                )
            entry = fields.next
    finally:
        _LIBC.freeifaddrs(first)
    return addresses
