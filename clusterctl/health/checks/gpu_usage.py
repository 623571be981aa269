"""Checks of foreign processes and used memory on GPUs, of leftover processes, and of GPU modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clusterctl.formatting import group_pairs, plural
from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import JUDGED, Action, Outcome, fail, ok, warn

_FAMILY = "GPU already in use"
_GIB = 1024**3


def _describe_process(entry: dict[str, Any]) -> str:
    used = entry.get("used")
    size = f", {used / _GIB:.1f} GiB" if isinstance(used, int) else ""
    if not entry.get("visible", True):
        return f"process {entry['pid']}, invisible to this user (container?){size}"
    return f"{entry.get('comm')} {entry['pid']} (uid {entry.get('user')}{size})"


def _is_allowed(node: CheckedNode, entry: dict[str, Any]) -> bool:
    run = entry.get("run")
    mine = run is not None and run == node.controller.get("own_run")
    names = [str(name)[:15] for name in node.settings.expect.get("allowed_procs") or ()]
    return mine or bool(entry.get("agent")) or (entry.get("comm") or "") in names


@remedy(
    Action.KILL_PROCS,
    "End the process, or its run (`clusterctl down RUN`); clusterctl kills only processes that it started",
)
@gpu_facts.gpu_check("gpu.foreign_procs", _FAMILY, "procs", "no foreign process on {n} GPUs", vendors=JUDGED)
def check_foreign_processes(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """No foreign process computes on the GPUs.

    This is the most common reason why training does not start on a healthy node.

    Source: NVML compute, MPS and graphics processes, or /sys/class/kfd/kfd/proc of AMD; /proc
    Healthy: only monitoring agents, the MPS server and `health.expect.allowed_procs`; graphics clients are WARN
    """
    strangers = [entry for entry in gpu.value if not _is_allowed(gpu.node, entry)]
    if not strangers:
        return None
    computing = [entry for entry in strangers if entry["kind"] != "graphics"]
    say = gpu.fail if computing else gpu.warn
    whose = computing or strangers
    runs = sorted({entry["run"] for entry in whose if entry.get("run")})
    hint = f"The processes belong to run {', '.join(runs)}: `clusterctl down {runs[0]}`" if runs else None
    holders = ", ".join(map(_describe_process, whose[:4]))
    return say(f"held by {holders}", value=[entry["pid"] for entry in whose], hint=hint)


@remedy(
    Action.KILL_PROCS,
    "Find the process: `sudo fuser -v /dev/nvidia* /dev/kfd` (it may be in a container or a zombie)",
)
@gpu_facts.gpu_check(
    "gpu.mem_used",
    _FAMILY,
    "memory",
    "memory of {n} GPUs is free",
    vendors=JUDGED,
    thresholds={"warn": 0.3 * _GIB, "fail": 1.0 * _GIB, "old": 1.5 * _GIB, "shared": 0.5},
)
def check_used_memory(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """GPU memory is free before a run.

    Source: NVML memory info, version 2 (without the memory that the driver reserves); `mem_info_vram_used` of AMD;
        /proc/meminfo for GPUs that use the main memory (GB10, Strix Halo)
    Healthy: less than `warn` bytes in use, FAIL from `fail` bytes. NVML's version 1 and AMD include the memory of the
        driver: for them less than `old` bytes. Memory of a desktop is at most WARN. Of main memory, the system uses a
        part: WARN if less than the fraction `shared` is available
    """
    used, processes = gpu.value["used"], gpu.get("procs") or []
    if gpu.value["version"] == 0:
        total = gpu.value["total"]
        message = f"{used / _GIB:.1f} of {total / _GIB:.0f} GiB of main memory, which the GPU uses, are in use"
        return gpu.warn(message, value=used) if used > total * (1 - gpu.limit("shared")) else None
    foreign = [entry for entry in processes if not _is_allowed(gpu.node, entry)]
    own = sum(entry.get("used") or 0 for entry in processes if entry not in foreign)
    if used - own < gpu.limit("warn" if gpu.value["version"] == 2 else "old"):
        return None
    desktop = sum(entry.get("used") or 0 for entry in foreign if entry["kind"] == "graphics")
    say = gpu.fail if used - own - desktop >= gpu.limit("fail") else gpu.warn
    holders = ", ".join(map(_describe_process, foreign[:4])) or "a process that is invisible to this user"
    total = gpu.value["total"]
    return say(f"{used / _GIB:.1f} of {total / _GIB:.0f} GiB in use by {holders}", value=used, expected=0)


@remedy(Action.KILL_PROCS, "Find the process that computes on this GPU: `nvidia-smi` or `amd-smi` on the node")
@gpu_facts.gpu_check(
    "gpu.idle", _FAMILY, "util", "{n} GPUs are idle", severity="WARN", vendors=JUDGED, thresholds={"warn": 20.0}
)
def check_idle_gpus(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """GPUs are idle before a run.

    Source: NVML utilisation, `gpu_busy_percent` of AMD
    Healthy: below `warn` percent
    """
    return gpu.warn(f"{gpu.value} % busy", expected=0) if gpu.value >= gpu.limit("warn") else None


@remedy(Action.KILL_PROCS, "`clusterctl down RUN` ends the processes of a run")
@node_check("run.leftover", _FAMILY, group="procs")
def check_leftover_processes(node: CheckedNode) -> Iterator[Outcome]:
    """No process of an earlier run is alive.

    Source: the environment of this user's processes, in which each run sets a variable that identifies the run
    Healthy: no process of a run that has ended
    """
    live, strange = node.controller.get("live_runs"), node.controller.get("strange_runs") or ()
    own, entries = node.controller.get("own_run"), node.group().facts.get("runs") or []
    holders = group_pairs((entry["run"], entry["pid"]) for entry in entries if entry["run"] != own)
    for run, pids in holders.items():
        shown = ", ".join(map(str, pids[:5]))
        hint, many = f"`clusterctl down {run}`", plural(len(pids), "process", "processes")
        if live is None:
            yield warn(f"{many} of run {run} ({shown})", value=pids, hint=hint)
        elif run in strange:
            # The run may be active under another state folder, so this is only a warning.
            message = f"{many} of run {run} ({shown}), which neither this node nor this head knows"
            yield warn(message, value=pids, hint=f"`kill {' '.join(map(str, pids[:5]))}` if nobody needs the run")
        elif run in live:
            yield ok(f"run {run} is alive with {many}", value=pids)
        else:
            yield fail(f"{many} left over by run {run} ({shown})", value=pids, hint=hint)
    if not holders:
        yield ok("no processes of earlier runs")


@remedy(
    Action.REBOOT_NODE,
    "A process in state D cannot be killed; repair the mount, disk or driver that it waits for, or reboot the node",
)
@node_check("host.stuck_procs", _FAMILY, group="procs", thresholds={"warn": 3.0})
def check_stuck_processes(node: CheckedNode) -> Iterator[Outcome]:
    """No process that holds a GPU is stuck in the kernel.

    Source: /proc/*/stat, /proc/*/status, /proc/*/wchan
    Healthy: no process that holds a GPU stays in state D for five seconds without waking up. A process that reads files
        is in this state only for moments. `warn` or more other processes in state D are WARN
    """
    stuck = node.read("dstate", "states of processes were not reported")
    with_gpu = [entry for entry in stuck if entry.get("gpu") and entry.get("stuck_s")]
    for entry in with_gpu:
        where = entry.get("wchan") or "the kernel"
        message = f"{entry['comm']} {entry['pid']} holds a GPU and is stuck in {where} for {entry['stuck_s']:.0f} s"
        yield fail(message, value=entry["pid"])
    if not with_gpu and len(stuck) >= node.limit("warn"):
        names = ", ".join(entry["comm"] for entry in stuck[:5])
        yield warn(f"{plural(len(stuck), 'process', 'processes')} in state D: {names}", value=len(stuck))
    elif not with_gpu:
        yield ok("no process is stuck")


# --- GPU modes, and environment variables that change CUDA

_MODES_FAMILY = "GPU modes"
_PROHIBITED = 2
_EXCLUSIVE = 3


@remedy(Action.FIX_CONFIG, "`sudo nvidia-smi -mig 0` (or 1) and reset the GPU")
@gpu_facts.gpu_check("gpu.mig_mode", _MODES_FAMILY, "mig", "MIG as expected on {n} GPUs")
def check_mig_mode(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """GPUs are not split into MIG instances, unless the cluster file expects MIG.

    Source: NVML nvmlDeviceGetMigMode
    Healthy: off, or on if `health.expect.mig` is true; no change pending
    """
    wanted = int(bool(gpu.node.settings.expect.get("mig", False)))
    now, pending = gpu.value
    if now != pending:
        return gpu.fail("MIG mode changes at the next reset", expected=wanted)
    return gpu.fail(f"MIG is {'on' if now else 'off'}", value=now, expected=wanted) if now != wanted else None


@remedy(Action.FIX_CONFIG, "`sudo nvidia-smi -c 0`")
@gpu_facts.gpu_check("gpu.compute_mode", _MODES_FAMILY, "compute_mode", "compute mode of {n} GPUs is default")
def check_compute_mode(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """The compute mode of the GPUs allows all processes to compute.

    Source: NVML nvmlDeviceGetComputeMode
    Healthy: default; exclusive is WARN, prohibited is FAIL
    """
    if gpu.value == _PROHIBITED:
        return gpu.fail("compute mode prohibited", expected=0)
    return gpu.warn("compute mode exclusive", expected=0) if gpu.value == _EXCLUSIVE else None


@remedy(
    Action.FIX_CONFIG, "`sudo nvidia-smi -pm 1` (or nvidia-persistenced): without it every start of CUDA takes seconds"
)
@gpu_facts.gpu_check(
    "gpu.persistence", _MODES_FAMILY, "persistence", "persistence mode is on, {n} GPUs", severity="WARN"
)
def check_persistence_mode(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """The driver stays loaded while no program uses a GPU.

    Source: NVML nvmlDeviceGetPersistenceMode
    Healthy: on
    """
    return None if gpu.value else gpu.warn("persistence mode is off", expected=1)


@remedy(Action.FIX_CONFIG, "Unset the variable in `env`, the prologue or the shell's start files")
@node_check("gpu.bad_env", "GPU state", severity="WARN", gpu=True, group="host")
def check_debug_variables(node: CheckedNode) -> Outcome:
    """No environment variable injects a debugger or profiler into CUDA, or makes CUDA wait.

    Source: environment of the job
    Healthy: no debugging variable of CUDA is set
    """
    env = node.read("env", "the environment was not reported")
    names = sorted(name for name in _DEBUG_VARIABLES if name in env)
    return warn(f"{', '.join(names)} set", value=names) if names else ok("no debugging variable set")


_DEBUG_VARIABLES = (
    *("NSIGHT_CUDA_DEBUGGER", "CUDA_INJECTION32_PATH", "CUDA_INJECTION64_PATH", "CUDA_AUTO_BOOST", "CUDA_PROFILE"),
    *("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_FILE", "CUDA_DEVICE_WAITS_ON_EXCEPTION", "COMPUTE_PROFILE"),
)
