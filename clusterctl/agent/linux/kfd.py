"""AMD's GPUs as the kernel's compute driver (KFD) tells of them: which there are, how they are linked, who holds them.

Files and their names are those of `kfd_topology.c` and `kfd_process.c` of the kernel's amdkfd; anybody may read them.
"""

from __future__ import annotations

import errno
import os

from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PROCESSES = "/sys/class/kfd/kfd/proc"
_XGMI = 11
_OF_GPU = (1, 2)
"""Kinds of memory banks that are a GPU's own: public and private frame buffer."""
_LEAST = 3 << 30
"""Bytes of memory below which a GPU is the graphics part of a processor, on which nobody trains."""


def is_there(root: str) -> bool:
    """Tell whether the kernel has the compute driver at all."""
    return os.path.isdir(paths.under(root, _NODES))


def gpus(root: str) -> tuple[list[dict[str, Any]], int]:
    """Return the GPUs, and how many more there are that the device cgroup keeps from us.

    Each is `{index, node, gpu_id, uuid, pci, partition, render, device, gfx, hive}`; the index is HIP's, which counts
    the nodes of the topology in their order (`rocminfo` shows it), not addresses of the PCI bus.
    """
    devices: list[dict[str, Any]] = []
    hidden = index = 0
    for node in sorted(int(name) for name in paths.names(root, _NODES) if name.isdigit()):
        try:
            gpu_id = int(paths.read(paths.under(root, f"{_NODES}/{node}/gpu_id")))
            properties = _properties(root, f"{_NODES}/{node}") if gpu_id else {}
        except (OSError, ValueError) as error:
            hidden += getattr(error, "errno", None) == errno.EPERM
            continue
        if gpu_id:
            if not 0 < _memory(root, node, properties) < _LEAST:
                devices.append({"index": index, "node": node, "gpu_id": gpu_id, **_described(properties)})
            index += 1
    return devices, hidden


def links(root: str, gpu: dict[str, Any], by_node: dict[int, int]) -> dict[str, list[int]]:
    """Return the GPUs that one reaches over XGMI: index to `[weight, most MB/s]`; 15 of weight are one hop."""
    by_gpu = {}
    base = f"{_NODES}/{gpu['node']}/io_links"
    for name in paths.names(root, base):
        try:
            told = _properties(root, f"{base}/{name}")
        except OSError:
            continue
        peer = by_node.get(told.get("node_to", -1))
        if told.get("type") == _XGMI and peer is not None:
            by_gpu[str(peer)] = [told.get("weight", 0), told.get("max_bandwidth", 0)]
    return by_gpu


def holders(root: str, gpu_id: int) -> dict[int, int]:
    """Return who has memory of a GPU: process to bytes. A process is numbered as the machine does it."""
    holding = {}
    for name in paths.names(root, _PROCESSES):
        used = paths.number(root, f"{_PROCESSES}/{name}/vram_{gpu_id}") if name.isdigit() else None
        if used:
            holding[int(name)] = used
    return holding


def _properties(root: str, place: str) -> dict[str, int]:
    words = (line.split() for line in paths.read(paths.under(root, f"{place}/properties")).decode().splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}


def _memory(root: str, node: int, properties: dict[str, int]) -> int:
    """Return the bytes of memory that a node has as a GPU; 0 where that is not told."""
    try:
        banks = [_properties(root, f"{_NODES}/{node}/mem_banks/{i}") for i in range(properties["mem_banks_count"])]
    except (OSError, KeyError):
        return 0
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _OF_GPU)


def _described(properties: dict[str, int]) -> dict[str, Any]:
    place, gfx, unique = (properties.get(name, 0) for name in ("location_id", "gfx_target_version", "unique_id"))
    partition = place >> 28
    address = f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7:x}"
    # Partitions of one GPU are devices of their own, and have its number.
    uuid = f"GPU-{unique:016x}" + (f"-{partition}" if partition else "")
    return {
        "uuid": uuid if unique else None,
        "pci": address,
        "partition": partition,
        "render": properties.get("drm_render_minor"),
        "device": f"0x{properties.get('device_id', 0):04x}",
        "gfx": f"gfx{gfx // 10000}{gfx // 100 % 100:x}{gfx % 100:x}" if gfx else None,
        "hive": f"{properties['hive_id']:016x}" if properties.get("hive_id") else None,
    }
