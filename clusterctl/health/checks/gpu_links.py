"""Links of NVIDIA GPUs: PCIe, NVLink, peer-to-peer access, and the fabric with its SXID errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from clusterctl.health import gpu_errors
from clusterctl.health.check import CheckedCluster, CheckedNode, cluster_check, node_check, remedy
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.checks.machine_kernel_log import (
    describe_covered_time,
    describe_occurrences,
    report_unreadable_log,
)
from clusterctl.health.findings import JUDGED, Action, Outcome, Status, fail, ok, skip, unknown, warn

_FAMILY = "PCIe, NVLink, fabric"
_RESEAT = "Reseat or replace the card or riser; the kernel log may say `limited by`"


def _read_slot_width(node: CheckedNode, device: gpu_facts.Device) -> int | None:
    """Return the lanes of the port above a card; `None` if the machine does not show it, like most virtual ones."""
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
    """Every GPU has all the PCIe lanes of its slot.

    The generation is not judged: it falls at idle on a healthy GPU.

    Source: current and maximum PCIe link width (NVML, sysfs of AMD, whose cards have bridges of their own), sysfs
        `max_link_width` of the port above (width does not drop at idle, generation does)
    Healthy: `health.expect.pcie_width` lanes, else as many as both the card and the port above it have. If the port is
        not visible, nodes are compared instead (`gpu.pcie_outlier`): NVIDIA's own captures of healthy T4 and L40S in
        virtual machines show 8 lanes of 16
    """
    outcomes = gpu_facts.judge_each_gpu(node, "pcie_width", _judge_width, "all PCIe lanes on {n} GPUs")
    if [outcome.status for outcome in outcomes] != [Status.PASS]:
        return outcomes
    by_design = []
    for device in gpu_facts.list_used_gpus(node):
        width, most = gpu_facts.read_value(device, "pcie_width"), gpu_facts.read_value(device, "pcie_width_max")
        if width is not None and most and width < most:
            why = "by its slot's design" if _read_slot_width(node, device) else "(the slot cannot be seen)"
            by_design.append(f"GPU {device['index']} has {width} of {most} {why}")
    return ok(f"all PCIe lanes that there are: {', '.join(by_design)}") if by_design else outcomes


def _judge_width(gpu: gpu_facts.GpuValue) -> Outcome | None:
    most, slot = gpu.get("pcie_width_max"), _read_slot_width(gpu.node, gpu.device)
    wanted = gpu.node.settings.expect.get("pcie_width")
    needed = wanted or (min(most or slot, slot) if slot else None)
    if not needed or gpu.value >= needed:
        return None
    of_slot = "" if wanted else f": the card has {most} and its slot {slot}"
    return gpu.fail(f"{gpu.value} PCIe lanes of {needed}{of_slot}", expected=needed)


@remedy(Action.CHECK_LINK, _RESEAT)
@cluster_check("gpu.pcie_outlier", _FAMILY, gpu=True, vendors=JUDGED)
def check_pcie_outliers(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No GPU has fewer PCIe lanes than those in the same slot of other nodes.

    Source: current PCIe link width, compared at the same address of machines with the same layout
    Healthy: as many lanes as on most nodes; if only two nodes differ, the lesser one is WARN. SKIP if the port above
        the card is visible (`gpu.pcie_width`)
    """
    slots = comparison.group_by_slot(
        cluster, lambda node: comparison.read_gpu_numbers(node, lambda device: _read_unchecked_width(node, device))
    )
    if not slots:
        seen = any(
            _read_slot_width(node, device) for node in cluster.nodes for device in gpu_facts.list_used_gpus(node)
        )
        return skip("slots can be seen") if seen else comparison.report_no_outlier(cluster, 0, "PCIe lanes")
    outcomes = [_report_deficit(slot, "PCIe lanes", slot.is_certain) for slot in comparison.find_slot_deficits(slots)]
    return outcomes or ok(f"PCIe lanes: {len(slots)} slots alike on all nodes")


def _report_deficit(slot: comparison.SlotDeficit, what: str, is_certain: bool) -> Outcome:
    message = f"GPU {slot.index}: {slot.number} {what}, {slot.needed} in the same slot of other nodes"
    say = fail if is_certain else warn
    return say(message, node=slot.node, gpu=int(slot.index), value=slot.number, expected=slot.needed)


def _read_unchecked_width(node: CheckedNode, device: gpu_facts.Device) -> int | None:
    """Return the lanes of a GPU that is not judged by its slot."""
    width = gpu_facts.read_value(device, "pcie_width")
    return None if width is None or _read_slot_width(node, device) else int(width)


