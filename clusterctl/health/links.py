"""What joins GPUs to the host and to each other: PCIe, NVLink, the fabric of an NVSwitch, peer access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import compare, gpus
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.model import Action, Outcome, failed, passed, skipped, unknown, warned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FAMILY = "PCIe, NVLink, fabric"
_RESEAT = "Reseat or replace the card or riser; the kernel log may say `limited by`"
_FABRIC_COMPLETED = 3
_FABRIC_UNSUPPORTED = 0
_FABRIC_UNHEALTHY = (2, 3)


def _mode(view: View, field: str, read: Any = lambda value: value) -> Any:
    """Return what more than half of the node's GPUs say, or `None`."""
    values = {str(d["index"]): read(d["v"][field]) for d in gpus.devices(view) if field in d.get("v", {})}
    return compare.vote(values).majority


@node_check(
    name="gpu.pcie_width",
    family=_FAMILY,
    source="NVML current and maximum PCIe link width (width does not drop at idle, generation does)",
    threshold=(
        "as `health.expect.pcie_width`, else as most GPUs of the node; WARN where all are below "
        "their maximum (the slot's design)"
    ),
    severity="FAIL",
    remedy=_RESEAT,
    action=Action.CHECK_LINK,
    gpu=True,
)
def pcie_width(view: View) -> Iterable[Outcome]:
    """Every GPU has all its PCIe lanes. The generation is not judged: it falls at idle on a healthy card."""
    wanted, mode = view.context.expect.get("pcie_width"), _mode(view, "pcie_width")

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        most = device["v"].get("pcie_width_max")
        needed = wanted or mode or most
        if needed and value < needed:
            return failed(
                f"{gpus.label(device)}: {value} PCIe lanes of {needed}",
                gpu=device["index"],
                value=value,
                expected=needed,
            )
        if most and value < most and not wanted:
            return warned(
                f"{gpus.label(device)}: {value} PCIe lanes of {most}", gpu=device["index"], value=value, expected=most
            )
        return None

    return gpus.each(view, "pcie_width", judge, "all PCIe lanes on {n} GPUs")


@node_check(
    name="gpu.nvlink",
    family=_FAMILY,
    source="NVML state of every NVLink",
    threshold=(
        "as many active as `health.expect.nvlinks`, else as on most GPUs of the node; none active of some is FAIL"
    ),
    severity="FAIL",
    remedy="Reset the GPUs of the node; if the link stays down, reseat the module or have it replaced",
    action=Action.CHECK_LINK,
    gpu=True,
)
def nvlink(view: View) -> Iterable[Outcome]:
    """Every GPU has as many NVLinks up as its like: some models leave a part of them unused by design."""
    wanted, mode = view.context.expect.get("nvlinks"), _mode(view, "nvlinks", sum)

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        active = sum(value)
        needed = wanted if wanted is not None else mode
        if (needed is not None and active < needed) or (active == 0 and len(gpus.devices(view)) > 1):
            down = [link for link, state in enumerate(value) if not state]
            message = f"{gpus.label(device)}: {active} of {needed or len(value)} NVLinks active"
            return failed(
                message, gpu=device["index"], value={"active": active, "down": down}, expected=needed or len(value)
            )
        return None

    return gpus.each(view, "nvlinks", judge, "NVLinks alike on {n} GPUs")


