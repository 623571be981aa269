"""The processes of all users on the GPUs of this machine, with what the GPUs do now."""

from __future__ import annotations

import time

from clusterctl.agent.facts.child_tasks import AbsentError
from clusterctl.agent.facts.gpu_vendor_choice import open_gpu_reader
from clusterctl.agent.facts.machine_sampler import sample_gpus
from clusterctl.agent.linux import proc
from clusterctl.agent.linux.syscalls import read_boot_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_PROCESSES = 64


def collect_gpu_users() -> dict[str, Any]:
    """Return the facts of the group `gpu_users`.

    Raises:
        AbsentError: This machine has no GPU library.
    """
    reader = open_gpu_reader()
    if isinstance(reader, str):
        raise AbsentError(reader)
    sample = sample_gpus(reader)
    readable = sample["status"] == "ok"
    held = {gpu["gpu"]: gpu for gpu in reader.read_memory_and_processes(reader.indices)} if readable else {}
    boot = time.time() - read_boot_time()
    gpus: list[dict[str, Any]] = [
        {
            **held.get(gpu["gpu"], {"used": gpu["mem_used"], "total": gpu["mem_total"], "version": 2, "procs": None}),
            "gpu": gpu["gpu"],
            "util": gpu["util"],
            "err": sorted(set((gpu["err"] or {}).values())),
        }
        for gpu in sample["gpus"]
    ]
    for gpu in gpus:
        procs = gpu["procs"] or []
        gpu["left_out"] = max(0, len(procs) - _MAX_PROCESSES)
        gpu["procs"] = [_add_command(process, boot) for process in procs[:_MAX_PROCESSES]]
    return {"status": sample["status"], "reason": sample["reason"], "gpus": gpus}


def _add_command(process: dict[str, Any], boot: float) -> dict[str, Any]:
    """Return a process with the name of its user, its command line, and its start and CPU time."""
    stat = proc.read_stat(process["pid"]) if process["visible"] else None
    if stat is None:
        return {**process, "visible": False}
    return {
        **process,
        "user_name": proc.find_user_name(process["user"]),
        "command": proc.read_command(process["pid"]),
        "since": round(boot + stat.start_time / proc.TICKS_PER_SECOND),
        "start": stat.start_time,
        "cpu_s": round(stat.ticks / proc.TICKS_PER_SECOND, 1),
    }
