"""Foreign processes and memory on GPUs, and the modes of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.check import View, node_check
from clusterctl.health.checks import gpus
from clusterctl.health.model import JUDGED, Action, Outcome, fail, ok, unknown, warn

_FAMILY = "GPU already in use"
_GIB = 1024**3


def _process(entry: dict[str, Any]) -> str:
    used = entry.get("used")
    size = f", {used / _GIB:.1f} GiB" if isinstance(used, int) else ""
    if not entry.get("visible", True):
        return f"process {entry['pid']} that we cannot see (container?){size}"
    return f"{entry.get('comm')} {entry['pid']} (uid {entry.get('user')}{size})"


def _allowed(view: View, entry: dict[str, Any]) -> bool:
    run = entry.get("run")
    mine = run is not None and run == view.controller.get("own_run")
    names = [str(name)[:15] for name in view.context.expect.get("allowed_procs") or ()]
    return mine or bool(entry.get("agent")) or (entry.get("comm") or "") in names


@node_check(
    name="gpu.foreign_procs",
    family=_FAMILY,
    source="NVML compute, MPS and graphics processes, or /sys/class/kfd/kfd/proc of AMD; /proc",
    threshold="none but monitoring agents, the MPS server and `health.expect.allowed_procs`; graphics clients WARN",
    severity="FAIL",
    remedy=("End the process, or its run (`clusterctl down RUN`); clusterctl does not kill what it did not start"),
    action=Action.KILL_PROCS,
    gpu=True,
    vendors=JUDGED,
)
def foreign_procs(view: View) -> Iterable[Outcome]:
    """Nobody else computes on the GPUs.

    The commonest reason why training does not start on a healthy node.
    """

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        strangers = [entry for entry in value if not _allowed(view, entry)]
        if not strangers:
            return None
        computing = [entry for entry in strangers if entry["kind"] != "graphics"]
        say = fail if computing else warn
        whose = computing or strangers
        runs = sorted({entry["run"] for entry in whose if entry.get("run")})
        hint = f"They belong to run {', '.join(runs)}: `clusterctl down {runs[0]}`" if runs else None
        message = f"{gpus.label(device)}: held by {', '.join(map(_process, whose[:4]))}"
        return say(message, gpu=device["index"], value=[entry["pid"] for entry in whose], hint=hint)

    return gpus.judge_each(view, "procs", judge, "no foreign process on {n} GPUs")


@node_check(
    name="gpu.mem_used",
    family=_FAMILY,
    source="NVML memory info, version 2 (which leaves out what the driver reserves); `mem_info_vram_used` of AMD",
    threshold=(
        "less than `warn` bytes, FAIL from `fail` bytes; with the old call and on AMD, which count what the driver "
        "reserves, less than `old` bytes; what a desktop holds WARN at most"
    ),
    severity="FAIL",
    remedy="Find the holder: `sudo fuser -v /dev/nvidia* /dev/kfd` (a container or a zombie is invisible to us)",
    action=Action.KILL_PROCS,
    gpu=True,
    vendors=JUDGED,
    thresholds={"warn": 0.3 * _GIB, "fail": 1.0 * _GIB, "old": 1.5 * _GIB},
)
def mem_used(view: View) -> Iterable[Outcome]:
    """GPU memory is free before a run."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        used = value["used"]
        most = view.limit("warn") if value["version"] == 2 else view.limit("old")
        seen = [entry for entry in device["v"].get("procs") or [] if not _allowed(view, entry)]
        own = sum(entry.get("used") or 0 for entry in device["v"].get("procs") or [] if entry not in seen)
        if used - own < most:
            return None
        desktop = sum(entry.get("used") or 0 for entry in seen if entry["kind"] == "graphics")
        say = fail if used - own - desktop >= view.limit("fail") else warn
        who = f" by {', '.join(map(_process, seen[:4]))}" if seen else " by a process that we cannot see"
        message = f"{gpus.label(device)}: {used / _GIB:.1f} of {value['total'] / _GIB:.0f} GiB in use{who}"
        return say(message, gpu=device["index"], value=used, expected=0)

    return gpus.judge_each(view, "memory", judge, "memory of {n} GPUs is free")


