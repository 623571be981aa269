"""A machine with GPUs where there are none: a library that plays a scenario, and the programs a probe asks.

    lib = fake_nvml.library()                     # a directory with libnvidia-ml.so.1, compiled once
    scene = fake_nvml.Scenario(tmp_path / "s.json", gpus=8)
    env = {**os.environ, **scene.environment()}   # LD_LIBRARY_PATH and FAKE_NVML for whoever loads NVML
    scene.gpu(5, errors={"*": 15})                # now it is lost; what runs sees it at its next call

Fields of a device, each with the default of a healthy H100 in `nvml.c`: uuid serial name vbios pci subsystem minor
capability power_mw power_limit_mw power_default_mw pstate pcie_width pcie_width_max pcie_gen pcie_gen_max persistence
compute_mode retired_pending temp temp_shutdown temp_slowdown temp_max mem_temp_max margin sm_clock sm_clock_max throttle
ecc_unc ecc_cor ecc_unc_aggregate ecc_cor_aggregate ecc_mode ecc_default mig remapped rows repair nvlinks p2p sram_unc
sram_threshold fabric mem_total mem_used mem_reserved util mem_util compute_procs mps_procs graphics_procs fields errors
hang. A field of `None` is one that the card does not have; retired pages are the fields 29 and 30.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.compiled import compiled

SOURCE = Path(__file__).with_name("nvml.c")

LOST, RESET_REQUIRED, MISMATCH, NOT_LOADED, UNKNOWN = 15, 16, 18, 9, 999
HW_SLOWDOWN, HW_THERMAL, SW_THERMAL = 0x8, 0x48, 0x20


def times(count: int, code: int = UNKNOWN) -> dict[str, int]:
    """Return an error that a call ends with so many times, in each process, before it works again."""
    return {"code": code, "times": count}


def library() -> Path:
    """Return the directory of the compiled library; compile where the source has changed."""
    return compiled(SOURCE, "libnvidia-ml.so.1", "-shared", "-fPIC")


class Scenario:
    """A scenario file; each change is written at once and seen by the next call of whoever reads it."""

    def __init__(self, path: Path, gpus: int = 8, *, node: int = 0, **system: Any) -> None:
        self.path = path
        uuids = [{"uuid": f"GPU-{node:08d}-0000-0000-0000-{i:012d}"} for i in range(gpus)]
        self.data: dict[str, Any] = {"defaults": {}, "devices": uuids, **system}
        self.write()

    def gpu(self, index: int, **fields: Any) -> Scenario:
        """Change one GPU."""
        self.data["devices"][index].update(fields)
        return self.write()

    def all(self, **fields: Any) -> Scenario:
        """Change what every GPU has that does not say otherwise."""
        self.data["defaults"].update(fields)
        return self.write()

    def system(self, **fields: Any) -> Scenario:
        """Change the machine: driver, cuda, count, errors, hang, delay_ms, events."""
        self.data.update(fields)
        return self.write()

    def write(self) -> Scenario:
        """Write the file, atomically."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data))
        partial.replace(self.path)
        return self

    def environment(self) -> dict[str, str]:
        """Return what a process needs to load the library and play this scenario."""
        return {"LD_LIBRARY_PATH": str(library()), "FAKE_NVML": str(self.path)}


def program(folder: Path, name: str, *, output: str = "", error: str = "", code: int = 0, hang: bool = False) -> Path:
    """Write a program of that name which prints, complains and exits as told; put `folder` first on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    text = path.with_suffix(".stdout")
    text.write_text(output)
    wait = "exec sleep 1000\n" if hang else ""
    complain = f"printf '%s\\n' {_quoted(error)} >&2\n" if error else ""
    path.write_text(f"#!/bin/sh\n{wait}cat {_quoted(str(text))}\n{complain}exit {code}\n")
    path.chmod(0o755)
    return path


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


DMESG_DENIED = "dmesg: read kernel buffer failed: Operation not permitted"

SMI_OUTPUTS: dict[str, tuple[str, str, int]] = {
    "healthy": ("0, GPU-0, NVIDIA H100 80GB HBM3, 00000000:10:00.0, 570.86.15\n", "", 0),
    "no driver": (
        "",
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
            "Make sure that the latest NVIDIA driver is installed and running."
        ),
        9,
    ),
    "mismatch": ("Failed to initialize NVML: Driver/library version mismatch\n", "", 18),
    "lost": ("Unable to determine the device handle for GPU0000:10:00.0: GPU is lost.  Reboot the system\n", "", 15),
}
"""What real versions of `nvidia-smi` print and exit with: (stdout, stderr, code)."""


def root(
    folder: Path,
    *,
    gpus: int = 8,
    module: str = "570.86.15",
    uptime: float = 900000.0,
    given: int | None = None,
    slot: int = 16,
) -> Path:
    """Make a tree of /sys, /proc and /dev of a machine with GPUs, for the request's `root`.

    Args:
        folder: Where it is made.
        gpus: How many GPUs are on the PCI bus, each below a port of its own.
        module: Version of the driver.
        uptime: Seconds since the boot.
        given: As many of them have a device node, as a container sees it; all where it is not told.
        slot: PCIe lanes of every port.
    """
    files = {
        "proc/uptime": f"{uptime} 0.0",
        "proc/modules": "nvidia 1 0 - Live 0x0\n",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {module}  Thu Jan 23\n",
        "sys/module/nvidia/version": module,
        "dev/nvidiactl": "",
        "dev/nvidia-uvm": "",
    }
    (folder / "sys/bus/pci/devices").mkdir(parents=True)
    for index in range(gpus):
        address, port = f"0000:{0x10 + index:02x}:00.0", f"sys/devices/pci0000:00/0000:00:{index + 1:02x}.0"
        device = f"{port}/{address}"
        files.update({f"{port}/vendor": "0x8086", f"{port}/max_link_width": str(slot)})
        files.update({f"{device}/vendor": "0x10de", f"{device}/class": "0x030200"})
        files.update({f"{device}/current_link_width": "16", f"{device}/max_link_width": "16"})
        if given is None or index < given:
            files[f"dev/nvidia{index}"] = ""
        files[f"proc/driver/nvidia/gpus/{address}/information"] = f"Model: \t H100\nDevice Minor: \t {index}"
        (folder / device).mkdir(parents=True)
        (folder / f"sys/bus/pci/devices/{address}").symlink_to(folder / device)
        (folder / device / "driver").symlink_to("/sys/bus/pci/drivers/nvidia")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return folder
