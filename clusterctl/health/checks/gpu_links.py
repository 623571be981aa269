"""Checks of the links of GPUs: PCIe, NVLink, peer-to-peer access, NVSwitch fabric, and SXids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from clusterctl.health.check import CheckedCluster, CheckedNode, cluster_check, node_check, remedy
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.checks.machine_kernel_log import (
    describe_covered_time,
    describe_occurrences,
    report_unreadable_log,
)
from clusterctl.health.findings import JUDGED, Action, Outcome, Status, fail, ok, skip, unknown, warn
from clusterctl.health.gpu_library_errors import describe_nvml_error

_FAMILY = "PCIe, NVLink, fabric"
_RESEAT = "Reseat or replace the card or riser; the kernel log may say `limited by`"


def _read_slot_width(node: CheckedNode, device: gpu_facts.Device) -> int | None:
    """Return the PCIe lanes of a card's slot; `None` if the machine, often a virtual one, does not show the slot."""
    address = gpu_facts.read_value(device, "pci")
    for entry in node.group("driver").facts.get("pci") or []:
        if address and (_parse_address(entry["address"]) == _parse_address(address)):
            width = entry.get("slot_width")
            return int(width) if width else None
    return None


def _parse_address(address: str) -> tuple[int, str]:
    domain, _, rest = address.lower().partition(":")
    return int(domain or "0", 16), rest


@remedy(Action.CHECK_LINK, _RESEAT)
@node_check("gpu.pcie_width", _FAMILY, gpu=True, vendors=JUDGED)
def check_pcie_width(node: CheckedNode) -> Outcome | list[Outcome]:
    """Every GPU uses all PCIe lanes of its slot.

    The PCIe generation is not judged, because it drops on a healthy idle GPU. The number of lanes does not drop.

    Source: current and maximum PCIe link width (NVML, sysfs of AMD), `max_link_width` of the slot's port in sysfs
    Healthy: `health.expect.pcie_width` lanes, else as many lanes as both card and slot support. If the slot is not
        visible, `gpu.pcie_outlier` compares the nodes instead: healthy T4 and L40S in virtual machines show 8 lanes
        of 16
    """
    outcomes = gpu_facts.judge_each_gpu(node, "pcie_width", _judge_width, "all PCIe lanes on {n} GPUs")
    if [outcome.status for outcome in outcomes] != [Status.PASS]:
        return outcomes
    by_design = []
    for device in gpu_facts.list_used_gpus(node):
        width, most = gpu_facts.read_value(device, "pcie_width"), gpu_facts.read_value(device, "pcie_width_max")
        if width is not None and most and width < most:
            why = "because of its slot" if _read_slot_width(node, device) else "(the slot is not visible)"
            by_design.append(f"GPU {device['index']} has {width} of {most} {why}")
    return ok(f"all available PCIe lanes: {', '.join(by_design)}") if by_design else outcomes


def _judge_width(gpu: gpu_facts.GpuValue) -> Outcome | None:
    most, slot = gpu.get("pcie_width_max"), _read_slot_width(gpu.node, gpu.device)
    wanted = gpu.node.settings.expect.get("pcie_width")
    needed = wanted or (min(most or slot, slot) if slot else None)
    if not needed or gpu.value >= needed:
        return None
    of_slot = "" if wanted else f": the card has {most} and its slot {slot}"
    return gpu.fail(f"{gpu.value} of {needed} PCIe lanes{of_slot}", expected=needed)