# --- Which NVLinks are up: behind an NVSwitch all of them have to be; without one, as many as somebody has fitted.

_NVLINK_REMEDY = "Reset the GPUs of the node; if the link stays down, reseat the module or bridge, or have it replaced"


def count_active_links(states: Sequence[int | None]) -> int:
    """Return the number of active links."""
    return sum(state == 1 for state in states)


def has_nvswitch(node: CheckedNode, device: gpu_facts.Device) -> bool:
    """Return whether a GPU is behind an NVSwitch: its fabric has a state, or the machine shows the switch."""
    state = (gpu_facts.read_value(device, "fabric") or {}).get("state")
    return bool(state) or bool(node.group("driver").facts.get("nvswitches"))


@remedy(Action.CHECK_LINK, _NVLINK_REMEDY)
@node_check("gpu.nvlink", _FAMILY, gpu=True)
def check_nvlinks(node: CheckedNode) -> Outcome | list[Outcome]:
    """Every GPU has its NVLinks active.

    Cards without a bridge show inactive links, which is no fault.

    Source: NVML state of every NVLink; fabric state, NVSwitches on the PCI bus
    Healthy: as many active links as `health.expect.nvlinks`. Behind an NVSwitch, a GPU has as many as most GPUs of the
        node, and FAIL if none is active. Without an NVSwitch, it has as many as most cards with a bridge on the node,
        else WARN; SKIP if no card has a bridge
    """
    devices = gpu_facts.list_used_gpus(node)
    links = [gpu_facts.read_value(device, "nvlinks") or [] for device in devices]
    bridged = any(map(count_active_links, links)) or any(has_nvswitch(node, device) for device in devices)
    if node.settings.expect.get("nvlinks") is None and any(links) and not bridged:
        return skip("no NVLink bridge is fitted")
    return gpu_facts.judge_each_gpu(
        node, "nvlinks", _judge_nvlinks, "NVLinks as they should be on {n} GPUs", absent="no NVLink on these GPUs"
    )


def _judge_nvlinks(gpu: gpu_facts.GpuValue) -> Outcome | None:
    wanted, devices = gpu.node.settings.expect.get("nvlinks"), gpu_facts.list_used_gpus(gpu.node)
    up, behind_switch = count_active_links(gpu.value), has_nvswitch(gpu.node, gpu.device)
    if wanted is not None:
        needed = int(wanted)
    elif len(devices) < 2 or not (up or behind_switch):
        return None
    else:
        # Without a switch only GPUs of the same kind tell how many bridges there should be.
        needed = _find_usual_count(devices) or (len(gpu.value) if behind_switch else up)
    if up >= needed:
        return None
    say = gpu.fail if wanted is not None or behind_switch else gpu.warn
    down = [link for link, state in enumerate(gpu.value) if state == 0]
    return say(f"{up} of {needed} NVLinks active", value={"active": up, "down": down}, expected=needed)


def _find_usual_count(devices: Sequence[gpu_facts.Device]) -> int | None:
    """Return the number of active links of most GPUs that have any; `None` without such a majority."""
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
    """No GPU has fewer NVLinks up than those in the same slot of other nodes.

    Source: active NVLinks (NVML), compared at the same address of machines with the same layout
    Healthy: as many links as on most nodes, or as the better one of two nodes; a node without any bridge is WARN
    """
    slots = comparison.group_by_slot(cluster, lambda node: comparison.read_gpu_numbers(node, _read_active_links))
    if not slots:
        return comparison.report_no_outlier(cluster, 0, "active NVLinks")
    bare = {node.name for node in cluster.nodes if _has_no_active_link(node)}
    outcomes = [
        _report_deficit(slot, "NVLinks active", slot.node not in bare) for slot in comparison.find_slot_deficits(slots)
    ]
    return outcomes or ok(f"active NVLinks: {len(slots)} slots alike on all nodes")


def _read_active_links(device: gpu_facts.Device) -> int | None:
    states = gpu_facts.read_value(device, "nvlinks")
    return None if states is None else count_active_links(states)


def _has_no_active_link(node: CheckedNode) -> bool:
    """Return whether a node without an NVSwitch has no active link: a bridge is missing or came off."""
    devices = gpu_facts.list_used_gpus(node)
    return not any(_read_active_links(device) for device in devices) and not any(
        has_nvswitch(node, device) for device in devices
    )


