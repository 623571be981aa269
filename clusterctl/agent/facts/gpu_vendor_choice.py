"""Opens the reader for the GPUs of this machine. Each GPU vendor has a reader class."""

from __future__ import annotations

from clusterctl.agent.facts.amdgpu import AmdGpuReader
from clusterctl.agent.facts.nvml import open_nvml_reader
from clusterctl.agent.linux import gpu_devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def open_gpu_reader(root: str = "/") -> Any:
    """Return a `NvmlGpuReader` or `AmdGpuReader`. If the machine has no GPU library, return a text with the reason."""
    reader = open_nvml_reader()
    if not isinstance(reader, str) and reader.init_error is None and reader.handles:
        return reader
    if gpu_devices.has_amd_driver(root):
        amd_reader = AmdGpuReader(root)
        return amd_reader if amd_reader.gpus else reader
    return reader
