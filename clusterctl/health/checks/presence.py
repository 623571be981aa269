"""Which GPUs there are, which of them are ours, and why we do not have the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import driver_errors
from clusterctl.health.check import node_check
from clusterctl.health.checks import amd_presence, gpus
from clusterctl.health.checks.hidden_gpus import ASK, LOOK, HiddenGpu, Why, judge_count
from clusterctl.health.model import Action, Outcome, fail, ok, unknown
from clusterctl.health.vendors import AMD, JUDGED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.health.check import View

_3D_CONTROLLER = "0x0302"
"""The PCI class of GPUs without a display: nobody leaves one without a driver on purpose."""

_REMEDIES: dict[Why, tuple[Action, str]] = {
    Why.FAULT: (Action.REBOOT_NODE, LOOK),
    Why.DENIED: (
        Action.FIX_CONFIG,
        "Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    ),
    Why.UNBOUND: (
        Action.FIX_CONFIG,
        "Give the card to the nvidia driver (`lspci -k` names what has it), or declare the GPUs that are left",
    ),
    Why.KEPT: (Action.FIX_CONFIG, ASK),
}
"""What to do about each, the gravest first."""


def _unshown(view: View) -> list[HiddenGpu]:
    group = view.group("unshown")
    if group.status == "timeout":
        return [HiddenGpu("a GPU", Why.FAULT, "opening its device node hangs")]
    return [_described(entry) for entry in group.data.get("gpus") or []]


def _described(entry: dict[str, Any]) -> HiddenGpu:
    """Tell why a GPU is not shown: by its driver, and by how opening its device node ended."""
    address, driver, node = entry["address"], entry.get("driver"), entry.get("node")
    if driver != "nvidia":
        odd = driver is None and entry.get("class") == _3D_CONTROLLER
        words = f"bound to {driver}" if driver else "no driver has taken it"
        return HiddenGpu(address, Why.FAULT if odd else Why.UNBOUND, words)
    match node:
        case None | "absent":
            return HiddenGpu(address, Why.KEPT, "no device node here")
        case "EPERM":
            return HiddenGpu(address, Why.KEPT, "kept away by the device cgroup")
        case "EACCES":
            return HiddenGpu(address, Why.DENIED, "its device node is closed to this user")
        case "ok":
            return HiddenGpu(address, Why.FAULT, "NVML leaves it out")
        case _:
            return HiddenGpu(address, Why.FAULT, f"opening it ends with {node}")


@node_check(
    name="gpu.count",
    family="GPU driver",
    source=(
        "NVML device count, or nodes of KFD's topology; GPUs on the PCI bus, what driver has each, and whether its "
        "device node opens"
    ),
    threshold=(
        "as many as declared, and no GPU that the driver has taken and NVML or KFD does not show; what a scheduler or "
        "a container keeps from us, and what another driver has, is only said"
    ),
    severity="FAIL",
    remedy=LOOK,
    action=Action.REBOOT_NODE,
    gpu=True,
    vendors=JUDGED,
    by_vendor={AMD: amd_presence.count},
)
def count(view: View) -> Iterator[Outcome]:
    """Every declared GPU is there. A GPU that the PCI bus has and its driver has not is named by address, and why."""
    group = view.group("nvml")
    nvml = group.data
    if group.status != "ok":
        yield unknown(f"could not look: {group.reason or group.status}")
    elif nvml.get("init_error") is not None:
        seen = len(view.group("smi").data.get("devices") or [])
        yield unknown(f"NVML could not be used: {driver_errors.nvml_name(nvml['init_error'])}; nvidia-smi shows {seen}")
    elif nvml.get("count") is None:
        yield unknown(f"NVML did not count: {driver_errors.nvml_name(nvml.get('count_error') or 999)}")
    else:
        yield from judge_count(view, int(nvml["count"]), _unshown(view), _REMEDIES)


_UVM = "/dev/nvidia-uvm"


@node_check(
    name="gpu.device_access",
    family="GPU driver",
    source=(
        "/dev/nvidiactl, /dev/nvidia-uvm and the device node of each GPU that the run uses, or /dev/kfd and "
        "/dev/dri/renderD* of AMD's; access for the user"
    ),
    threshold=(
        "there, readable and writable; /dev/nvidia-uvm may be missing where nvidia-modprobe makes it at the first use "
        "(bare machines after a boot), not in containers, which have no such helper"
    ),
    severity="FAIL",
    remedy="Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    action=Action.FIX_CONFIG,
    gpu=True,
    vendors=JUDGED,
    by_vendor={AMD: amd_presence.device_access},
    group="driver",
)
def device_access(view: View) -> Iterator[Outcome]:
    """The user may open the device nodes that CUDA or ROCm need; those of other GPUs are nobody's business."""
    driver = view.group().data
    nodes = {node["path"]: bool(node["readable"]) for node in driver.get("dev") or []}
    if not nodes:
        yield unknown("there are no /dev/nvidia* nodes to look at")
        return
    wanted = _wanted(view, nodes)
    shut = [path for path in wanted if not nodes.get(path, True)]
    absent = [path for path in wanted if path not in nodes]
    uvm = view.group("nvml").data.get("uvm")
    if shut:
        yield fail(f"no access to {', '.join(shut)}", value=shut)
    elif absent:
        yield fail(f"{', '.join(absent)} missing", value=absent)
    elif uvm not in (None, "ok", "absent"):
        yield fail(f"opening {_UVM} ends with {uvm}: CUDA cannot start", value=uvm)
    elif _UVM not in nodes and not driver.get("helper"):
        yield fail(
            f"{_UVM} is missing: CUDA ends with `unknown error` (999)",
            value=[_UVM],
            hint="`sudo nvidia-modprobe -u -c=0` makes it; a container has to be given it",
        )
    elif _UVM not in nodes:
        yield ok(f"{len(wanted)} device nodes are accessible; CUDA makes {_UVM} at its first use")
    else:
        yield ok(f"{len(wanted) + 1} device nodes are accessible")


def _wanted(view: View, nodes: dict[str, bool]) -> list[str]:
    """Return the nodes that the run needs, apart from that of unified memory."""
    minors = [minor for device in gpus.used_gpus(view) if (minor := gpus.value(device, "minor")) is not None]
    if not minors:
        return [path for path in nodes if path != _UVM]
    return ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors)]


CHECKS = (count, device_access)