@remedy(Action.CHECK_LINK, _RESEAT)
@cluster_check("gpu.pcie_outlier", _FAMILY, gpu=True, vendors=JUDGED)
def check_pcie_outliers(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No GPU uses fewer PCIe lanes than GPUs in the same slot of other nodes.

    Source: current PCIe link width, compared at the same address of machines with the same layout
    Healthy: as many lanes as on most nodes. If only two nodes can be compared, the smaller number is WARN. SKIP if the
        slots are visible (`gpu.pcie_width` judges them)
    """
    slots = comparison.group_by_slot(
        cluster, lambda node: comparison.read_gpu_numbers(node, lambda device: _read_unchecked_width(node, device))
    )
    if not slots:
        seen = any(
            _read_slot_width(node, device) for node in cluster.nodes for device in gpu_facts.list_used_gpus(node)
        )
        return skip("the slots are visible") if seen else comparison.report_no_outlier(cluster, 0, "PCIe lanes")
    outcomes = [_report_deficit(slot, "PCIe lanes", slot.is_certain) for slot in comparison.find_slot_deficits(slots)]
    return outcomes or ok(f"PCIe lanes: equal on all nodes in {len(slots)} slots")


def _report_deficit(slot: comparison.SlotDeficit, what: str, is_certain: bool) -> Outcome:
    message = f"GPU {slot.index}: {slot.number} {what}, {slot.needed} in the same slot of other nodes"
    say = fail if is_certain else warn
    return say(message, node=slot.node, gpu=int(slot.index), value=slot.number, expected=slot.needed)


def _read_unchecked_width(node: CheckedNode, device: gpu_facts.Device) -> int | None:
    """Return the PCIe lanes of a GPU whose slot is not visible; `None` if the slot is visible."""
    width = gpu_facts.read_value(device, "pcie_width")
    return None if width is None or _read_slot_width(node, device) else int(width)


# --- NVLinks: behind an NVSwitch all links must be active, otherwise as many links as the bridges provide

_NVLINK_REMEDY = "Reset the GPUs of the node; if the link stays down, reseat the module or bridge, or have it replaced"


def count_active_links(states: Sequence[int | None]) -> int:
    """Return the number of active links (state 1)."""
    return sum(state == 1 for state in states)


def has_nvswitch(node: CheckedNode, device: gpu_facts.Device) -> bool:
    """Return whether a GPU is behind an NVSwitch: its fabric has a state, or the PCI bus shows a switch."""
    state = (gpu_facts.read_value(device, "fabric") or {}).get("state")
    return bool(state) or bool(node.group("driver").facts.get("nvswitches"))


@remedy(Action.CHECK_LINK, _NVLINK_REMEDY)
@node_check("gpu.nvlink", _FAMILY, gpu=True)
def check_nvlinks(node: CheckedNode) -> Outcome | list[Outcome]:
    """All NVLinks of every GPU are active.

    Cards without a bridge have inactive links, which is no fault.

    Source: NVML state of every NVLink; fabric state, NVSwitches on the PCI bus
    Healthy: as many active links as `health.expect.nvlinks`. By default, a GPU behind an NVSwitch needs as many active
        links as most GPUs of the node, and at least one, else FAIL. A GPU without an NVSwitch needs as many as most
        cards with a bridge on the node, else WARN. SKIP if no card has a bridge
    """
    devices = gpu_facts.list_used_gpus(node)
    links = [gpu_facts.read_value(device, "nvlinks") or [] for device in devices]
    bridged = any(map(count_active_links, links)) or any(has_nvswitch(node, device) for device in devices)
    if node.settings.expect.get("nvlinks") is None and any(links) and not bridged:
        return skip("no NVLink bridge is installed")
    return gpu_facts.judge_each_gpu(
        node, "nvlinks", _judge_nvlinks, "NVLinks are complete on {n} GPUs", absent="no NVLink on these GPUs"
    )


def _judge_nvlinks(gpu: gpu_facts.GpuValue) -> Outcome | None:
    wanted, devices = gpu.node.settings.expect.get("nvlinks"), gpu_facts.list_used_gpus(gpu.node)
    up, behind_switch = count_active_links(gpu.value), has_nvswitch(gpu.node, gpu.device)
    if wanted is not None:
        needed = int(wanted)
    elif len(devices) < 2 or not (up or behind_switch):
        return None
    else:
        # Without an NVSwitch, only the other GPUs show how many links the bridges provide.
        needed = _find_usual_count(devices) or (len(gpu.value) if behind_switch else up)
    if up >= needed:
        return None
    say = gpu.fail if wanted is not None or behind_switch else gpu.warn
    down = [link for link, state in enumerate(gpu.value) if state == 0]
    return say(f"{up} of {needed} NVLinks active", value={"active": up, "down": down}, expected=needed)


def _find_usual_count(devices: Sequence[gpu_facts.Device]) -> int | None:
    """Return the number of active links that most GPUs with an active link have; `None` without a majority."""
    counts = Counter(
        there for device in devices if (there := count_active_links(gpu_facts.read_value(device, "nvlinks") or []))
    )
    if not counts:
        return None
    number, times = counts.most_common(1)[0]
    return number if times * 2 > counts.total() else None


@remedy(Action.CHECK_LINK, _NVLINK_REMEDY)
@cluster_check("gpu.nvlink_outlier", _FAMILY, gpu=True)
def check_nvlink_outliers(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No GPU has fewer active NVLinks than GPUs in the same slot of other nodes.

    Source: active NVLinks (NVML), compared at the same address of machines with the same layout
    Healthy: as many links as on most nodes, or as on the better one of two nodes. A node without any bridge is WARN
    """
    slots = comparison.group_by_slot(cluster, lambda node: comparison.read_gpu_numbers(node, _read_active_links))
    if not slots:
        return comparison.report_no_outlier(cluster, 0, "active NVLinks")
    bare = {node.name for node in cluster.nodes if _has_no_active_link(node)}
    outcomes = [
        _report_deficit(slot, "NVLinks active", slot.node not in bare) for slot in comparison.find_slot_deficits(slots)
    ]
    return outcomes or ok(f"active NVLinks: equal on all nodes in {len(slots)} slots")


def _read_active_links(device: gpu_facts.Device) -> int | None:
    states = gpu_facts.read_value(device, "nvlinks")
    return None if states is None else count_active_links(states)


def _has_no_active_link(node: CheckedNode) -> bool:
    """Return whether a node has no active NVLink and no NVSwitch. The bridge of such a node may be missing."""
    devices = gpu_facts.list_used_gpus(node)
    return not any(_read_active_links(device) for device in devices) and not any(
        has_nvswitch(node, device) for device in devices
    )


# --- The fabric of an NVSwitch: GPUs that have joined it, the fabric manager, links to other machines

_COMPLETED = 3
_UNSUPPORTED = 0
_UNHEALTHY, _LIMITED = 2, 3


def describe_fabric_problem(info: dict[str, Any]) -> str | None:
    """Return the problem of a GPU's fabric, or `None`.

    Args:
        info: Values of `nvmlGpuFabricInfoV_t` in NVIDIA's `nvml.h`.
    """
    if info["state"] == _UNSUPPORTED:
        return None
    if info["state"] != _COMPLETED:
        return "not registered with the fabric"
    if info["status"] != 0:
        return f"fabric registration failed: {describe_nvml_error(info['status'])}"
    return {_UNHEALTHY: "fabric is unhealthy", _LIMITED: "fabric is of limited capacity"}.get(info["health"])


@remedy(
    Action.RESTART_FABRICMANAGER,
    "`sudo systemctl restart nvidia-fabricmanager` (its version must equal the driver's); "
    "without it CUDA fails with error 802",
)
@node_check("gpu.fabric", _FAMILY, gpu=True)
def check_fabric_state(node: CheckedNode) -> Outcome | list[Outcome]:
    """GPUs behind an NVSwitch have joined its fabric.

    Source: NVML nvmlDeviceGetGpuFabricInfoV (driver 550 and later): state, status, health
    Healthy: state completed, status success, health not bad; limited capacity WARN; SKIP if the GPU has no fabric
    """
    states = [
        info["state"] for device in gpu_facts.list_used_gpus(node) if (info := gpu_facts.read_value(device, "fabric"))
    ]
    if states and all(state == _UNSUPPORTED for state in states):
        return skip("these GPUs have no fabric")
    return gpu_facts.judge_each_gpu(
        node, "fabric", _judge_fabric, "fabric complete on {n} GPUs", absent="these GPUs have no fabric"
    )


def _judge_fabric(gpu: gpu_facts.GpuValue) -> Outcome | None:
    problem = describe_fabric_problem(gpu.value)
    if problem is None:
        return None
    is_limited = gpu.value["state"] == _COMPLETED and gpu.value["health"] == _LIMITED
    return gpu.warn(problem) if is_limited else gpu.fail(problem)


@remedy(Action.RESTART_FABRICMANAGER, "`sudo systemctl start nvidia-fabricmanager`")
@node_check("gpu.fabric_manager", _FAMILY, severity="WARN", gpu=True, group="procs")
def check_fabric_manager(node: CheckedNode) -> Iterator[Outcome]:
    """The fabric manager of an NVSwitch works.

    Source: fabric state of the GPUs; if they report none, NVSwitches on the PCI bus and the process list
    Healthy: the fabric is complete. If no GPU reports its fabric state, the fabric manager must run on a machine with
        an NVSwitch. SKIP in a container, which does not show that process
    """
    driver, running = node.group("driver"), node.group().facts.get("fabric_manager")
    infos = [
        info
        for device in gpu_facts.list_used_gpus(node)
        if (info := gpu_facts.read_value(device, "fabric")) and info["state"]
    ]
    if infos and not any(map(describe_fabric_problem, infos)):
        yield ok("the fabric is complete")
    elif running:
        yield ok("fabric manager is running")
    elif not infos and driver.status != "ok":
        yield unknown(f"the search for an NVSwitch failed: {driver.reason or driver.status}")
    elif not infos and not driver.facts.get("nvswitches"):
        yield skip("no NVSwitch")
    elif node.group().facts.get("own_namespace"):
        yield skip("this container does not show the processes of the machine")
    else:
        yield warn("the machine has an NVSwitch, but no fabric manager runs")


@remedy(
    Action.FIX_CONFIG,
    "Start nvidia-imex on all nodes of the NVLink domain and create a channel (`sudo nvidia-modprobe -c 0`), or set "
    "`NCCL_MNNVL_ENABLE: 0`: NCCL then uses the network",
)
@node_check("gpu.imex", _FAMILY, severity="WARN", gpu=True, group="driver")
def check_imex_channels(node: CheckedNode) -> Outcome:
    """GPUs with NVLinks to other nodes (GB200 NVL72) can share memory with them.

    Source: NVML fabric cluster of each GPU, /dev/nvidia-caps-imex-channels
    Healthy: if NVLinks of the GPUs reach other nodes, this user may open an IMEX channel
    """
    clusters = {
        info.get("cluster")
        for device in gpu_facts.list_used_gpus(node)
        if (info := gpu_facts.read_value(device, "fabric"))
    }
    channels = node.group().facts.get("imex") or []
    if not any(clusters):
        return skip("no NVLinks to other machines")
    if not node.settings.is_multi_node:
        return skip("only one node")
    if any(channel["readable"] for channel in channels):
        return ok(f"{len(channels)} IMEX channels")
    why = "this user may open none" if channels else "there is none"
    return warn(f"no IMEX channel to the GPUs of other nodes: {why}", value=channels)


# --- Direct access between GPUs of a node (peer-to-peer)

_P2P_REMEDY = "Reset the GPUs or reboot the node; check that the fabric manager runs and has the driver's version"
_CONNECTED = 0
P2P_STATUSES = {
    1: "not supported by the chipset",
    2: "not supported by this GPU",
    3: "not supported by the topology",
    4: "disabled in the driver",
    5: "not supported",
    6: "unknown",
}
"""`nvmlGpuP2PStatus_t` of NVIDIA's `nvml.h`; 0 means access."""
_BROKEN = frozenset({5, 6})
"""Statuses of a broken pair. Other statuses without access mean that product, board or administrator forbid access."""

Pairs = dict[str, list[int | None]]


def _read_pairs(node: CheckedNode) -> Pairs:
    """Return two statuses of NVML for each pair of used GPUs: access over NVLink, and access for reading."""
    mine = {d["index"] for d in gpu_facts.list_used_gpus(node)}
    statuses_of = gpu_facts.get_library_facts(node).facts.get("p2p") or []
    pairs = {f"{i}-{j}": [nvlink, read] for i, j, nvlink, read in statuses_of if {i, j} <= mine}
    return {pair: statuses for pair, statuses in pairs.items() if statuses != [None, None]}


@remedy(Action.RESET_GPU, _P2P_REMEDY)
@node_check("gpu.p2p", _FAMILY, gpu=True)
def check_peer_access(node: CheckedNode) -> Outcome:
    """GPUs of a node have direct access to each other.

    A broken pair makes transfers ten times slower, and no other check finds it.

    Source: NVML nvmlDeviceGetP2PStatus for every pair (NVLink, read)
    Healthy: every pair behind an NVSwitch has access. Without an NVSwitch, access depends on product and board: SKIP if
        no pair has access, and `gpu.p2p_outlier` compares the nodes
    """
    gpu_facts.require_library_facts(node)
    devices, pairs = gpu_facts.list_used_gpus(node), _read_pairs(node)
    if len(devices) < 2:
        return skip("fewer than two GPUs")
    if not pairs:
        return unknown("NVML reports no status of any pair of GPUs")
    # MIG instances have no peers.
    whole = [device for device in devices if not (gpu_facts.read_value(device, "mig") or [0])[0]]
    switched = {str(device["index"]) for device in whole if has_nvswitch(node, device)}
    dead = [pair for pair, statuses in pairs.items() if set(pair.split("-")) <= switched and statuses[0] in _BROKEN]
    if dead:
        return fail(f"no NVLink between GPUs {', '.join(dead[:8])}, which share an NVSwitch", value=dead)
    connected = sum(_CONNECTED in statuses for statuses in pairs.values())
    over_nvlink = sum(statuses[0] == _CONNECTED for statuses in pairs.values())
    if connected:
        return ok(f"{connected} of {len(pairs)} pairs of GPUs have direct access, {over_nvlink} over NVLink")
    codes = sorted({code for statuses in pairs.values() for code in statuses if code})
    reasons = ", ".join(P2P_STATUSES.get(code, f"status {code}") for code in codes) or "no reason reported"
    return skip(f"no pair of GPUs has direct access: {reasons}")


@remedy(Action.RESET_GPU, _P2P_REMEDY)
@cluster_check("gpu.p2p_outlier", _FAMILY, gpu=True)
def check_p2p_outliers(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No pair of GPUs lacks an access that the same pair has on other nodes.

    Source: NVML nvmlDeviceGetP2PStatus of each pair, compared at the same addresses of machines with the same layout
    Healthy: the same as on most nodes. If only two nodes can be compared, the node without access is WARN
    """
    connected = comparison.group_by_slot(
        cluster, lambda node: {pair: int(_CONNECTED in codes) for pair, codes in _read_pairs(node).items()}
    )
    linked = comparison.group_by_slot(
        cluster, lambda node: {pair: int(codes[0] == _CONNECTED) for pair, codes in _read_pairs(node).items()}
    )
    if not connected:
        return comparison.report_no_outlier(cluster, 0, "pairs of GPUs")
    # A pair without any access has no NVLink either: one finding is enough.
    for slots, what in ((connected, "direct access"), (linked, "NVLink")):
        outcomes = [
            (fail if slot.is_certain else warn)(
                f"no {what} between GPUs {slot.index}, unlike on other nodes", node=slot.node, value=[slot.index]
            )
            for slot in comparison.find_slot_deficits(slots)
        ]
        if outcomes:
            return outcomes
    return ok("pairs of GPUs have the same access as on other nodes")


# --- SXids: errors that an NVSwitch reports in the kernel log.

_SILENT = (12021, 12023)
"""SXids of the ECC rate limit of a switch: data may be corrupted without an error."""


def _judge_by_fabric_state(node: CheckedNode) -> Outcome | None:
    """Return the outcome by the fabric state of the GPUs; `None` if this state is missing or shows a problem."""
    if gpu_facts.find_library_problem(node) is not None:
        return None
    devices = gpu_facts.list_used_gpus(node)
    if not any(has_nvswitch(node, device) for device in devices):
        return skip("no NVSwitch")
    infos = [info for device in devices if (info := gpu_facts.read_value(device, "fabric"))]
    if any(map(describe_fabric_problem, infos)):
        return None
    return report_unreadable_log(node, "the fabric state of the GPUs is the evidence")


@remedy(Action.RESTART_FABRICMANAGER, "Restart the fabric manager and reset the GPUs of the node, or reboot it")
@node_check(
    "gpu.sxid",
    "XID and SXid",
    gpu=True,
    group="kernel_log",
    without_root="the fabric state of the GPUs is the evidence",
    judge_without_source=_judge_by_fabric_state,
    thresholds={"lookback": 86400.0},
)
def check_sxids(node: CheckedNode) -> Iterator[Outcome]:
    """No NVSwitch reported a fatal error (SXid) since the boot.

    Source: kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by switch and code
    Healthy: no fatal SXid within `lookback` seconds; other SXids are WARN
    """
    events = [event for event in node.group().facts.get("events") or [] if event["kind"] == "sxid"]
    for event in events:
        fatal, age = event["grade"] == "fatal", event["last_age_s"]
        silent = ", data may be corrupted silently" if event["code"] in _SILENT else ""
        recent = age is None or age <= node.limit("lookback")
        say = fail if fatal and recent else warn
        kind = "fatal" if fatal else "not fatal"
        yield say(
            f"NVSwitch {event['device']}: SXid {event['code']}, {kind}{silent}{describe_occurrences(event)}",
            value={"sxid": event["code"], "count": event["count"], "text": event["text"]},
            override_key=f"sxid.{event['code']}",
        )
    if not events:
        yield ok(f"no SXid {describe_covered_time(node)}")
