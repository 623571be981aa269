"""The fabric of an NVSwitch: whether GPUs have joined it, who runs it, and whether it reaches beyond the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import driver_errors
from clusterctl.health.check import node_check
from clusterctl.health.checks import gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.health.check import View

_FAMILY = "PCIe, NVLink, fabric"
_COMPLETED = 3
_UNSUPPORTED = 0
_UNHEALTHY, _LIMITED = 2, 3


def describe_problem(info: dict[str, Any]) -> str | None:
    """Return what is wrong with a GPU's fabric, or `None`.

    Values are those of `nvmlGpuFabricInfoV_t` in NVIDIA's `nvml.h`.
    """
    if info["state"] == _UNSUPPORTED:
        return None
    if info["state"] != _COMPLETED:
        return "not registered with the fabric"
    if info["status"] != 0:
        return f"fabric registration failed: {driver_errors.nvml_name(info['status'])}"
    return {_UNHEALTHY: "fabric is unhealthy", _LIMITED: "fabric is of limited capacity"}.get(info["health"])


@node_check(
    name="gpu.fabric",
    family=_FAMILY,
    source="NVML nvmlDeviceGetGpuFabricInfoV (driver 550 and later): state, status, health",
    threshold=(
        "state completed, status success, health not bad; limited capacity WARN; SKIP where the GPU has no fabric"
    ),
    severity="FAIL",
    remedy=(
        "`sudo systemctl restart nvidia-fabricmanager` (its version must equal the driver's); "
        "without it CUDA ends with error 802"
    ),
    action=Action.RESTART_FABRICMANAGER,
    gpu=True,
)
def fabric(view: View) -> Iterable[Outcome]:
    """GPUs behind an NVSwitch have joined its fabric."""
    states = [info["state"] for device in gpus.used_gpus(view) if (info := gpus.value(device, "fabric"))]
    if states and all(state == _UNSUPPORTED for state in states):
        return [skip("these GPUs have no fabric")]

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        wrong = describe_problem(value)
        if wrong is None:
            return None
        say = warn if value["state"] == _COMPLETED and value["health"] == _LIMITED else fail
        return say(f"{gpus.label(device)}: {wrong}", gpu=device["index"], value=value)

    return gpus.judge_each(view, "fabric", judge, "fabric complete on {n} GPUs", absent="these GPUs have no fabric")


@node_check(
    name="gpu.fabric_manager",
    family=_FAMILY,
    source="fabric state of the GPUs; where they have none, NVSwitches on the PCI bus and the process list",
    threshold=(
        "the fabric is complete, whoever runs it; where no GPU tells its fabric, the fabric manager runs beside an "
        "NVSwitch (a container cannot see it)"
    ),
    severity="WARN",
    remedy="`sudo systemctl start nvidia-fabricmanager`",
    action=Action.RESTART_FABRICMANAGER,
    gpu=True,
    group="procs",
)
def fabric_manager(view: View) -> Iterator[Outcome]:
    """Something runs the fabric of an NVSwitch: what GPUs say of it counts, the process only explains it."""
    driver, running = view.group("driver"), view.group().data.get("fabric_manager")
    infos = [info for device in gpus.used_gpus(view) if (info := gpus.value(device, "fabric")) and info["state"]]
    if infos and not any(map(describe_problem, infos)):
        yield ok("the fabric is complete")
    elif running:
        yield ok("fabric manager is running")
    elif not infos and driver.status != "ok":
        yield unknown(f"could not look for an NVSwitch: {driver.reason or driver.status}")
    elif not infos and not driver.data.get("nvswitches"):
        yield skip("no NVSwitch")
    elif view.group().data.get("own_namespace"):
        yield skip("this container does not show the machine's processes")
    else:
        yield warn("there is an NVSwitch, and no fabric manager runs")


@node_check(
    name="gpu.imex",
    family=_FAMILY,
    source="NVML fabric cluster of each GPU, /dev/nvidia-caps-imex-channels",
    threshold="a channel that this user may open, where the NVLinks of GPUs reach other nodes of the run",
    severity="WARN",
    remedy=(
        "Start nvidia-imex on all nodes of the NVLink domain and make a channel "
        "(`sudo nvidia-modprobe -c 0`); NCCL else goes over the network (or set `NCCL_MNNVL_ENABLE: 0`)"
    ),
    action=Action.FIX_CONFIG,
    gpu=True,
    group="driver",
)
def imex(view: View) -> Iterator[Outcome]:
    """GPUs whose NVLinks reach other nodes (GB200 NVL72) can share memory with them."""
    clusters = {info.get("cluster") for device in gpus.used_gpus(view) if (info := gpus.value(device, "fabric"))}
    channels = view.group().data.get("imex") or []
    if not any(clusters):
        yield skip("the fabric ends with this machine")
    elif not view.context.multi_node:
        yield skip("only one node")
    elif any(channel["readable"] for channel in channels):
        yield ok(f"{len(channels)} IMEX channels")
    else:
        why = "none that this user may open" if channels else "none there"
        yield warn(f"no IMEX channel to reach the GPUs of other nodes: {why}", value=channels)


CHECKS = (fabric, fabric_manager, imex)
