"""GPUs of a node: their number, the reasons for hidden ones, and access to their device files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterctl.health import gpu_errors
from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import AMD, JUDGED, Action, Outcome, fail, ok, skip, unknown, warn


class HiddenReason(Enum):
    """HiddenReason a GPU that is on the PCI bus is not shown."""

    FAULT = "not shown"
    WITHHELD = "not given to us"
    DENIED = "closed to this user"
    UNBOUND = "without its vendor's driver"


@dataclass(frozen=True, slots=True)
class HiddenGpu:
    """A GPU that is not shown, by its PCI address."""

    address: str
    reason: HiddenReason
    description: str


FAULT_HINT = (
    "Look for the missing GPU's PCI address in the kernel log, then reboot; if it stays away it is the hardware"
)
WITHHELD_HINT = "Ask the scheduler or the container for more GPUs, or declare those that are given (`gpus: N`)"


def judge_gpu_count(
    node: CheckedNode, visible: int, hidden: Sequence[HiddenGpu], remedies: Mapping[HiddenReason, tuple[Action, str]]
) -> Iterator[Outcome]:
    """Judge whether the node shows as many GPUs as the cluster file declares, or as it has.

    Args:
        node: The node.
        visible: How many its driver shows.
        hidden: Those that it does not.
        remedies: What to do about each reason, the gravest first.
    """
    declared = node.declaration.gpus
    needed = max(declared, default=-1) + 1 if isinstance(declared, tuple) else declared
    faults = [entry for entry in hidden if entry.reason is HiddenReason.FAULT]
    if needed is not None and visible < needed:
        reasons = {entry.reason for entry in hidden}
        action, hint = next(
            (remedy for why, remedy in remedies.items() if why in reasons), remedies[HiddenReason.FAULT]
        )
        message = f"{visible} of {needed} GPUs{_describe_hidden(hidden)}"
        yield fail(message, value=visible, expected=needed, action=action, hint=hint)
    elif faults:
        say = fail if needed is None else warn
        whole = visible + len(faults)
        yield say(f"{visible} GPUs, {whole} on the PCI bus{_describe_hidden(faults)}", value=visible, expected=whole)
    elif visible == 0 and needed is None:
        yield skip(f"no GPU here and none declared{_describe_hidden(hidden)}")
    else:
        yield ok(f"{visible} GPUs{_describe_hidden(hidden)}", value=visible, expected=needed)


def _describe_hidden(hidden: Sequence[HiddenGpu]) -> str:
    """Return the addresses of hidden GPUs, grouped by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in hidden:
        by_reason.setdefault((entry.reason.value, entry.description), []).append(entry.address)
    parts = [f"{why}: {', '.join(addresses)} ({words})" for (why, words), addresses in by_reason.items()]
    return "".join(f"; {part}" for part in parts)


# --- AMD's driver, which of its GPUs there are, and whether the user may open them.

_INSTALL = "Install or load the amdgpu driver (`rocminfo` must work as the same user)"
_AMD_REMEDIES: dict[HiddenReason, tuple[Action, str]] = {
    HiddenReason.FAULT: (Action.REBOOT_NODE, FAULT_HINT),
    HiddenReason.UNBOUND: (
        Action.FIX_CONFIG,
        "Give the card to the amdgpu driver (`lspci -k` names what has it), or declare the GPUs that are left",
    ),
    HiddenReason.WITHHELD: (Action.FIX_CONFIG, WITHHELD_HINT),
}


def judge_amd_driver(node: CheckedNode) -> Iterator[Outcome]:
    """Judge whether the amdgpu driver is there and computes."""
    group = node.group("amdgpu")
    if group.status == "timeout":
        yield unknown("the amdgpu driver hangs (see `gpu.responsive`)")
    elif group.status == "ok":
        version = group.facts.get("driver")
        yield ok(f"amdgpu {version}" if version else "amdgpu of the kernel", value=version)
    elif group.status != "absent":
        yield unknown(f"could not ask the amdgpu driver: {group.reason or group.status}")
    else:
        say = fail if node.declaration.gpu_count else warn
        loaded = "amdgpu" in (node.group("driver").facts.get("modules") or [])
        what = (
            "amdgpu is loaded, and computes nothing: there is no /sys/class/kfd" if loaded else "amdgpu is not loaded"
        )
        yield say(what, hint=_INSTALL)


