"""Opens the GPU library of this machine, whatever the vendor; waits after an attempt until its GPUs' memory is free.

The driver frees the memory of a dead process a moment later, so this waits. It does not wait for a live process that
is not part of the run.

Output: an empty line at the first sign of the driver, then one line of JSON:

    {"status": "free" | "held" | "absent" | "error", "reason": text | null,
     "gpus": [{"gpu", "used": bytes, "total": bytes, "version",
               "procs": [{"pid", "used", "comm", "user", "run", "visible"}]}]}

"gpus" lists the GPUs that are not free. "absent": there is no driver.
"""

from __future__ import annotations

import json
import sys
import time

from clusterctl.agent.facts import nvml
from clusterctl.agent.facts.amdgpu import AmdgpuSession
from clusterctl.agent.linux import gpu_devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def open_gpus(root: str = "/") -> Any:
    """Return the open GPUs (`NvmlSession` or `AmdgpuSession`), or the reason if there are none."""
    session = nvml.open_nvml()
    if not isinstance(session, str) and session.init_error is None and session.handles:
        return session
    if gpu_devices.has_amd_driver(root):
        other = AmdgpuSession(root)
        return other if other.gpus else session
    return session


_RECHECK_S = 0.2
_FREE_BYTES = {1: 1.5 * 1024**3, 2: 0.3 * 1024**3}
"""Bytes that count as free although they are in use, by version of the call: version 1 includes the driver's reserve.
"""


def main(arguments: list[str]) -> int:
    """Print the answer. `arguments`: indices of GPUs (comma-separated), the longest wait in seconds, run id."""
    indices = [int(index) for index in arguments[0].split(",")]
    sys.stdout.write(json.dumps(wait_until_free(indices, float(arguments[1]), arguments[2])) + "\n")
    sys.stdout.flush()
    return 0


def wait_until_free(indices: list[int], seconds: float, run: str) -> dict[str, Any]:
    """Return the answer once all memory is free, nothing will change by itself, or `seconds` have passed."""
    session = open_gpus()
    if isinstance(session, str):
        return _answer("absent", session, [])
    if session.init_error is not None:
        return _answer("error", f"NVML does not open (code {session.init_error})", [])
    deadline = time.monotonic() + seconds
    busy_gpus = [gpu for gpu in session.list_holders(indices) if not _is_free(gpu)]
    sys.stdout.write("\n")
    sys.stdout.flush()
    while busy_gpus:
        # Memory may still be freed if no visible process holds it, or one that is ending.
        may_change = any(
            not gpu["procs"] or any(not process["visible"] or process["run"] == run for process in gpu["procs"])
            for gpu in busy_gpus
        )
        if time.monotonic() >= deadline or not may_change:
            return _answer("held", None, busy_gpus)
        time.sleep(_RECHECK_S)
        busy_gpus = [gpu for gpu in session.list_holders(indices) if not _is_free(gpu)]
    return _answer("free", None, [])


def _answer(status: str, reason: str | None, busy_gpus: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": status, "reason": reason, "gpus": busy_gpus}


def _is_free(gpu: dict[str, Any]) -> bool:
    gpu["procs"] = [entry for entry in gpu["procs"] if not entry["agent"]]
    return not gpu["procs"] and bool(gpu["used"] <= _FREE_BYTES[gpu["version"]])
