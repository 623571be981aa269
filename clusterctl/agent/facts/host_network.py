"""Collects network facts of the host: interfaces, routes to all peers, name resolution, free ports, and RDMA ports.

RDMA ports (InfiniBand, RoCE, EFA) are read from /sys, without `ibstat`. The error counters of RDMA ports are not read,
because their reading on restricted functions floods the kernel log (leptonai/gpud#1164).
"""

from __future__ import annotations

import os
import socket

from clusterctl.agent.facts import kernel_gpu_facts
from clusterctl.agent.linux import addresses, kernel_files, routes
from clusterctl.agent.linux.port_reservation import bind_port, describe_port_owner

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.command_payload_types import NetworkAddress


def collect_name_resolution(peers: dict[str, str]) -> dict[str, Any]:
    """Return the facts of the group `names`. `peers` has the address or host name of each node."""
    hostname = socket.gethostname()
    own, error = _resolve(hostname)
    looked: dict[str, dict[str, Any]] = {}
    for node, name in peers.items():
        found, why = _resolve(name)
        looked[node] = {"name": name, "addresses": found, "error": why}
    return {"hostname": hostname, "addresses": own, "error": error, "peers": looked}


def _resolve(name: str) -> tuple[list[str], str | None]:
    try:
        entries = routes.resolve_name(name, None, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    return sorted({str(entry[4][0]) for entry in entries}), None


def collect_port_states(ports: list[int], root: str = "/") -> dict[str, Any]:
    """Return the facts of the group `ports`. A port is free if it can be bound on all addresses."""
    states = []
    for port in map(int, ports):
        entry: dict[str, Any] = {"port": port, "free": True, "error": None, "owner": None}
        try:
            bind_port(port).close()
        except OSError as error:
            entry.update(free=False, error=error.strerror, owner=describe_port_owner(root, port))
        states.append(entry)
    return {"ports": states}


RDMA_FOLDER = "/sys/class/infiniband"
_MOST_GIDS = 16


def list_rdma_ports(root: str) -> list[dict[str, Any]]:
    """Return the facts of every port of every RDMA device."""
    every: list[dict[str, Any]] = []
    for device in kernel_files.list_names(root, RDMA_FOLDER):
        base = f"{RDMA_FOLDER}/{device}"
        path = os.path.realpath(kernel_files.join_root(root, f"{base}/device"))
        driver = f"{path}/driver"
        card = {
            "firmware": kernel_files.read_text(root, f"{base}/fw_ver"),
            "board": kernel_files.read_text(root, f"{base}/board_id"),
            "driver": os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else None,
            "pci": os.path.basename(path) if kernel_gpu_facts.is_pci_device(path) else None,
            **kernel_gpu_facts.read_pcie_link(path),
        }
        every += [
            {"device": device, **_read_rdma_port(root, f"{base}/ports/{port}", port), **card}
            for port in kernel_files.list_names(root, f"{base}/ports")
        ]
    return every


def _read_rdma_port(root: str, where: str, port: str) -> dict[str, Any]:
    # Read only the first entries of the port's address table.
    indices = sorted(kernel_files.list_names(root, f"{where}/gids"), key=lambda index: (len(index), index))[:_MOST_GIDS]
    gids = {index: kernel_files.read_text(root, f"{where}/gids/{index}") or "" for index in indices}
    used = [index for index, gid in gids.items() if gid.replace(":", "").strip("0")]
    kinds = [kernel_files.read_text(root, f"{where}/gid_attrs/types/{index}") or "" for index in used]
    return {
        "port": int(port) if port.isdigit() else port,
        "state": _state_name(kernel_files.read_text(root, f"{where}/state")),
        "phys": _state_name(kernel_files.read_text(root, f"{where}/phys_state")),
        "rate": kernel_files.read_text(root, f"{where}/rate"),
        "link_layer": kernel_files.read_text(root, f"{where}/link_layer"),
        "gids": len(used),
        "roce_v2": sum("v2" in kind for kind in kinds),
    }


def _state_name(state: str | None) -> str | None:
    """Return the name in the kernel's text of a port state: `ACTIVE` for `4: ACTIVE`."""
    return state.rpartition(":")[2].strip() if state else None


_NET_FOLDER = "/sys/class/net"


def collect_network(root: str, peers: dict[str, str]) -> dict[str, Any]:
    """Return the facts of the group `net`. `peers` has the address or host name of each node."""
    known = addresses.list_addresses()
    by_interface = {entry["interface"]: entry["address"] for entry in reversed(known) if entry["family"] == "inet"}
    interfaces: list[dict[str, Any]] = [
        {
            "name": name,
            "operstate": kernel_files.read_text(root, f"{_NET_FOLDER}/{name}/operstate"),
            "mtu": kernel_files.read_int(root, f"{_NET_FOLDER}/{name}/mtu"),
            "speed": kernel_files.read_int(root, f"{_NET_FOLDER}/{name}/speed"),
            "virtual": not kernel_files.list_names(root, f"{_NET_FOLDER}/{name}/device"),
            "address": by_interface.get(name),
        }
        for name in kernel_files.list_names(root, _NET_FOLDER)
    ]
    return {
        "interfaces": interfaces,
        "routes": {node: _find_route(name, known) for node, name in peers.items()},
        "ib": list_rdma_ports(root),
    }


def _find_route(name: str, known: list[NetworkAddress]) -> dict[str, Any]:
    try:
        return {**routes.find_route(name, known), "error": None}
    except (OSError, UnicodeError) as error:
        return {"source": None, "interface": None, "error": getattr(error, "strerror", None) or str(error)}
