"""After an attempt: is the memory of its GPUs free again, and if not, who holds it?

The driver frees a dead process's memory a moment after the process, so this waits; but not for a process that lives
and is not of the run, since that will not go by itself.

Answer, behind an empty line for the first sign of the driver, one line of JSON:

    {"status": "free" | "held" | "absent" | "error", "reason": text | null,
     "gpus": [{"gpu", "used": bytes, "total": bytes, "version",
               "procs": [{"pid", "used", "comm", "user", "run", "visible"}]}]}

"gpus" holds those that are not free. "absent": there is no driver to ask.
"""

from __future__ import annotations

import json
import sys
import time

from clusterctl.agent import facts
from clusterctl.agent.facts import bindings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PAUSE = 0.2
_FREE = {1: 1.5 * 1024**3, 2: 0.3 * 1024**3}
"""Bytes in use that no process accounts for, by version of the call; version 1 counts what the driver reserves."""


def main(arguments: list[str]) -> int:
    """Print the answer. `arguments`: indices of GPUs (comma-separated), most seconds to wait, run id."""
    bindings.settle(facts)
    indices = [int(index) for index in arguments[0].split(",")]
    sys.stdout.write(json.dumps(wait(indices, float(arguments[1]), arguments[2])) + "\n")
    sys.stdout.flush()
    return 0


def wait(indices: list[int], seconds: float, run: str) -> dict[str, Any]:
    """Return the answer once all is free, nothing will change by itself, or `seconds` are over."""
    from clusterctl.agent.facts import library

    session = library.open_session()
    if isinstance(session, str):
        return _answer("absent", session, [])
    if session.init_error is not None:
        return _answer("error", f"NVML does not open (code {session.init_error})", [])
    deadline = time.monotonic() + seconds
    held = [gpu for gpu in session.holders(indices) if not _is_free(gpu)]
    sys.stdout.write("\n")
    sys.stdout.flush()
    while True:
        if not held:
            return _answer("free", None, [])
        if time.monotonic() >= deadline or not any(_may_change(gpu, run) for gpu in held):
            return _answer("held", None, held)
        time.sleep(_PAUSE)
        held = [gpu for gpu in session.holders(indices) if not _is_free(gpu)]


def _answer(status: str, reason: str | None, held: list[dict[str, Any]]) -> dict[str, Any]:
    return {"status": status, "reason": reason, "gpus": held}


def _is_free(gpu: dict[str, Any]) -> bool:
    gpu["procs"] = [entry for entry in gpu["procs"] if not entry["agent"]]
    return not gpu["procs"] and bool(gpu["used"] <= _FREE[gpu["version"]])


def _may_change(gpu: dict[str, Any], run: str) -> bool:
    """Tell whether memory may still come free: nobody we see holds it, or somebody who is about to be gone."""
    return not gpu["procs"] or any(not process["visible"] or process["run"] == run for process in gpu["procs"])