def judge_amd_count(node: CheckedNode) -> Iterator[Outcome]:
    """Judge how many GPUs the compute driver shows."""
    group = node.group("amdgpu")
    if group.status != "ok":
        yield unknown(f"not checked: {group.reason or group.status}")
        return
    yield from judge_gpu_count(node, int(group.facts.get("count") or 0), _list_hidden_amd(node), _AMD_REMEDIES)


def _list_hidden_amd(node: CheckedNode) -> list[HiddenGpu]:
    """Return the cards that the compute driver does not show, with the reason."""
    shown = {gpu_facts.read_value(device, "pci") for device in gpu_facts.list_gpus(node)}
    absent = [
        card for card in gpu_facts.list_compute_cards(node) if card["vendor"] == AMD and card["address"] not in shown
    ]
    taken = [card["address"] for card in absent if card.get("driver") == "amdgpu"]
    kept = len(taken) <= int(node.group("amdgpu").facts.get("hidden") or 0)
    why, words = (
        (HiddenReason.WITHHELD, "kept away by the device cgroup") if kept else (HiddenReason.FAULT, "KFD leaves it out")
    )
    unshown = [HiddenGpu(address, why, words) for address in taken]
    for card in absent:
        if card.get("driver") is None:
            unshown.append(HiddenGpu(card["address"], HiddenReason.FAULT, "no driver has taken it"))
        elif card["address"] not in taken:
            unshown.append(HiddenGpu(card["address"], HiddenReason.UNBOUND, f"bound to {card['driver']}"))
    return unshown


def judge_amd_device_access(node: CheckedNode) -> Iterator[Outcome]:
    """Judge whether the user may open what HIP opens: the compute driver and the render node of each GPU of the run."""
    access = {file["path"]: file["access"] for file in node.group("amdgpu").facts.get("dev") or []}
    minors = [
        minor
        for device in gpu_facts.list_used_gpus(node)
        if (minor := gpu_facts.read_value(device, "minor")) is not None
    ]
    wanted = ["/dev/kfd", *(f"/dev/dri/renderD{minor}" for minor in minors)]
    shut = [path for path in wanted if access.get(path) == "denied"]
    absent = [path for path in wanted if access.get(path) == "absent"]
    if not access:
        yield unknown("device nodes were not looked at")
    elif shut:
        user = node.group("host").facts.get("user") or "USER"
        hint = f"`sudo usermod -aG render,video {user}` and a new login; a container needs `--group-add render`"
        yield fail(f"no access to {', '.join(shut)}", value=shut, hint=hint)
    elif absent:
        hint = "Give a container `--device /dev/kfd --device /dev/dri`; else load the amdgpu driver anew"
        yield fail(f"{', '.join(absent)} missing", value=absent, hint=hint)
    else:
        yield ok(f"{len(wanted)} device nodes are accessible")


# --- Which GPUs there are, which of them are ours, and why we do not have the others.

_3D_CONTROLLER = "0x0302"
"""The PCI class of GPUs without a display: nobody leaves one without a driver on purpose."""

