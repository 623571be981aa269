"""Opens the GPU library of this machine, whatever the vendor, for repeated readings."""

from __future__ import annotations

from clusterctl.agent.facts import nvml
from clusterctl.agent.facts.amdgpu import AmdgpuSession
from clusterctl.agent.linux import gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def open_gpus(root: str = "/") -> Any:
    """Return the open GPUs (`NvmlSession` or `AmdgpuSession`), or the reason if there are none."""
    session = nvml.open_nvml()
    if not isinstance(session, str) and session.init_error is None and session.handles:
        return session
    if gpus.has_amd_driver(root):
        other = AmdgpuSession(root)
        return other if other.gpus else session
    return session
