"""InfiniBand, RoCE and EFA ports, from /sys alone (no `ibstat` needed), and whether NCCL could use them.

Error counters of ports are left alone: reading them on restricted functions floods the kernel log (leptonai/gpud#1164).
"""

from __future__ import annotations

import os

from clusterctl.agent.facts import pci
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import network as shapes

BASE = "/sys/class/infiniband"
_MOST_GIDS = 16


def ports(root: str) -> list[shapes.RdmaPort]:
    """Return every port of every RDMA device."""
    every: list[shapes.RdmaPort] = []
    for device in paths.names(root, BASE):
        shared = _device(root, f"{BASE}/{device}")
        every += [
            {"device": device, **_port(root, f"{BASE}/{device}/ports/{port}", port), **shared}
            for port in paths.names(root, f"{BASE}/{device}/ports")
        ]
    return every


def _device(root: str, base: str) -> shapes.RdmaDevice:
    place = os.path.realpath(paths.under(root, f"{base}/device"))
    return {
        "firmware": paths.text(root, f"{base}/fw_ver"),
        "board": paths.text(root, f"{base}/board_id"),
        "driver": os.path.basename(os.path.realpath(f"{place}/driver")) if os.path.exists(f"{place}/driver") else None,
        "pci": os.path.basename(place) if pci.is_device(place) else None,
        **pci.link(place),
    }


def _port(root: str, where: str, port: str) -> shapes.PortState:
    used = [index for index, gid in _gids(root, where) if gid.replace(":", "").strip("0")]
    kinds = [paths.text(root, f"{where}/gid_attrs/types/{index}") or "" for index in used]
    return {
        "port": int(port) if port.isdigit() else port,
        "state": _word(paths.text(root, f"{where}/state")),
        "phys": _word(paths.text(root, f"{where}/phys_state")),
        "rate": paths.text(root, f"{where}/rate"),
        "link_layer": paths.text(root, f"{where}/link_layer"),
        "gids": len(used),
        "roce_v2": sum("v2" in kind for kind in kinds),
    }


def _gids(root: str, where: str) -> list[tuple[str, str]]:
    """Return the first entries of the address table of a port, by number."""
    indices = sorted(paths.names(root, f"{where}/gids"), key=lambda index: (len(index), index))[:_MOST_GIDS]
    return [(index, paths.text(root, f"{where}/gids/{index}") or "") for index in indices]


def _word(state: str | None) -> str | None:
    """Return `ACTIVE` of the kernel's `4: ACTIVE`."""
    return state.rpartition(":")[2].strip() if state else None