_REMEDIES: dict[HiddenReason, tuple[Action, str]] = {
    HiddenReason.FAULT: (Action.REBOOT_NODE, FAULT_HINT),
    HiddenReason.DENIED: (
        Action.FIX_CONFIG,
        "Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    ),
    HiddenReason.UNBOUND: (
        Action.FIX_CONFIG,
        "Give the card to the nvidia driver (`lspci -k` names what has it), or declare the GPUs that are left",
    ),
    HiddenReason.WITHHELD: (Action.FIX_CONFIG, WITHHELD_HINT),
}
"""What to do about each, the gravest first."""


def _list_hidden(node: CheckedNode) -> list[HiddenGpu]:
    group = node.group("hidden_gpus")
    if group.status == "timeout":
        return [HiddenGpu("a GPU", HiddenReason.FAULT, "opening its device node hangs")]
    return [_explain_hidden_gpu(entry) for entry in group.facts.get("gpus") or []]


def _explain_hidden_gpu(entry: dict[str, Any]) -> HiddenGpu:
    """Return a hidden GPU with the reason, from its driver and from the result of opening its device node."""
    address, driver, node = entry["address"], entry.get("driver"), entry.get("node")
    if driver != "nvidia":
        odd = driver is None and entry.get("class") == _3D_CONTROLLER
        words = f"bound to {driver}" if driver else "no driver has taken it"
        return HiddenGpu(address, HiddenReason.FAULT if odd else HiddenReason.UNBOUND, words)
    match node:
        case None | "absent":
            return HiddenGpu(address, HiddenReason.WITHHELD, "no device node here")
        case "EPERM":
            return HiddenGpu(address, HiddenReason.WITHHELD, "kept away by the device cgroup")
        case "EACCES":
            return HiddenGpu(address, HiddenReason.DENIED, "its device node is closed to this user")
        case "ok":
            return HiddenGpu(address, HiddenReason.FAULT, "NVML leaves it out")
        case _:
            return HiddenGpu(address, HiddenReason.FAULT, f"opening it ends with {node}")


@remedy(Action.REBOOT_NODE, FAULT_HINT)
@node_check("gpu.count", "GPU driver", gpu=True, vendors=JUDGED, judges_by_vendor={AMD: judge_amd_count})
def check_gpu_count(node: CheckedNode) -> Iterator[Outcome]:
    """Every declared GPU is available.

    If a GPU is on the PCI bus but its driver does not show it, the finding has its address and the reason.

    Source: NVML device count, or nodes of KFD's topology; GPUs on the PCI bus, what driver has each, and whether its
        device node opens
    Healthy: as many GPUs as declared, and NVML or KFD shows every GPU that the driver has claimed. GPUs that a
        scheduler, a container or another driver holds are only mentioned
    """
    group = node.group("nvml")
    nvml = group.facts
    if group.status != "ok":
        yield unknown(f"not checked: {group.reason or group.status}")
    elif nvml.get("init_error") is not None:
        visible = len(node.group("smi").facts.get("devices") or [])
        reason = gpu_errors.describe_nvml_error(nvml["init_error"])
        yield unknown(f"NVML could not be used: {reason}; nvidia-smi shows {visible}")
    elif nvml.get("count") is None:
        yield unknown(f"NVML did not count: {gpu_errors.describe_nvml_error(nvml.get('count_error') or 999)}")
    else:
        yield from judge_gpu_count(node, int(nvml["count"]), _list_hidden(node), _REMEDIES)


_UVM = "/dev/nvidia-uvm"


@remedy(
    Action.FIX_CONFIG, "Let the user open the device nodes (group `video`, or `NVreg_DeviceFileMode` of the driver)"
)
@node_check(
    "gpu.device_access",
    "GPU driver",
    gpu=True,
    vendors=JUDGED,
    judges_by_vendor={AMD: judge_amd_device_access},
    group="driver",
)
def check_device_access(node: CheckedNode) -> Iterator[Outcome]:
    """The user may open the device nodes that CUDA or ROCm need.

    Device nodes of GPUs outside the run are ignored.

    Source: /dev/nvidiactl, /dev/nvidia-uvm and the device node of each GPU that the run uses, or /dev/kfd and
        /dev/dri/renderD* of AMD's; access for the user
    Healthy: the device nodes exist, readable and writable. /dev/nvidia-uvm may be missing if nvidia-modprobe creates it
        at the first use (bare machines after a boot), but not in containers, which have no such helper
    """
    driver = node.group().facts
    nodes = {file["path"]: bool(file["readable"]) for file in driver.get("dev") or []}
    if not nodes:
        yield unknown("there are no /dev/nvidia* nodes to look at")
        return
    wanted = _list_needed_nodes(node, nodes)
    shut = [path for path in wanted if not nodes.get(path, True)]
    absent = [path for path in wanted if path not in nodes]
    uvm = node.group("nvml").facts.get("uvm")
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


def _list_needed_nodes(node: CheckedNode, nodes: dict[str, bool]) -> list[str]:
    """Return the device nodes that the run needs, except the one of unified memory."""
    minors = [
        minor
        for device in gpu_facts.list_used_gpus(node)
        if (minor := gpu_facts.read_value(device, "minor")) is not None
    ]
    if not minors:
        return [path for path in nodes if path != _UVM]
    return ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors)]