# --- The fabric of an NVSwitch: whether GPUs have joined it, who runs it, and whether it reaches beyond the machine.

_COMPLETED = 3
_UNSUPPORTED = 0
_UNHEALTHY, _LIMITED = 2, 3


def describe_fabric_problem(info: dict[str, Any]) -> str | None:
    """Return the problem of a GPU's fabric, or `None`.

    Values are those of `nvmlGpuFabricInfoV_t` in NVIDIA's `nvml.h`.
    """
    if info["state"] == _UNSUPPORTED:
        return None
    if info["state"] != _COMPLETED:
        return "not registered with the fabric"
    if info["status"] != 0:
        return f"fabric registration failed: {gpu_errors.describe_nvml_error(info['status'])}"
    return {_UNHEALTHY: "fabric is unhealthy", _LIMITED: "fabric is of limited capacity"}.get(info["health"])


@remedy(
    Action.RESTART_FABRICMANAGER,
    "`sudo systemctl restart nvidia-fabricmanager` (its version must equal the driver's); "
    "without it CUDA ends with error 802",
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
    """The fabric of an NVSwitch works.

    The state that GPUs report decides; the process only explains it.

    Source: fabric state of the GPUs; if they report none, NVSwitches on the PCI bus and the process list
    Healthy: the fabric is complete. If no GPU reports its fabric state, the fabric manager must run on a machine with
        an NVSwitch (invisible from a container)
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
        yield unknown(f"could not search for an NVSwitch: {driver.reason or driver.status}")
    elif not infos and not driver.facts.get("nvswitches"):
        yield skip("no NVSwitch")
    elif node.group().facts.get("own_namespace"):
        yield skip("this container does not show the machine's processes")
    else:
        yield warn("there is an NVSwitch, and no fabric manager runs")


@remedy(
    Action.FIX_CONFIG,
    "Start nvidia-imex on all nodes of the NVLink domain and make a channel "
    "(`sudo nvidia-modprobe -c 0`); NCCL else goes over the network (or set `NCCL_MNNVL_ENABLE: 0`)",
)
@node_check("gpu.imex", _FAMILY, severity="WARN", gpu=True, group="driver")
def check_imex_channels(node: CheckedNode) -> Outcome:
    """GPUs whose NVLinks reach other nodes (GB200 NVL72) can share memory with them.

    Source: NVML fabric cluster of each GPU, /dev/nvidia-caps-imex-channels
    Healthy: a channel that this user may open, if NVLinks of the GPUs reach other nodes of the run
    """
    clusters = {
        info.get("cluster")
        for device in gpu_facts.list_used_gpus(node)
        if (info := gpu_facts.read_value(device, "fabric"))
    }
    channels = node.group().facts.get("imex") or []
    if not any(clusters):
        return skip("the fabric ends with this machine")
    if not node.settings.is_multi_node:
        return skip("only one node")
    if any(channel["readable"] for channel in channels):
        return ok(f"{len(channels)} IMEX channels")
    why = "none that this user may open" if channels else "none there"
    return warn(f"no IMEX channel to reach the GPUs of other nodes: {why}", value=channels)


# --- Whether GPUs of a node reach each other directly, by NVML's own word for each pair.

_P2P_REMEDY = "Reset the GPUs or reboot the node; check that the fabric manager and its version are right"
_CONNECTED = 0
P2P_STATUSES = {
    1: "the chipset has none",
    2: "this GPU has none",
    3: "the topology has none",
    4: "turned off for the driver",
    5: "not supported",
    6: "unknown",
}
"""`nvmlGpuP2PStatus_t` of NVIDIA's `nvml.h`; 0 is well."""
_BROKEN = frozenset({5, 6})
"""What a pair says that ought to have access and has none; the others are the choice of product, board or owner."""

Pairs = dict[str, list[int | None]]


def _read_pairs(node: CheckedNode) -> Pairs:
    """Return NVML's status of each pair of used GPUs: over NVLink and for reading."""
    mine = {d["index"] for d in gpu_facts.list_used_gpus(node)}
    statuses_of = gpu_facts.get_library_facts(node).facts.get("p2p") or []
    pairs = {f"{i}-{j}": [nvlink, read] for i, j, nvlink, read in statuses_of if {i, j} <= mine}
    return {pair: statuses for pair, statuses in pairs.items() if statuses != [None, None]}


@remedy(Action.RESET_GPU, _P2P_REMEDY)
@node_check("gpu.p2p", _FAMILY, gpu=True)
def check_peer_access(node: CheckedNode) -> Outcome:
    """GPUs reach each other directly.

    A broken pair makes transfers ten times slower, and no other check finds it.

    Source: NVML nvmlDeviceGetP2PStatus for every pair (NVLink, read)
    Healthy: behind an NVSwitch every pair; elsewhere it is product and board that decide (SKIP), and nodes are compared
    """
    gpu_facts.require_library_facts(node)
    devices, pairs = gpu_facts.list_used_gpus(node), _read_pairs(node)
    if len(devices) < 2:
        return skip("fewer than two GPUs")
    if not pairs:
        return unknown("no pair of GPUs tells whether it is connected")
    # An instance of MIG has no peers.
    whole = [device for device in devices if not (gpu_facts.read_value(device, "mig") or [0])[0]]
    switched = {str(device["index"]) for device in whole if has_nvswitch(node, device)}
    dead = [pair for pair, statuses in pairs.items() if set(pair.split("-")) <= switched and statuses[0] in _BROKEN]
    if dead:
        return fail(f"no NVLink between GPUs {', '.join(dead[:8])}, which share an NVSwitch", value=dead)
    connected = sum(_CONNECTED in statuses for statuses in pairs.values())
    over_nvlink = sum(statuses[0] == _CONNECTED for statuses in pairs.values())
    if connected:
        return ok(f"{connected} of {len(pairs)} pairs of GPUs reach each other, {over_nvlink} over NVLink")
    codes = sorted({code for statuses in pairs.values() for code in statuses if code})
    reasons = ", ".join(P2P_STATUSES.get(code, f"status {code}") for code in codes) or "no reason told"
    return skip(f"no pair of GPUs has direct access: {reasons}")


@remedy(Action.RESET_GPU, _P2P_REMEDY)
@cluster_check("gpu.p2p_outlier", _FAMILY, gpu=True)
def check_p2p_outliers(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No pair of GPUs has lost an access that the same pair of other nodes has.

    Source: NVML nvmlDeviceGetP2PStatus of each pair, compared at the same addresses of machines with the same layout
    Healthy: the same as on most nodes; if only two nodes differ, the one without access is WARN
    """
    connected = comparison.group_by_slot(
        cluster, lambda node: {pair: int(_CONNECTED in codes) for pair, codes in _read_pairs(node).items()}
    )
    linked = comparison.group_by_slot(
        cluster, lambda node: {pair: int(codes[0] == _CONNECTED) for pair, codes in _read_pairs(node).items()}
    )
    if not connected:
        return comparison.report_no_outlier(cluster, 0, "pairs of GPUs")
    # A pair that has lost all access has lost its NVLink too: one finding is enough.
    for slots, what in ((connected, "direct access"), (linked, "NVLink")):
        outcomes = [
            (fail if slot.is_certain else warn)(
                f"no {what} between GPUs {slot.index}, on other nodes there is", node=slot.node, value=[slot.index]
            )
            for slot in comparison.find_slot_deficits(slots)
        ]
        if outcomes:
            return outcomes
    return ok("pairs of GPUs reach each other as on other nodes")


# --- SXids: errors that an NVSwitch reports in the kernel log.

_SILENT = (12021, 12023)
"""SXids of the ECC rate limit of a switch: data may be corrupted without a word."""


def _judge_by_fabric_state(node: CheckedNode) -> Outcome | None:
    """Return the outcome if the fabric state of the GPUs is evidence for the switches, else `None`."""
    if gpu_facts.find_library_problem(node) is not None:
        return None
    devices = gpu_facts.list_used_gpus(node)
    if not any(has_nvswitch(node, device) for device in devices):
        return skip("no NVSwitch")
    infos = [info for device in devices if (info := gpu_facts.read_value(device, "fabric"))]
    if any(map(describe_fabric_problem, infos)):
        return None
    return report_unreadable_log(node, "the fabric state of the GPUs speaks for its switches")


@remedy(Action.RESTART_FABRICMANAGER, "Restart the fabric manager and reset the GPUs of the node, or reboot it")
@node_check(
    "gpu.sxid",
    "XID and SXid",
    gpu=True,
    group="kernel_log",
    without_root="the fabric state of the GPUs speaks for its switches",
    judge_without_source=_judge_by_fabric_state,
    thresholds={"lookback": 86400.0},
)
def check_sxids(node: CheckedNode) -> Iterator[Outcome]:
    """Errors that an NVSwitch reported since boot.

    Source: kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by switch and code
    Healthy: no fatal SXid within `lookback` seconds; others WARN
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
