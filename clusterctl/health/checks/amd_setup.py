"""How AMD's GPUs are set up: partitions, variables that choose among them, what slows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.checks.throttle import COOLING
from clusterctl.health.model import Action, Outcome, Status, fail, ok, unknown, warn
from clusterctl.health.symptom import Symptom
from clusterctl.health.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from clusterctl.health.check import ClusterView, View

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@node_check(
    name="gpu.slowdown",
    family="GPU temperature, power, clocks",
    source="`gpu_metrics` of AMD: throttle status (MI200), residencies of two looks (MI300 and later, newer drivers)",
    threshold="nothing but the power limit, which is normal under load, holds the clocks down",
    severity="WARN",
    remedy=COOLING,
    action=Action.CHECK_POWER_COOLING,
    gpu=True,
    vendors=(AMD,),
)
def slowdown(view: View) -> Iterable[Outcome]:
    """Neither heat nor the board holds down the clocks of AMD's GPUs."""

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if not value:
            return None
        return warn(f"{gpus.label(device)}: held down by {', '.join(value)}", gpu=device["index"], value=value)

    telling = [device for device in gpus.used_gpus(view) if "slowdown" in device.get("v", {})]
    if gpus.why_library_not_judged(view) is None and not telling:
        return [Outcome(status=Status.SKIP, message="not told by this GPU or driver")]
    return gpus.judge_each(view, "slowdown", judge, "clocks of {n} GPUs are not held down")


@cluster_check(
    name="gpu.partition",
    family="GPU modes",
    source="`current_compute_partition`, `current_memory_partition` of AMD (MI300 and later)",
    threshold="the same on all GPUs of one board",
    severity="WARN",
    remedy="`sudo amd-smi set --compute-partition SPX` (and `--memory-partition NPS1`) on all GPUs",
    action=Action.FIX_CONFIG,
    gpu=True,
    vendors=(AMD,),
)
def partition(view: ClusterView) -> Iterable[Outcome]:
    """AMD's GPUs are all divided alike: ranks on a part and ranks on a whole wait for each other."""
    return compare.compare_gpus(view, lambda device: gpus.value(device, "modes"), "partition", "/".join)


@node_check(
    name="gpu.numa_balancing",
    family="GPU modes",
    source="/proc/sys/kernel/numa_balancing",
    threshold="0 (AMD's guides to MI200 and MI300 turn it off: it moves pages that GPUs have mapped)",
    severity="WARN",
    remedy="`sudo sysctl kernel.numa_balancing=0`",
    action=Action.FIX_CONFIG,
    gpu=True,
    vendors=(AMD,),
)
def numa_balancing(view: View) -> Iterator[Outcome]:
    """The kernel does not move memory between processors by itself while AMD's GPUs use it."""
    value = gpus.library(view).data.get("numa_balancing")
    if value is None:
        yield unknown("could not read /proc/sys/kernel/numa_balancing")
    elif value:
        yield warn("NUMA balancing is on", value=value, expected=0)
    else:
        yield ok("NUMA balancing is off")


@node_check(
    name="gpu.visible_env",
    family="GPU modes",
    source=f"{_ROCR}, {_HIP} (else {_CUDA}) in the job's environment",
    threshold=(
        f"no {_ROCR} where the cluster file names GPUs by index; not fewer GPUs in it than in {_HIP}; none has fewer "
        "GPUs than the file declares by number"
    ),
    severity="FAIL",
    remedy="Unset it in `env`, the prologue or the shell's start files",
    action=Action.FIX_CONFIG,
    gpu=True,
    vendors=(AMD,),
    group="host",
)
def visible_env(view: View) -> Iterator[Outcome]:
    """No two variables choose AMD's GPUs against each other: HIP counts within what ROCR leaves."""
    env = view.group().data.get("env")
    if env is None:
        yield unknown("the environment was not reported")
        return
    rocr, hip = env.get(_ROCR), env.get(_HIP)
    declared, least = view.expected.gpus, view.expected.count or 0
    if rocr is not None and isinstance(declared, tuple):
        yield fail(
            f"{_ROCR} is {rocr}: the GPUs {list(declared)} of the cluster file would count within it", value=rocr
        )
    elif rocr is not None and hip is not None and len(hip.split(",")) > len(rocr.split(",")):
        # torch ends with the same complaint (`_parse_visible_devices` of torch.cuda).
        yield fail(f"{_HIP} is {hip}, more than {_ROCR} leaves: {rocr}", value=[rocr, hip])
    elif not isinstance(declared, tuple) and (hiding := _hiding(env, least)):
        yield fail(f"{hiding} is {env[hiding]}: fewer than the {least} declared GPUs", value=env[hiding])
    else:
        yield ok("no variables at odds")


def _hiding(env: Mapping[str, str | None], least: int) -> str | None:
    """Return the variable that leaves fewer GPUs than that; HIP reads CUDA's only where its own is not set."""
    own = _HIP if _HIP in env else _CUDA
    settings = ((name, env.get(name)) for name in (_ROCR, own))
    return next((name for name, value in settings if value is not None and len(value.split(",")) < least), None)


def sign(gpu: int, causes: Sequence[str] | None, degrees: float | None, lasting: float) -> Symptom | None:
    """Return what holds the clocks down in a sample; `lasting` is how many seconds make it worth a word."""
    if not causes:
        return None
    return Symptom(
        gpu=gpu,
        check="gpu.slowdown",
        status=Status.WARN,
        words=f"held down by {', '.join(causes)}",
        action=Action.CHECK_POWER_COOLING,
        lasting=lasting,
        detail=f"{degrees:.0f} °C" if degrees is not None else "",
    )


CHECKS = (slowdown, partition, numa_balancing, visible_env)