@node_check(
    name="gpu.idle",
    family=_FAMILY,
    source="NVML utilisation, `gpu_busy_percent` of AMD",
    threshold="below `warn` percent",
    severity="WARN",
    remedy="Something computes on this GPU; look at `nvidia-smi` or `amd-smi` on the node",
    action=Action.KILL_PROCS,
    gpu=True,
    vendors=JUDGED,
    thresholds={"warn": 20.0},
)
def idle(view: View) -> Iterable[Outcome]:
    """GPUs do nothing before a run."""
    most = view.limit("warn")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value < most:
            return None
        return warn(f"{gpus.label(device)}: {value} % busy", gpu=device["index"], value=value, expected=0)

    return gpus.judge_each(view, "util", judge, "{n} GPUs are idle")


@node_check(
    name="run.leftover",
    family=_FAMILY,
    source="run marker in the environment of processes of this user",
    threshold="no process of a run that is over",
    severity="FAIL",
    remedy="`clusterctl down RUN` ends what a run left behind",
    action=Action.KILL_PROCS,
    group="procs",
)
def leftover(view: View) -> Iterator[Outcome]:
    """Nothing is left of earlier runs of ours."""
    live, strange = view.controller.get("live_runs"), view.controller.get("strange_runs") or ()
    holders: dict[str, list[int]] = {}
    for entry in view.group().data.get("runs") or []:
        if entry["run"] != view.controller.get("own_run"):
            holders.setdefault(entry["run"], []).append(entry["pid"])
    for run, pids in holders.items():
        shown = ", ".join(map(str, pids[:5]))
        hint, many = f"`clusterctl down {run}`", plural(len(pids), "process", "processes")
        if live is None:
            yield warn(f"{many} of run {run} ({shown})", value=pids, hint=hint)
        elif run in strange:
            # Perhaps it lives under another state folder; of what we do not know we say nothing worse.
            message = f"{many} of run {run} ({shown}), which neither this node nor this head knows"
            yield warn(message, value=pids, hint=f"`kill {' '.join(map(str, pids[:5]))}` if it is not yours to keep")
        elif run in live:
            yield ok(f"run {run} is alive with {many}", value=pids)
        else:
            yield fail(f"{many} left over by run {run} ({shown})", value=pids, hint=hint)
    if not holders:
        yield ok("nothing left of earlier runs")


@node_check(
    name="host.stuck_procs",
    family=_FAMILY,
    source="/proc/*/stat, /proc/*/status, /proc/*/wchan",
    threshold=(
        "no process that holds a GPU in state D for five seconds without being woken once (one that reads files is "
        "there for a moment at a time); others WARN from `warn` on"
    ),
    severity="FAIL",
    remedy=("Such a process cannot be killed; find what it waits for (mount, disk, driver), else reboot the node"),
    action=Action.REBOOT_NODE,
    group="procs",
    thresholds={"warn": 3.0},
)
def stuck_procs(view: View) -> Iterator[Outcome]:
    """No process is stuck in the kernel with a GPU in its hands."""
    stuck = view.group().data.get("dstate")
    if stuck is None:
        yield unknown("states of processes were not reported")
        return
    with_gpu = [entry for entry in stuck if entry.get("gpu") and entry.get("stuck_s")]
    for entry in with_gpu:
        where = entry.get("wchan") or "the kernel"
        message = f"{entry['comm']} {entry['pid']} holds a GPU and is stuck in {where} for {entry['stuck_s']:.0f} s"
        yield fail(message, value=entry["pid"])
    if with_gpu:
        return
    if len(stuck) >= view.limit("warn"):
        yield warn(
            f"{plural(len(stuck), 'process', 'processes')} in state D: {', '.join(e['comm'] for e in stuck[:5])}",
            value=len(stuck),
        )
    else:
        yield ok("no process is stuck")


