"""Which GPUs there are, which of them are ours, and why we do not have the others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from clusterctl.health import answers, gpus
from clusterctl.health.check import node_check
from clusterctl.health.model import Action, Outcome, failed, passed, skipped, unknown, warned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.health.check import View

_3D_CONTROLLER = "0x0302"
"""The PCI class of GPUs without a display: nobody leaves one without a driver on purpose."""


class Why(Enum):
    """Why NVML does not show a GPU that is on the PCI bus."""

    FAULT = "not shown"
    KEPT = "not given to us"
    DENIED = "closed to this user"
    UNBOUND = "without the NVIDIA driver"


@dataclass(frozen=True, slots=True)
class _Unshown:
    address: str
    why: Why
    words: str


_REMEDIES: dict[Why, tuple[Action, str]] = {
    Why.FAULT: (
        Action.REBOOT_NODE,
        "Look for the missing GPU's PCI address in the kernel log, then reboot; if it stays away it is the hardware",
    ),
    Why.DENIED: (
        Action.FIX_CONFIG,
        "Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    ),
    Why.UNBOUND: (
        Action.FIX_CONFIG,
        "Give the card to the nvidia driver (`lspci -k` names what has it), or declare the GPUs that are left",
    ),
    Why.KEPT: (
        Action.FIX_CONFIG,
        "Ask the scheduler or the container for more GPUs, or declare those that are given (`gpus: N`)",
    ),
}
"""What to do about each, the gravest first."""


def _unshown(view: View) -> list[_Unshown]:
    group = view.group("unshown")
    if group.status == "timeout":
        return [_Unshown("a GPU", Why.FAULT, "opening its device node hangs")]
    return [_described(entry) for entry in group.data.get("gpus") or []]


def _described(entry: dict[str, Any]) -> _Unshown:
    """Tell why a GPU is not shown: by its driver, and by how opening its device node ended."""
    address, driver, node = entry["address"], entry.get("driver"), entry.get("node")
    if driver != "nvidia":
        odd = driver is None and entry.get("class") == _3D_CONTROLLER
        words = f"bound to {driver}" if driver else "no driver has taken it"
        return _Unshown(address, Why.FAULT if odd else Why.UNBOUND, words)
    match node:
        case None | "absent":
            return _Unshown(address, Why.KEPT, "no device node here")
        case "EPERM":
            return _Unshown(address, Why.KEPT, "kept away by the device cgroup")
        case "EACCES":
            return _Unshown(address, Why.DENIED, "its device node is closed to this user")
        case "ok":
            return _Unshown(address, Why.FAULT, "NVML leaves it out")
        case _:
            return _Unshown(address, Why.FAULT, f"opening it ends with {node}")


def _told(entries: Sequence[_Unshown]) -> str:
    """Name GPUs by address, those with one reason together."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        by_reason.setdefault((entry.why.value, entry.words), []).append(entry.address)
    parts = [f"{why}: {', '.join(addresses)} ({words})" for (why, words), addresses in by_reason.items()]
    return "".join(f"; {part}" for part in parts)


@node_check(
    name="gpu.count",
    family="GPU driver",
    source="NVML device count; GPUs on the PCI bus, what driver has each, and whether its device node opens",
    threshold=(
        "as many as declared, and no GPU that the driver has taken and NVML does not show; what a scheduler or a "
        "container keeps from us, and what another driver has, is only said"
    ),
    severity="FAIL",
    remedy=_REMEDIES[Why.FAULT][1],
    action=Action.REBOOT_NODE,
    gpu=True,
    group="nvml",
)
def count(view: View) -> Iterator[Outcome]:
    """Every declared GPU is there. A GPU that the PCI bus has and NVML has not is named by its address, and why."""
    nvml, declared = view.group("nvml").data, view.expected.gpus
    if nvml.get("init_error") is not None:
        seen = len(view.group("smi").data.get("devices") or [])
        yield unknown(f"NVML could not be used: {answers.nvml_name(nvml['init_error'])}; nvidia-smi shows {seen}")
        return
    if nvml.get("count") is None:
        yield unknown(f"NVML did not count: {answers.nvml_name(nvml.get('count_error') or 999)}")
        return
    seen = int(nvml["count"])
    needed = max(declared, default=-1) + 1 if isinstance(declared, tuple) else declared
    entries = _unshown(view)
    faults = [entry for entry in entries if entry.why is Why.FAULT]
    if needed is not None and seen < needed:
        action, hint = _remedy(entries)
        message = f"{seen} of {needed} GPUs{_told(entries)}"
        yield failed(message, value=seen, expected=needed, action=action, hint=hint)
    elif faults:
        say = failed if needed is None else warned
        whole = seen + len(faults)
        yield say(f"{seen} GPUs, {whole} on the PCI bus{_told(faults)}", value=seen, expected=whole)
    elif seen == 0 and needed is None:
        yield skipped(f"no GPU here and none declared{_told(entries)}")
    else:
        yield passed(f"{seen} GPUs{_told(entries)}", value=seen, expected=needed)


def _remedy(entries: Sequence[_Unshown]) -> tuple[Action, str]:
    """Return what to do about GPUs that are declared and not there."""
    reasons = {entry.why for entry in entries}
    return next((remedy for why, remedy in _REMEDIES.items() if why in reasons), _REMEDIES[Why.FAULT])


_UVM = "/dev/nvidia-uvm"


@node_check(
    name="gpu.device_access",
    family="GPU driver",
    source="/dev/nvidiactl, /dev/nvidia-uvm and the device node of each GPU that the run uses; access for the user",
    threshold=(
        "there, readable and writable; /dev/nvidia-uvm may be missing where nvidia-modprobe makes it at the first use "
        "(bare machines after a boot), not in containers, which have no such helper"
    ),
    severity="FAIL",
    remedy="Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    action=Action.FIX_CONFIG,
    gpu=True,
    group="driver",
)
def device_access(view: View) -> Iterator[Outcome]:
    """The user may open the device nodes that CUDA needs; those of other GPUs are nobody's business."""
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
        yield failed(f"no access to {', '.join(shut)}", value=shut)
    elif absent:
        yield failed(f"{', '.join(absent)} missing", value=absent)
    elif uvm not in (None, "ok", "absent"):
        yield failed(f"opening {_UVM} ends with {uvm}: CUDA cannot start", value=uvm)
    elif _UVM not in nodes and not driver.get("helper"):
        yield failed(
            f"{_UVM} is missing: CUDA ends with `unknown error` (999)",
            value=[_UVM],
            hint="`sudo nvidia-modprobe -u -c=0` makes it; a container has to be given it",
        )
    elif _UVM not in nodes:
        yield passed(f"{len(wanted)} device nodes are accessible; CUDA makes {_UVM} at its first use")
    else:
        yield passed(f"{len(wanted) + 1} device nodes are accessible")


def _wanted(view: View, nodes: dict[str, bool]) -> list[str]:
    """Return the nodes that the run needs, apart from that of unified memory."""
    minors = [minor for device in gpus.devices(view) if (minor := gpus.value(device, "minor")) is not None]
    if not minors:
        return [path for path in nodes if path != _UVM]
    return ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors)]


CHECKS = (count, device_access)
