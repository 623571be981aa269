"""Interfaces, the way to every peer, and RDMA ports."""

from __future__ import annotations

import _socket
import fcntl
import struct

from clusterctl.agent.facts import names, rdma
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.types.found import network as shapes

_SIOCGIFADDR = 0x8915
_BASE = "/sys/class/net"


def collect(root: str, peers: dict[str, str]) -> shapes.Net:
    """Return the group `net`. `peers` is node to address or name."""
    interfaces = [_interface(root, name) for name in paths.names(root, _BASE)]
    by_address = {entry["address"]: entry["name"] for entry in interfaces if entry["address"]}
    routes = {node: _route(name, by_address) for node, name in peers.items()}
    return {"interfaces": interfaces, "routes": routes, "ib": rdma.ports(root)}


def _interface(root: str, name: str) -> shapes.Interface:
    where = f"{_BASE}/{name}"
    return {
        "name": name,
        "operstate": paths.text(root, f"{where}/operstate"),
        "mtu": paths.number(root, f"{where}/mtu"),
        "speed": paths.number(root, f"{where}/speed"),
        "virtual": not paths.names(root, f"{where}/device"),
        "address": _address(name),
    }


def _address(name: str) -> str | None:
    sock = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    finally:
        sock.close()
    return _socket.inet_ntoa(answer[20:24])


def _route(name: str, by_address: dict[str, str]) -> shapes.Route:
    """Ask the kernel which source address it would use; no packet is sent."""
    try:
        family, _, _, _, target = names.resolve(name, 9, _socket.SOCK_DGRAM)[0]
        source = _source(family, target)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return {"address": name, "source": None, "interface": None, "error": why}
    return {"address": str(target[0]), "source": source, "interface": by_address.get(source), "error": None}


def _source(family: int, target: Any) -> str:
    sock = _socket.socket(family, _socket.SOCK_DGRAM)
    try:
        sock.connect(target)
        return str(sock.getsockname()[0])
    finally:
        sock.close()