@node_check(
    name="gpu.fabric",
    family=_FAMILY,
    source="NVML nvmlDeviceGetGpuFabricInfoV (driver 550 and later): state, status, health",
    threshold="state completed, status success, health not bad; SKIP where the GPU has no fabric",
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
    states = [d["v"]["fabric"]["state"] for d in gpus.devices(view) if "fabric" in d.get("v", {})]
    if states and all(state == _FABRIC_UNSUPPORTED for state in states):
        return [skipped("these GPUs have no fabric")]

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value["state"] == _FABRIC_UNSUPPORTED:
            return None
        index = device["index"]
        if value["state"] != _FABRIC_COMPLETED:
            return failed(f"{gpus.label(device)}: not registered with the fabric", gpu=index, value=value)
        if value["status"] != 0:
            why = gpus.error_name(value["status"])
            return failed(f"{gpus.label(device)}: fabric registration failed: {why}", gpu=index, value=value)
        if value["health"] in _FABRIC_UNHEALTHY:
            bad = value["health"] == _FABRIC_UNHEALTHY[0]
            say = failed if bad else warned
            return say(
                f"{gpus.label(device)}: fabric is {'unhealthy' if bad else 'of limited capacity'}",
                gpu=index,
                value=value,
            )
        return None

    return gpus.each(view, "fabric", judge, "fabric complete on {n} GPUs")


@node_check(
    name="gpu.fabric_manager",
    family=_FAMILY,
    source="process list, PCI bridges of vendor 10de",
    threshold="running where there is an NVSwitch",
    severity="WARN",
    remedy="`sudo systemctl start nvidia-fabricmanager`",
    action=Action.RESTART_FABRICMANAGER,
    gpu=True,
    group="procs",
)
def fabric_manager(view: View) -> Iterator[Outcome]:
    """The fabric manager runs where there is an NVSwitch."""
    driver = view.group("driver")
    if driver.status != "ok":
        yield unknown(f"could not look for an NVSwitch: {driver.reason or driver.status}")
    elif not driver.data.get("nvswitches"):
        yield skipped("no NVSwitch")
    elif view.group().data.get("fabric_manager"):
        yield passed("fabric manager is running")
    else:
        yield warned(f"{driver.data['nvswitches']} NVSwitches and no fabric manager")


@node_check(
    name="gpu.p2p",
    family=_FAMILY,
    source="NVML nvmlDeviceGetP2PStatus for every pair (NVLink, read)",
    threshold="every pair as most pairs of the node",
    severity="FAIL",
    remedy="Reset the GPUs or reboot the node; check that the fabric manager and its version are right",
    action=Action.RESET_GPU,
    gpu=True,
)
def p2p(view: View) -> Iterator[Outcome]:
    """GPUs reach each other directly. A dead pair costs a factor of ten and nothing else tells of it."""
    blocked = gpus.nvml_gate(view)
    if blocked is not None:
        yield blocked
        return
    mine = {d["index"] for d in gpus.devices(view)}
    pairs = {
        f"{i}-{j}": [nvlink, read] for i, j, nvlink, read in view.group("nvml").data.get("p2p") or [] if {i, j} <= mine
    }
    known = {pair: status for pair, status in pairs.items() if status != [None, None]}
    if len(mine) < 2:
        yield skipped("fewer than two GPUs")
    elif not known:
        yield unknown("no pair of GPUs tells whether it is connected")
    else:
        yield from _odd_pairs(known)


def _odd_pairs(pairs: dict[str, list[int | None]]) -> Iterator[Outcome]:
    usable = {pair: any(status == 0 for status in statuses) for pair, statuses in pairs.items()}
    over_nvlink = {pair: statuses[0] == 0 for pair, statuses in pairs.items()}
    for name, states in (("peer access", usable), ("NVLink", over_nvlink)):
        broken = [pair for pair, good in states.items() if not good]
        if broken and len(broken) * 2 < len(states):
            yield failed(f"no {name} between GPUs {', '.join(broken[:8])}", value=broken)
            return
    if not any(usable.values()):
        yield warned("no pair of GPUs has direct access", value=sorted(pairs))
        return
    yield passed(f"{len(pairs)} pairs of GPUs are alike")


@cluster_check(
    name="gpu.pcie_outlier",
    family=_FAMILY,
    source="NVML current PCIe link width of all GPUs of one model",
    threshold="the same everywhere",
    severity="FAIL",
    remedy=_RESEAT,
    action=Action.CHECK_LINK,
    gpu=True,
)
def pcie_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU has fewer PCIe lanes than its like on other nodes."""
    return compare.gpu_categories(view, "pcie_width", "PCIe lanes", say=failed)


@cluster_check(
    name="gpu.nvlink_outlier",
    family=_FAMILY,
    source="NVML active NVLinks of all GPUs of one model",
    threshold="the same everywhere",
    severity="FAIL",
    remedy="Reset the GPUs of the node; if the links stay down, have the module looked at",
    action=Action.CHECK_LINK,
    gpu=True,
)
def nvlink_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU has fewer NVLinks up than its like on other nodes."""
    return compare.gpu_categories(view, "nvlinks", "active NVLinks", say=failed, read=sum)


CHECKS = (pcie_width, nvlink, fabric, fabric_manager, p2p, pcie_outlier, nvlink_outlier)
