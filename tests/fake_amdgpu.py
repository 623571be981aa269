"""A machine with AMD GPUs where there are none: the files that the kernel would show of GPUs that tell these facts.

    fake_amdgpu.write(root, group)      # `group` as `tests.unit.health.machines.amd.group` makes it

Formats are those of the kernel's amdkfd (`kfd_topology.c`, `kfd_process.c`) and amdgpu (`amdgpu_pm.c`, `amdgpu_ras.c`,
`kgd_pp_interface.h`).
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

_DEVICES = {"gfx942": (0x74A1, "0x120000", 90402), "gfx90a": (0x7408, "0x038000", 90010)}
"""PCI device, PCI class and KFD's number of each architecture."""
_FIRST_NODE = 2
"""KFD counts the processors first; this machine has two."""


def write(root: Path, group: Facts, *, slot_width: int = 16) -> Path:
    """Write the files below `root`; what was there of GPUs before is gone."""
    for place in ("sys/class/kfd", "sys/bus/pci/devices", "sys/devices", "dev/dri"):
        shutil.rmtree(root / place, ignore_errors=True)
    for node in range(_FIRST_NODE):
        _put(root / f"sys/class/kfd/kfd/topology/nodes/{node}", gpu_id="0", properties="cpu_cores_count 64\n")
    (root / "sys/class/kfd/kfd/proc").mkdir(parents=True)
    for device in group["devices"]:
        _topology(root, device)
        _sysfs(root, device, slot_width)
        for holder in device["v"].get("procs", []):
            _holder(root, holder, gpu_id(device))
    for entry in group["dev"]:
        if entry["access"] != "absent":
            _put(root / Path(entry["path"][1:]).parent, **{Path(entry["path"]).name: ""})
    _put(root / "sys/module/amdgpu", version=group["driver"])
    _put(root / "proc/sys/kernel", numa_balancing=str(group["numa_balancing"]))
    _put(root / "proc", modules="amdgpu 12345 0 - Live 0x0\n")
    return root


def gpu_id(device: Facts) -> int:
    """KFD's number of a GPU."""
    return 40000 + int(device["index"])


def _put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text if text.endswith("\n") or not text else text + "\n")


def _properties(**values: int) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())


def _topology(root: Path, device: Facts) -> None:
    values = device["v"]
    pci_device, _, target = _DEVICES[values["gfx"]]
    domain, bus, rest = values["pci"].split(":")
    slot, function = rest.split(".")
    node = root / f"sys/class/kfd/kfd/topology/nodes/{_FIRST_NODE + device['index']}"
    place = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function) | values["partition"] << 28
    properties = _properties(
        simd_count=1216, mem_banks_count=1, io_links_count=len(values["xgmi"]) + 1, vendor_id=0x1002,
        device_id=pci_device, location_id=place, domain=int(domain, 16), drm_render_minor=values["minor"],
        hive_id=int(values.get("hive") or "0", 16), gfx_target_version=target,
        unique_id=int(values["uuid"].split("-")[1], 16),
    )  # fmt: skip
    _put(node, gpu_id=str(gpu_id(device)), properties=properties)
    bank = _properties(heap_type=1, size_in_bytes=values["memory"]["total"] if "memory" in values else 1 << 38)
    _put(node / "mem_banks/0", properties=bank)
    _put(node / "io_links/0", properties=_properties(type=2, node_to=0, weight=20, max_bandwidth=64000))
    for i, (peer, (weight, most)) in enumerate(values["xgmi"].items(), 1):
        link = _properties(type=11, node_to=_FIRST_NODE + int(peer), weight=weight, max_bandwidth=most)
        _put(node / f"io_links/{i}", properties=link)


