"""Waits after an attempt until the memory of the attempt's GPUs is free.

The driver frees the memory of a dead process with a delay. The wait ends at once if a live process that does not belong
to the run uses the memory.

Output: an empty line as soon as the driver has answered, then one line of JSON:

    {"status": "free" | "held" | "absent" | "error", "reason": text | null,
     "gpus": [{"gpu", "used": bytes, "total": bytes, "version",
               "procs": [{"pid", "used", "comm", "user", "run", "visible"}]}]}

"gpus" lists the GPUs that are not free. The status "absent" means that the machine has no driver.
"""

from __future__ import annotations

import json
import math
import sys
import time

from clusterctl.agent.facts.gpu_vendor_choice import open_gpu_reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_RECHECK_S = 0.2
_FREE_BYTES = {1: 1.5 * 1024**3, 2: 0.3 * 1024**3}
"""A GPU that uses at most so many bytes counts as free, by version of NVML's memory call. The used bytes of version 1
include the memory that the driver reserves. The main memory of a GPU without memory of its own (0) is never free.
"""


def main(arguments: list[str]) -> int:
    """Wait for free memory and print the result. Arguments: comma-separated GPU indices, time limit (s), run id."""
    indices = [int(index) for index in arguments[0].split(",")]
    sys.stdout.write(json.dumps(wait_until_memory_free(indices, float(arguments[1]), arguments[2])) + "\n")
    sys.stdout.flush()
    return 0


def wait_until_memory_free(indices: list[int], timeout_s: float, run: str) -> dict[str, Any]:
    """Wait until the memory of the GPUs is free, only processes outside the run use it, or `timeout_s` have passed.

    Return the result in the format of this module's output.
    """
    reader = open_gpu_reader()
    if isinstance(reader, str):
        return _make_result("absent", reader, [])
    if reader.init_error is not None:
        return _make_result("error", f"NVML does not open (code {reader.init_error})", [])
    deadline = time.monotonic() + timeout_s
    busy_gpus = [gpu for gpu in reader.read_memory_and_processes(indices) if not _is_free(gpu)]
    sys.stdout.write("\n")
    sys.stdout.flush()
    while busy_gpus:
        # The memory may become free if no visible process uses it, or if a process of the run uses it.
        may_change = any(
            not gpu["procs"] or any(not process["visible"] or process["run"] == run for process in gpu["procs"])
            for gpu in busy_gpus
        )
        if time.monotonic() >= deadline or not may_change:
            return _make_result("held", None, busy_gpus)
        time.sleep(_RECHECK_S)
        busy_gpus = [gpu for gpu in reader.read_memory_and_processes(indices) if not _is_free(gpu)]
    return _make_result("free", None, [])


def _make_result(status: str, reason: str | None, busy_gpus: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": status, "reason": reason, "gpus": busy_gpus}


def _is_free(gpu: dict[str, Any]) -> bool:
    gpu["procs"] = [entry for entry in gpu["procs"] if not entry["agent"]]
    return not gpu["procs"] and bool(gpu["used"] <= _FREE_BYTES.get(gpu["version"], math.inf))
