"""Collects facts about the GPUs on the PCI bus, their kernel driver and device nodes, and GPUs that NVML does not show.

`collect_driver` reads files of the kernel and does not call a driver. `collect_hidden_gpus` runs only if NVML shows
fewer GPUs than the bus. `collect_hidden_gpus` opens the device node of each missing GPU, and this call may hang. If the
kernel refuses the call, an administrator or a scheduler withholds the GPU. Otherwise the GPU has failed.
`collect_nvidia_smi` runs `nvidia-smi` if NVML has failed.
"""

from __future__ import annotations

import os
import re
import stat

from clusterctl.agent.facts.child_tasks import AbsentError
from clusterctl.agent.linux import kernel_files, syscalls
from clusterctl.agent.linux.gpu_devices import read_device_minor

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_QEMU_VENDOR = "0x1b36"
"""The PCI vendor id of QEMU, whose emulated ports report no real link width."""
_AMD_VENDOR = "0x1002"
"""The PCI vendor id of the bridges on an AMD card. The link of the outermost bridge is the link of the card, as in the
kernel's `amdgpu_device_partner_bandwidth`.
"""
_NODE = re.compile(r"nvidia(\d+|ctl|-uvm)")


def read_pcie_link(path: str) -> dict[str, Any]:
    """Return `{width, max_width, slot_width}` of the PCIe link of a card, in lanes; `None` for each unknown width.

    Most virtual machines do not show the width of the slot. `path` is the real path of the card in sysfs.
    """
    while (above := os.path.dirname(path)) and is_pci_device(above) and _read_vendor(above) == _AMD_VENDOR:
        path = above
    has_slot = is_pci_device(above) and _read_vendor(above) != _QEMU_VENDOR
    return {
        "width": kernel_files.read_int("/", f"{path}/current_link_width"),
        "max_width": kernel_files.read_int("/", f"{path}/max_link_width"),
        "slot_width": kernel_files.read_int("/", f"{above}/max_link_width") or None if has_slot else None,
    }


def is_pci_device(path: str) -> bool:
    """Return whether a path in sysfs belongs to a PCI device."""
    return _PCI_ADDRESS.fullmatch(os.path.basename(path)) is not None


def _read_vendor(path: str) -> str | None:
    return kernel_files.read_text("/", f"{path}/vendor")


_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x19e5": "ascend", "0x8086": "intel"}
"""The names of GPU vendors by PCI vendor id."""
_CLASSES = {
    "nvidia": ("0x0300", "0x0302"),
    "amd": ("0x0300", "0x0302", "0x0380", "0x1200"),
    "ascend": ("0x1200",),
    "intel": ("0x0300", "0x0380"),
}
"""The PCI classes of each vendor's GPUs: display, 3D and other display controllers, processing accelerators."""
_BRIDGE_CLASS = "0x0680"
_BUS = "/sys/bus/pci/devices"
_BUILT_IN_GRAPHICS = "0000:00:"
"""The beginning of the PCI address of the graphics unit in an Intel processor. No job uses this unit."""
_DEVICE_NODE_HELPERS = ("/usr/bin/nvidia-modprobe", "/bin/nvidia-modprobe", "/usr/sbin/nvidia-modprobe")
_IMEX_FOLDER = "/dev/nvidia-caps-imex-channels"


def collect_driver(root: str) -> dict[str, Any]:
    """Return the facts of the group `driver`."""
    modules = [line.split()[0] for line in (kernel_files.read_text(root, "/proc/modules") or "").splitlines() if line]
    gpus, switches = _list_pci_gpus(root)
    proc = kernel_files.read_text(root, "/proc/driver/nvidia/version")
    match = re.search(r"Module\s+(\S+)\s", (proc or "") + " ")
    return {
        "module": kernel_files.read_text(root, "/sys/module/nvidia/version") or (match.group(1) if match else None),
        "proc_version": proc.splitlines()[0] if proc else None,
        "nouveau": "nouveau" in modules,
        "modules": [name for name in modules if name.startswith(("nvidia", "amdgpu"))],
        "nvswitches": switches,
        "pci": gpus,
        "dev": [
            _can_open(root, f"/dev/{name}") for name in kernel_files.list_names(root, "/dev") if _NODE.fullmatch(name)
        ],
        "imex": [_can_open(root, f"{_IMEX_FOLDER}/{name}") for name in kernel_files.list_names(root, _IMEX_FOLDER)],
        "helper": any(_is_setuid(kernel_files.join_root(root, path)) for path in _DEVICE_NODE_HELPERS),
    }


