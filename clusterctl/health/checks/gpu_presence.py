"""Checks of the number of GPUs of a node, the reasons for hidden GPUs, and access to device files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import AMD, JUDGED, Action, Outcome, fail, ok, skip, unknown, warn
from clusterctl.health.gpu_library_errors import describe_nvml_error


class HiddenReason(Enum):
    """Why the driver does not show a GPU that is on the PCI bus."""

    FAULT = "not shown by the driver"
    WITHHELD = "withheld by a scheduler or container"
    DENIED = "closed to this user"
    UNBOUND = "without its vendor's driver"


@dataclass(frozen=True, slots=True)
class HiddenGpu:
    """A GPU on the PCI bus that the driver does not show.

    Attributes:
        address: PCI address.
        reason: Kind of the reason.
        description: The reason in words.
    """

    address: str
    reason: HiddenReason
    description: str


FAULT_HINT = (
    "Search the kernel log for the PCI address of the missing GPU; reboot; if this does not help, replace the GPU"
)
WITHHELD_HINT = "Ask the scheduler or the container for more GPUs, or declare only the given GPUs (`gpus: N`)"


def judge_gpu_count(
    node: CheckedNode, visible: int, hidden: Sequence[HiddenGpu], remedies: Mapping[HiddenReason, tuple[Action, str]]
) -> Iterator[Outcome]:
    """Judge whether the driver shows all declared GPUs, or all GPUs of the node if none are declared.

    Args:
        node: The node.
        visible: Number of GPUs that the driver shows.
        hidden: GPUs that the driver does not show.
        remedies: Action and hint of each reason, the worst reason first.
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
        yield skip(f"no GPU on this node, and none declared{_describe_hidden(hidden)}")
    else:
        yield ok(f"{visible} GPUs{_describe_hidden(hidden)}", value=visible, expected=needed)


def _describe_hidden(hidden: Sequence[HiddenGpu]) -> str:
    """Return the addresses of hidden GPUs, grouped by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in hidden:
        by_reason.setdefault((entry.reason.value, entry.description), []).append(entry.address)
    parts = [f"{why}: {', '.join(addresses)} ({words})" for (why, words), addresses in by_reason.items()]
    return "".join(f"; {part}" for part in parts)


# --- AMD: the driver, the number of GPUs, and access to their device files

_INSTALL = "Install or load the amdgpu driver (`rocminfo` must work as the same user)"
_AMD_REMEDIES: dict[HiddenReason, tuple[Action, str]] = {
    HiddenReason.FAULT: (Action.REBOOT_NODE, FAULT_HINT),
    HiddenReason.UNBOUND: (
        Action.FIX_CONFIG,
        "Bind the card to the amdgpu driver (`lspci -k` shows the present driver), or declare only the other GPUs",
    ),
    HiddenReason.WITHHELD: (Action.FIX_CONFIG, WITHHELD_HINT),
}


def judge_amd_driver(node: CheckedNode) -> Iterator[Outcome]:
    """Judge whether the amdgpu driver is loaded and can compute."""
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
        what = "amdgpu is loaded, but cannot compute: there is no /sys/class/kfd" if loaded else "amdgpu is not loaded"
        yield say(what, hint=_INSTALL)


def judge_amd_count(node: CheckedNode) -> Iterator[Outcome]:
    """Judge whether AMD's compute driver (KFD) shows enough GPUs."""
    group = node.group("amdgpu")
    if group.status != "ok":
        yield unknown(f"not checked: {group.reason or group.status}")
        return
    yield from judge_gpu_count(node, int(group.facts.get("count") or 0), _list_hidden_amd(node), _AMD_REMEDIES)


def _list_hidden_amd(node: CheckedNode) -> list[HiddenGpu]:
    """Return the cards that AMD's compute driver (KFD) does not show."""
    shown = {gpu_facts.read_value(device, "pci") for device in gpu_facts.list_gpus(node)}
    absent = [
        card for card in gpu_facts.list_compute_cards(node) if card["vendor"] == AMD and card["address"] not in shown
    ]
    taken = [card["address"] for card in absent if card.get("driver") == "amdgpu"]
    kept = len(taken) <= int(node.group("amdgpu").facts.get("hidden") or 0)
    why, words = (
        (HiddenReason.WITHHELD, "the device cgroup denies access")
        if kept
        else (HiddenReason.FAULT, "KFD does not list it")
    )
    unshown = [HiddenGpu(address, why, words) for address in taken]
    for card in absent:
        if card.get("driver") is None:
            unshown.append(HiddenGpu(card["address"], HiddenReason.FAULT, "no driver is bound to it"))
        elif card["address"] not in taken:
            unshown.append(HiddenGpu(card["address"], HiddenReason.UNBOUND, f"bound to {card['driver']}"))
    return unshown


def judge_amd_device_access(node: CheckedNode) -> Iterator[Outcome]:
    """Judge whether the user may open the device files that HIP needs: /dev/kfd and the render node of each GPU."""
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
        yield unknown("access to device files was not reported")
    elif shut:
        user = node.group("host").facts.get("user") or "USER"
        hint = f"`sudo usermod -aG render,video {user}` and a new login; a container needs `--group-add render`"
        yield fail(f"no access to {', '.join(shut)}", value=shut, hint=hint)
    elif absent:
        hint = "In a container: start it with `--device /dev/kfd --device /dev/dri`; otherwise reload the amdgpu driver"
        yield fail(f"{', '.join(absent)} missing", value=absent, hint=hint)
    else:
        yield ok(f"{len(wanted)} device files are accessible")


# --- NVIDIA: the number of GPUs, and access to their device files