def _sysfs(root: Path, device: Facts, slot_width: int) -> None:
    values = device["v"]
    pci_device, kind, _ = _DEVICES[values["gfx"]]
    port = root / f"sys/devices/pci0000:00/0000:00:{device['index'] + 1:02x}.1"
    _put(port, vendor="0x1022", max_link_width=str(slot_width))
    place = port / values["pci"]
    subsystem = values["subsystem"]
    told: dict[str, Any] = {
        "vendor": "0x1002", "device": f"0x{pci_device:04x}", "class": kind,
        "subsystem_device": f"0x{subsystem[:4]}", "subsystem_vendor": f"0x{subsystem[4:]}",
        "product_name": values.get("name"), "serial_number": values.get("serial"), "vbios_version": values.get("vbios"),
        "current_link_width": values.get("pcie_width"), "max_link_width": values.get("pcie_width_max"),
        "gpu_busy_percent": values.get("util"), "unique_id": values["uuid"].split("-")[1],
    }  # fmt: skip
    if "memory" in values:
        told.update(mem_info_vram_used=values["memory"]["used"], mem_info_vram_total=values["memory"]["total"])
    if "modes" in values:
        told.update(current_compute_partition=values["modes"][0], current_memory_partition=values["modes"][1])
    _put(place, **{name: str(value) for name, value in told.items() if value is not None})
    _put(place / "power", runtime_status="active")
    _sensors(place / "hwmon/hwmon4", values)
    _ras(place / "ras", values)
    (place / "gpu_metrics").write_bytes(metrics(values))
    (place / "driver").symlink_to("../../../../bus/pci/drivers/amdgpu")
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    os.symlink(os.path.relpath(place, root / "sys/bus/pci/devices"), root / "sys/bus/pci/devices" / values["pci"])


def _sensors(place: Path, values: Facts) -> None:
    told: dict[str, Any] = {"name": "amdgpu", "temp2_label": "junction", "temp3_label": "mem"}
    for sensor, name in ((2, "temp"), (3, "mem_temp")):
        for key, file in ((name, "input"), (f"{name}_max", "crit")):
            if key in values:
                told[f"temp{sensor}_{file}"] = round(values[key] * 1000)
    # The second die of a card says nought.
    watts = {"power1_average": "power_w", "power1_cap": "power_limit_w", "power1_cap_default": "power_default_w"}
    told.update({file: round(1_000_000 * values.get(key, 0)) for file, key in watts.items()})
    if "sm_clock" in values:
        told["freq1_input"] = values["sm_clock"] * 1_000_000
    _put(place, **{name: str(value) for name, value in told.items()})


def _ras(place: Path, values: Facts) -> None:
    form = "aca_{}" if values["gfx"] == "gfx942" else "{}_err_count"
    counts = {form.format(b): f"ue: {pair[0]}\nce: {pair[1]}\n" for b, pair in values.get("ras", {}).items()}
    _put(place, **counts)
    pages = values.get("bad_pages") or {}
    flags = "R" * pages.get("retired", 0) + "P" * pages.get("pending", 0) + "F" * pages.get("failed", 0)
    lines = "".join(f"0x{page:08x} : 0x00001000 : {flag}\n" for page, flag in enumerate(flags, 0x100))
    _put(place, gpu_vram_bad_pages=lines)


def metrics(values: Facts, *, held: int = 0) -> bytes:
    """The firmware's table; `held` is for how long heat has held the clocks down so far."""
    if values.get("xgmi_links") is None:
        told = bytearray(b"\xff" * 120)
        struct.pack_into("<HBB", told, 0, 120, 1, 3)
        struct.pack_into("<Q", told, 112, 1 << 36 if values.get("slowdown") else 0)
        return bytes(told)
    told = bytearray(b"\xff" * 2208)
    struct.pack_into("<HBB", told, 0, 2208, 1, 7)
    struct.pack_into("<5I", told, 44, 0, 123456, held, 0, 0)
    struct.pack_into(f"<{len(values['xgmi_links'])}H", told, 264, *values["xgmi_links"])
    return bytes(told)


def _holder(root: Path, holder: Facts, gpu: int) -> None:
    place = root / f"sys/class/kfd/kfd/proc/{holder['pid']}"
    _put(place, **{f"vram_{gpu}": str(holder["used"])})
    _put(root / f"proc/{holder['pid']}", comm=holder["comm"] or "")