# --- Modes that an administrator sets on a GPU, and variables that change how CUDA works.

_MODES_FAMILY = "GPU modes"
_PROHIBITED = 2
_EXCLUSIVE = 3


@node_check(
    name="gpu.mig_mode",
    family=_MODES_FAMILY,
    source="NVML nvmlDeviceGetMigMode",
    threshold="off, or on where `health.expect.mig` is true; no change pending",
    severity="FAIL",
    remedy="`sudo nvidia-smi -mig 0` (or 1) and reset the GPU",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def mig_mode(view: View) -> Iterable[Outcome]:
    """GPUs are not split into instances, unless the cluster file says so."""
    wanted = int(bool(view.context.expect.get("mig", False)))

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        now, pending = value
        index = device["index"]
        if now != pending:
            return fail(
                f"{gpus.label(device)}: MIG mode changes at the next reset", gpu=index, value=value, expected=wanted
            )
        if now != wanted:
            return fail(f"{gpus.label(device)}: MIG is {'on' if now else 'off'}", gpu=index, value=now, expected=wanted)
        return None

    return gpus.judge_each(view, "mig", judge, "MIG as expected on {n} GPUs")


@node_check(
    name="gpu.compute_mode",
    family=_MODES_FAMILY,
    source="NVML nvmlDeviceGetComputeMode",
    threshold="default; exclusive WARN, prohibited FAIL",
    severity="FAIL",
    remedy="`sudo nvidia-smi -c 0`",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def compute_mode(view: View) -> Iterable[Outcome]:
    """GPUs may be computed on."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value == _PROHIBITED:
            return fail(f"{gpus.label(device)}: compute mode prohibited", gpu=device["index"], value=value, expected=0)
        if value == _EXCLUSIVE:
            return warn(f"{gpus.label(device)}: compute mode exclusive", gpu=device["index"], value=value, expected=0)
        return None

    return gpus.judge_each(view, "compute_mode", judge, "compute mode of {n} GPUs is default")


@node_check(
    name="gpu.persistence",
    family=_MODES_FAMILY,
    source="NVML nvmlDeviceGetPersistenceMode",
    threshold="on",
    severity="WARN",
    remedy="`sudo nvidia-smi -pm 1` (or nvidia-persistenced): without it every start of CUDA costs seconds",
    action=Action.FIX_CONFIG,
    gpu=True,
)
def persistence(view: View) -> Iterable[Outcome]:
    """The driver stays loaded while nobody uses a GPU."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        return (
            None
            if value
            else warn(f"{gpus.label(device)}: persistence mode is off", gpu=device["index"], value=value, expected=1)
        )

    return gpus.judge_each(view, "persistence", judge, "persistence mode is on, {n} GPUs")


@node_check(
    name="gpu.bad_env",
    family="GPU state",
    source="environment of the job",
    threshold="none of the debugging variables of CUDA set",
    severity="WARN",
    remedy="Unset the variable in `env`, the prologue or the shell's start files",
    action=Action.FIX_CONFIG,
    gpu=True,
    group="host",
)
def bad_env(view: View) -> Iterator[Outcome]:
    """No variable is set that injects a debugger or profiler into CUDA or makes it wait."""
    env = view.group().data.get("env")
    if env is None:
        yield unknown("the environment was not reported")
        return
    names = sorted(name for name in _BAD_ENV if name in env)
    yield warn(f"{', '.join(names)} set", value=names) if names else ok("no debugging variable set")


_BAD_ENV = (
    "NSIGHT_CUDA_DEBUGGER",
    "CUDA_INJECTION32_PATH",
    "CUDA_INJECTION64_PATH",
    "CUDA_AUTO_BOOST",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_COREDUMP_FILE",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    "CUDA_PROFILE",
    "COMPUTE_PROFILE",
)
