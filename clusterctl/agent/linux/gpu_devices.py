"""The GPUs of this machine, read from files in /proc, /sys and /dev without a driver library.

The kernel's driver amdkfd makes the files for AMD GPUs (`kfd_topology.c`, `kfd_process.c`), which all users may read.
"""

from __future__ import annotations

import errno
import os

from clusterctl.agent.linux import kernel_files

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.command_payload_types import GpuCount


_NVIDIA_DRIVER = "/proc/driver/nvidia/gpus"


def _list_device_minors(root: str) -> list[int]:
    """Return the numbers of NVIDIA's device files, such as 0 for /dev/nvidia0."""
    names = (name[len("nvidia") :] for name in kernel_files.list_names(root, "/dev") if name.startswith("nvidia"))
    return [int(number) for number in names if number.isascii() and number.isdecimal()]


def read_device_minor(root: str, slot: str) -> int | None:
    """Return the number of the device file of the NVIDIA GPU at a PCI address (`slot`); `None` if it is unknown."""
    text = kernel_files.read_text(root, f"{_NVIDIA_DRIVER}/{slot}/information") or ""
    pairs = (line.partition(":") for line in text.splitlines())
    number = next((value.strip() for key, _, value in pairs if key.strip() == "Device Minor"), "")
    return int(number) if number.isascii() and number.isdecimal() else None


def count_gpus(root: str = "") -> GpuCount:
    """Count the NVIDIA GPUs of this machine, or the AMD GPUs if there is no NVIDIA GPU.

    Args:
        root: Prefix of /dev, /proc and /sys.
    """
    devices, listed = len(_list_device_minors(root)), len(kernel_files.list_names(root, _NVIDIA_DRIVER))
    # In a container, /proc shows all GPUs of the machine, but /dev only those of the container.
    number = min(listed, devices) if listed and devices else listed or devices
    if number:
        source = "proc" if number == listed else "dev"
        return {"count": number, "indices": list(range(number)), "source": source, "vendor": "nvidia"}
    amd = [gpu["index"] for gpu in list_amd_gpus(root or "/")[0]]
    source, vendor = ("kfd", "amd") if amd else ("none", None)
    return {"count": len(amd), "indices": amd, "source": source, "vendor": vendor}


def list_machine_wide_gpu_names(root: str = "") -> dict[int, str]:
    """Return a name for each GPU index. The name contains the PCI address, so it is the same in all containers.

    The UUID is not usable: NVIDIA's driver reports the UUID of a device only after the device was used.
    """
    minors = sorted(_list_device_minors(root))
    # PCI addresses, sorted, are in the order of the GPU indices. A container may see addresses of GPUs but not their
    # device files.
    slots = kernel_files.list_names(root, _NVIDIA_DRIVER)
    usable = [slot for slot in slots if read_device_minor(root, slot) in minors]
    names = [f"pci-{slot}" for slot in usable or slots] or [f"nvidia{minor}" for minor in minors]
    return dict(enumerate(names)) or {
        gpu["index"]: f"pci-{gpu['pci']}-{gpu['partition']}" for gpu in list_amd_gpus(root or "/")[0]
    }


_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PROCESSES = "/sys/class/kfd/kfd/proc"
_XGMI_LINK_TYPE = 11
_GPU_HEAP_TYPES = (1, 2)
"""Types of memory banks that belong to a GPU: public and private frame buffer."""
MIN_GPU_MEMORY_BYTES = 3 << 30
"""Minimum memory in bytes of a listed GPU. A GPU with less memory is part of a processor and only for graphics."""


def has_amd_driver(root: str) -> bool:
    """Return whether AMD's compute driver (amdkfd) is loaded."""
    return os.path.isdir(kernel_files.join_root(root, _NODES))


def list_amd_gpus(root: str) -> tuple[list[dict[str, Any]], int]:
    """Return the AMD GPUs, and the number of further GPUs that the device cgroup hides.

    Each GPU is `{index, node, gpu_id, uuid, pci, partition, render, device, gfx, hive}`. The index follows the order of
    the nodes in the kernel's topology, as in HIP, and not the order of PCI addresses.
    """
    devices: list[dict[str, Any]] = []
    hidden = index = 0
    for node in sorted(int(name) for name in kernel_files.list_names(root, _NODES) if name.isdigit()):
        try:
            gpu_id = int(kernel_files.read_bytes(kernel_files.join_root(root, f"{_NODES}/{node}/gpu_id")))
            properties = _read_properties(root, f"{_NODES}/{node}") if gpu_id else {}
        except (OSError, ValueError) as error:
            hidden += getattr(error, "errno", None) == errno.EPERM
            continue
        if gpu_id:
            if not 0 < _read_gpu_memory(root, node, properties) < MIN_GPU_MEMORY_BYTES:
                devices.append({"index": index, "node": node, "gpu_id": gpu_id, **_describe_gpu(properties)})
            index += 1
    return devices, hidden


def list_xgmi_links(root: str, gpu: dict[str, Any], gpu_index_by_node: dict[int, int]) -> dict[str, list[int]]:
    """Return the XGMI links of an AMD GPU to other GPUs.

    Args:
        root: Prefix of /sys.
        gpu: A GPU of `list_amd_gpus`.
        gpu_index_by_node: Maps nodes of the kernel's topology to GPU indices.

    Returns:
        `{index of the other GPU: [weight, max MB/s]}`. A weight of 15 is one hop.
    """
    links = {}
    base = f"{_NODES}/{gpu['node']}/io_links"
    for name in kernel_files.list_names(root, base):
        try:
            properties = _read_properties(root, f"{base}/{name}")
        except OSError:
            continue
        peer = gpu_index_by_node.get(properties.get("node_to", -1))
        if properties.get("type") == _XGMI_LINK_TYPE and peer is not None:
            links[str(peer)] = [properties.get("weight", 0), properties.get("max_bandwidth", 0)]
    return links


def list_gpu_memory_holders(root: str, gpu_id: int) -> dict[int, int]:
    """Return the bytes of memory that each process holds on an AMD GPU, by pid in the machine's own pid namespace."""
    used_by_pid = {}
    for name in kernel_files.list_names(root, _PROCESSES):
        used = kernel_files.read_int(root, f"{_PROCESSES}/{name}/vram_{gpu_id}") if name.isdigit() else None
        if used:
            used_by_pid[int(name)] = used
    return used_by_pid


def _read_properties(root: str, place: str) -> dict[str, int]:
    words = (
        line.split()
        for line in kernel_files.read_bytes(kernel_files.join_root(root, f"{place}/properties")).decode().splitlines()
    )
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}


def _read_gpu_memory(root: str, node: int, properties: dict[str, int]) -> int:
    """Return the GPU memory of a node of the topology in bytes; 0 if it is unknown."""
    try:
        banks = [_read_properties(root, f"{_NODES}/{node}/mem_banks/{i}") for i in range(properties["mem_banks_count"])]
    except (OSError, KeyError):
        return 0
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _GPU_HEAP_TYPES)


def _describe_gpu(properties: dict[str, int]) -> dict[str, Any]:
    place, gfx, unique = (properties.get(name, 0) for name in ("location_id", "gfx_target_version", "unique_id"))
    partition = place >> 28
    address = f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7:x}"
    # The partitions of a GPU are separate devices with the same `unique_id`.
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
