"""Network facts: interfaces, routes to all peers, name resolution, free ports, and RDMA ports.

RDMA ports (InfiniBand, RoCE, EFA) are read from /sys, without `ibstat`. Their error counters are not read: on
restricted functions this floods the kernel log (leptonai/gpud#1164).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from clusterctl.agent.facts import driver
from clusterctl.agent.linux import sysfs
from clusterctl.agent.linux.ports import bind_port, describe_port_owner

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


def collect_names(peers: dict[str, str]) -> dict[str, Any]:
    """Return the group `names`. `peers` maps nodes to addresses or names."""
    hostname = socket.gethostname()
    addresses, error = _resolve(hostname)
    looked: dict[str, dict[str, Any]] = {}
    for node, name in peers.items():
        found, why = _resolve(name)
        looked[node] = {"name": name, "addresses": found, "error": why}
    return {"hostname": hostname, "addresses": addresses, "error": error, "peers": looked}


def resolve_name(name: str, port: int | None, kind: int) -> list[Any]:
    """Resolve a name, as `socket.getaddrinfo` does, without loading a text codec for plain names.

    Raises:
        OSError: The name does not exist.
        UnicodeError: The name is invalid.
    """
    return socket.getaddrinfo(name.encode() if name.isascii() else name, port, type=kind)


def _resolve(name: str) -> tuple[list[str], str | None]:
    try:
        entries = resolve_name(name, None, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return sorted({str(entry[4][0]) for entry in entries}), None


def collect_ports(wanted: list[int], root: str = "/") -> dict[str, Any]:
    """Return the group `ports`: each port is bound on all addresses for a moment."""
    ports = []
    for port in map(int, wanted):
        entry: dict[str, Any] = {"port": port, "free": True, "error": None, "owner": None}
        try:
            bind_port(port).close()
        except OSError as error:
            entry.update(free=False, error=error.strerror, owner=describe_port_owner(root, port))
        ports.append(entry)
    return {"ports": ports}


RDMA_FOLDER = "/sys/class/infiniband"
_MOST_GIDS = 16


def list_rdma_ports(root: str) -> list[dict[str, Any]]:
    """Return every port of every RDMA device."""
    every: list[dict[str, Any]] = []
    for device in sysfs.list_names(root, RDMA_FOLDER):
        shared = _list_device_ports(root, f"{RDMA_FOLDER}/{device}")
        every += [
            {"device": device, **_read_rdma_port(root, f"{RDMA_FOLDER}/{device}/ports/{port}", port), **shared}
            for port in sysfs.list_names(root, f"{RDMA_FOLDER}/{device}/ports")
        ]
    return every


def _list_device_ports(root: str, base: str) -> dict[str, Any]:
    place = os.path.realpath(sysfs.join_root(root, f"{base}/device"))
    return {
        "firmware": sysfs.read_text(root, f"{base}/fw_ver"),
        "board": sysfs.read_text(root, f"{base}/board_id"),
        "driver": os.path.basename(os.path.realpath(f"{place}/driver")) if os.path.exists(f"{place}/driver") else None,
        "pci": os.path.basename(place) if driver.is_pci_device(place) else None,
        **driver.read_pcie_link(place),
    }


def _read_rdma_port(root: str, where: str, port: str) -> dict[str, Any]:
    # The first entries of the port's address table.
    indices = sorted(sysfs.list_names(root, f"{where}/gids"), key=lambda index: (len(index), index))[:_MOST_GIDS]
    gids = {index: sysfs.read_text(root, f"{where}/gids/{index}") or "" for index in indices}
    used = [index for index, gid in gids.items() if gid.replace(":", "").strip("0")]
    kinds = [sysfs.read_text(root, f"{where}/gid_attrs/types/{index}") or "" for index in used]
    return {
        "port": int(port) if port.isdigit() else port,
        "state": _state_name(sysfs.read_text(root, f"{where}/state")),
        "phys": _state_name(sysfs.read_text(root, f"{where}/phys_state")),
        "rate": sysfs.read_text(root, f"{where}/rate"),
        "link_layer": sysfs.read_text(root, f"{where}/link_layer"),
        "gids": len(used),
        "roce_v2": sum("v2" in kind for kind in kinds),
    }


def _state_name(state: str | None) -> str | None:
    """Return `ACTIVE` from the kernel's `4: ACTIVE`."""
    return state.rpartition(":")[2].strip() if state else None


_SIOCGIFADDR = 0x8915
_NET_FOLDER = "/sys/class/net"


def collect_network(root: str, peers: dict[str, str]) -> dict[str, Any]:
    """Return the group `net`. `peers` maps nodes to addresses or names."""
    interfaces: list[dict[str, Any]] = [
        {
            "name": name,
            "operstate": sysfs.read_text(root, f"{_NET_FOLDER}/{name}/operstate"),
            "mtu": sysfs.read_int(root, f"{_NET_FOLDER}/{name}/mtu"),
            "speed": sysfs.read_int(root, f"{_NET_FOLDER}/{name}/speed"),
            "virtual": not sysfs.list_names(root, f"{_NET_FOLDER}/{name}/device"),
            "address": _address(name),
        }
        for name in sysfs.list_names(root, _NET_FOLDER)
    ]
    by_address = {entry["address"]: entry["name"] for entry in interfaces if entry["address"]}
    routes = {node: _route(name, by_address) for node, name in peers.items()}
    return {"interfaces": interfaces, "routes": routes, "ib": list_rdma_ports(root)}


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _route(name: str, by_address: dict[str, str]) -> dict[str, Any]:
    """Return the route to a peer: the kernel chooses the source address, and no packet is sent."""
    try:
        family, _, _, _, target = resolve_name(name, 9, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)
            source = str(sock.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return {"address": name, "source": None, "interface": None, "error": why}
    return {"address": str(target[0]), "source": source, "interface": by_address.get(source), "error": None}