_3D_CONTROLLER = "0x0302"
"""The PCI class of GPUs without a display. Such a GPU without a driver is a fault."""

_REMEDIES: dict[HiddenReason, tuple[Action, str]] = {
    HiddenReason.FAULT: (Action.REBOOT_NODE, FAULT_HINT),
    HiddenReason.DENIED: (
        Action.FIX_CONFIG,
        "Allow the user to open the device files (group `video`, or `NVreg_DeviceFileMode` of the driver)",
    ),
    HiddenReason.UNBOUND: (
        Action.FIX_CONFIG,
        "Bind the card to the nvidia driver (`lspci -k` shows the present driver), or declare only the other GPUs",
    ),
    HiddenReason.WITHHELD: (Action.FIX_CONFIG, WITHHELD_HINT),
}
"""Action and hint of each reason, the worst reason first."""


def _list_hidden(node: CheckedNode) -> list[HiddenGpu]:
    group = node.group("hidden_gpus")
    if group.status == "timeout":
        return [HiddenGpu("a GPU", HiddenReason.FAULT, "opening its device file hangs")]
    return [_explain_hidden_gpu(entry) for entry in group.facts.get("gpus") or []]


def _explain_hidden_gpu(entry: dict[str, Any]) -> HiddenGpu:
    """Return a hidden GPU with the reason: its driver, or the error of opening its device file."""
    address, driver, node = entry["address"], entry.get("driver"), entry.get("node")
    if driver != "nvidia":
        odd = driver is None and entry.get("class") == _3D_CONTROLLER
        words = f"bound to {driver}" if driver else "no driver is bound to it"
        return HiddenGpu(address, HiddenReason.FAULT if odd else HiddenReason.UNBOUND, words)
    match node:
        case None | "absent":
            return HiddenGpu(address, HiddenReason.WITHHELD, "it has no device file")
        case "EPERM":
            return HiddenGpu(address, HiddenReason.WITHHELD, "the device cgroup denies access")
        case "EACCES":
            return HiddenGpu(address, HiddenReason.DENIED, "this user may not open its device file")
        case "ok":
            return HiddenGpu(address, HiddenReason.FAULT, "NVML does not list it")
        case _:
            return HiddenGpu(address, HiddenReason.FAULT, f"opening it fails with {node}")


@remedy(Action.REBOOT_NODE, FAULT_HINT)
@node_check("gpu.count", "GPU driver", gpu=True, vendors=JUDGED, judges_by_vendor={AMD: judge_amd_count})
def check_gpu_count(node: CheckedNode) -> Iterator[Outcome]:
    """Every declared GPU is available.

    If a GPU is on the PCI bus but its driver does not show it, the finding has its address and the reason.

    Source: NVML device count, or nodes of KFD's topology; for each GPU on the PCI bus, its driver, and whether its
        device file can be opened
    Healthy: as many GPUs as declared, and NVML or KFD shows every GPU of its driver. GPUs that a scheduler, a container
        or another driver holds are mentioned only
    """
    group = node.group("nvml")
    nvml = group.facts
    if group.status != "ok":
        yield unknown(f"not checked: {group.reason or group.status}")
    elif nvml.get("init_error") is not None:
        visible = len(node.group("smi").facts.get("devices") or [])
        reason = describe_nvml_error(nvml["init_error"])
        yield unknown(f"NVML could not be used: {reason}; nvidia-smi shows {visible} GPUs")
    elif nvml.get("count") is None:
        yield unknown(f"NVML could not count the GPUs: {describe_nvml_error(nvml.get('count_error') or 999)}")
    else:
        yield from judge_gpu_count(node, int(nvml["count"]), _list_hidden(node), _REMEDIES)


_UVM = "/dev/nvidia-uvm"


@remedy(
    Action.FIX_CONFIG,
    "Allow the user to open the device files (group `video`, or `NVreg_DeviceFileMode` of the driver)",
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
    """The user may open the device files that CUDA or ROCm need.

    Device files of GPUs outside the run are ignored.

    Source: access of the user to /dev/nvidiactl, /dev/nvidia-uvm and the device file of each GPU of the run; of AMD to
        /dev/kfd and /dev/dri/renderD*
    Healthy: the device files exist, readable and writable. /dev/nvidia-uvm may be missing if nvidia-modprobe creates it
        at the first use (machines after a boot). Containers do not have nvidia-modprobe
    """
    driver = node.group().facts
    nodes = {file["path"]: bool(file["readable"]) for file in driver.get("dev") or []}
    if not nodes:
        yield unknown("there are no /dev/nvidia* device files")
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
        yield fail(f"opening {_UVM} fails with {uvm}: CUDA cannot start", value=uvm)
    elif _UVM not in nodes and not driver.get("helper"):
        yield fail(
            f"{_UVM} is missing: CUDA fails with `unknown error` (999)",
            value=[_UVM],
            hint="create it with `sudo nvidia-modprobe -u -c=0`; a container must be started with it",
        )
    elif _UVM not in nodes:
        yield ok(f"{len(wanted)} device files are accessible; CUDA creates {_UVM} at its first use")
    else:
        yield ok(f"{len(wanted) + 1} device files are accessible")


def _list_needed_nodes(node: CheckedNode, nodes: dict[str, bool]) -> list[str]:
    """Return the device files that the run needs, except /dev/nvidia-uvm."""
    minors = [
        minor
        for device in gpu_facts.list_used_gpus(node)
        if (minor := gpu_facts.read_value(device, "minor")) is not None
    ]
    if not minors:
        return [path for path in nodes if path != _UVM]
    return ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors)]