def _list_pci_gpus(root: str) -> tuple[list[dict[str, Any]], int]:
    gpus: list[dict[str, Any]] = []
    switches = 0
    for address in kernel_files.list_names(root, _BUS):
        vendor = _VENDORS.get(kernel_files.read_text(root, f"{_BUS}/{address}/vendor") or "")
        if vendor is None or (vendor == "intel" and address.startswith(_BUILT_IN_GRAPHICS)):
            continue
        kind = (kernel_files.read_text(root, f"{_BUS}/{address}/class") or "")[:6]
        switches += vendor == "nvidia" and kind == _BRIDGE_CLASS
        if kind in _CLASSES[vendor]:
            path = os.path.realpath(kernel_files.join_root(root, f"{_BUS}/{address}"))
            driver = os.path.basename(os.readlink(f"{path}/driver")) if os.path.islink(f"{path}/driver") else None
            card = {"address": address, "vendor": vendor, "class": kind, "driver": driver}
            gpus.append({**card, "minor": read_device_minor(root, address), **read_pcie_link(path)})
    return gpus, switches


def _can_open(root: str, path: str) -> dict[str, Any]:
    """Return whether this user may open a device node. Do not open the node, because an open wakes the driver."""
    return {"path": path, "readable": kernel_files.check_device_permission(root, path) == "ok"}


def _is_setuid(path: str) -> bool:
    try:
        mode = os.stat(path)
    except OSError:
        return False
    return mode.st_uid == 0 and bool(mode.st_mode & stat.S_ISUID)


def find_hidden_gpus(driver: dict[str, Any], nvml: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the NVIDIA GPUs in `driver["pci"]` that NVML does not show. `nvml` has the facts of the group `nvml`."""
    if nvml.get("count") is None:
        return []
    nvml_addresses = [normalize_pci_address(device["v"]["pci"]) for device in nvml["devices"] if "pci" in device["v"]]
    # A device without a handle has no address. NVML counts such a device, so the device is not missing.
    nameless = len(nvml["devices"]) - len(nvml_addresses)
    cards = [entry for entry in driver.get("pci") or [] if entry["vendor"] == "nvidia"]
    absent = [entry for entry in cards if normalize_pci_address(entry["address"]) not in nvml_addresses]
    return absent[: max(0, len(absent) - nameless)]


def normalize_pci_address(address: str) -> str:
    """Return a PCI address whose domain has four digits.

    NVML writes the domain with eight digits, the kernel with four.
    """
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}" if domain else rest


def collect_hidden_gpus(root: str, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of the group `hidden_gpus` for the GPUs that `find_hidden_gpus` has returned."""
    results = [
        kernel_files.probe_device_open(root, f"/dev/nvidia{entry['minor']}")
        if entry["driver"] == "nvidia" and entry["minor"] is not None
        else None
        for entry in gpus
    ]
    return {"gpus": [{**entry, "node": result} for entry, result in zip(gpus, results)]}


_QUERY = "index,uuid,name,pci.bus_id,driver_version"


def collect_nvidia_smi() -> dict[str, Any]:
    """Return the facts of the group `smi`, from the output of `nvidia-smi`.

    Raises:
        AbsentError: `nvidia-smi` is not installed.
    """
    argv = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        code, output, complaint = syscalls.run_program(argv)
    except FileNotFoundError as error:
        raise AbsentError("there is no `nvidia-smi`") from error
    devices: list[dict[str, Any]] = []
    errors: list[str] = []
    for line in output.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[0].isdigit():
            index, uuid, name, pci, driver = words
            devices.append({"index": int(index), "uuid": uuid, "name": name, "pci": pci.lower(), "driver": driver})
        elif line.strip():
            errors.append(line.strip())
    errors += [line.strip() for line in complaint.splitlines() if line.strip()]
    return {"rc": code, "devices": devices, "errors": errors[:10]}
