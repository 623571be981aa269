"""Interfaces, the way to every peer, and InfiniBand or RoCE ports, from /sys alone (no `ibstat` needed).

Error counters of ports are left alone: reading them on restricted functions floods the kernel log (leptonai/gpud#1164).
"""

from __future__ import annotations

import _socket
import fcntl
import struct

from clusterctl.agent.facts import names, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SIOCGIFADDR = 0x8915
_BASE = "/sys/class/net"


def collect(root: str, peers: dict[str, str]) -> dict[str, Any]:
    """Return the group `net`. `peers` is node to address or name."""
    interfaces = [_interface(root, name) for name in paths.names(root, _BASE)]
    by_address = {entry["address"]: entry["name"] for entry in interfaces if entry["address"]}
    routes = {node: _route(name, by_address) for node, name in peers.items()}
    return {"interfaces": interfaces, "routes": routes, "ib": _infiniband(root)}


def _interface(root: str, name: str) -> dict[str, Any]:
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


def _route(name: str, by_address: dict[str, str]) -> dict[str, Any]:
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


def _infiniband(root: str) -> list[dict[str, Any]]:
    base = "/sys/class/infiniband"
    return [
        _port(root, f"{base}/{device}", device, port)
        for device in paths.names(root, base)
        for port in paths.names(root, f"{base}/{device}/ports")
    ]


def _port(root: str, base: str, device: str, port: str) -> dict[str, Any]:
    where = f"{base}/ports/{port}"
    gids = {index: paths.text(root, f"{where}/gids/{index}") or "" for index in paths.names(root, f"{where}/gids")[:32]}
    used = [index for index, gid in gids.items() if gid.replace(":", "").strip("0")]
    kinds = [paths.text(root, f"{where}/gid_attrs/types/{index}") or "" for index in used]
    return {
        "device": device,
        "port": int(port) if port.isdigit() else port,
        "state": _word(paths.text(root, f"{where}/state")),
        "phys": _word(paths.text(root, f"{where}/phys_state")),
        "rate": paths.text(root, f"{where}/rate"),
        "link_layer": paths.text(root, f"{where}/link_layer"),
        "gids": len(used),
        "roce_v2": sum("v2" in kind for kind in kinds),
        "firmware": paths.text(root, f"{base}/fw_ver"),
    }


def _word(state: str | None) -> str | None:
    """Return `ACTIVE` of the kernel's `4: ACTIVE`."""
    return state.rpartition(":")[2].strip() if state else None
