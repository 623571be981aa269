"""Links of NVIDIA GPUs: PCIe, NVLink, peer-to-peer access, and the fabric with its SXID errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from clusterctl.health import driver_errors
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.checks.kernel_log import describe_reach, describe_recurrence, report_closed_log
from clusterctl.health.model import JUDGED, Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "PCIe, NVLink, fabric"
_RESEAT = "Reseat or replace the card or riser; the kernel log may say `limited by`"


def _slot_width(view: View, device: gpus.Device) -> int | None:
    """Return the lanes of the port above a card; `None` where the machine does not show it, as most VMs do not."""
    address = gpus.value(device, "pci")
    for entry in view.group("driver").data.get("pci") or []:
        if address and (_split(entry["address"]) == _split(address)):
            width = entry.get("slot_width")
            return int(width) if width else None
    return None


def _split(address: str) -> tuple[int, str]:
    domain, _, rest = address.lower().partition(":")
    return int(domain or "0", 16), rest


@node_check(
    name="gpu.pcie_width",
    family=_FAMILY,
    source=(
        "current and maximum PCIe link width (NVML, sysfs of AMD, whose cards have bridges of their own), sysfs "
        "`max_link_width` of the port above (width does not drop at idle, generation does)"
    ),
    threshold=(
        "as `health.expect.pcie_width`, else as many as both the card and the port above it have; where no port can be "
        "seen nodes are compared instead (`gpu.pcie_outlier`): NVIDIA's own captures of healthy T4 and L40S in virtual "
        "machines show 8 lanes of 16"
    ),
    severity="FAIL",
    remedy=_RESEAT,
    action=Action.CHECK_LINK,
    gpu=True,
    vendors=JUDGED,
)
def pcie_width(view: View) -> Iterable[Outcome]:
    """Every GPU has all the PCIe lanes of its slot. The generation is not judged: it falls at idle on a healthy GPU."""
    wanted = view.context.expect.get("pcie_width")
    by_design: list[str] = []

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        most, slot = gpus.value(device, "pcie_width_max"), _slot_width(view, device)
        needed = wanted or (min(most or slot, slot) if slot else None)
        if needed and value < needed:
            of_slot = "" if wanted else f": the card has {most} and its slot {slot}"
            message = f"{gpus.label(device)}: {value} PCIe lanes of {needed}{of_slot}"
            return fail(message, gpu=device["index"], value=value, expected=needed)
        if most and value < most:
            by_design.append(f"GPU {device['index']} has {value} of {most} {_whose(slot)}")
        return None

    outcomes = gpus.judge_each(view, "pcie_width", judge, "all PCIe lanes on {n} GPUs")
    if by_design and [outcome.status for outcome in outcomes] == [ok("").status]:
        return [ok(f"all PCIe lanes that there are: {', '.join(by_design)}")]
    return outcomes


def _whose(slot: int | None) -> str:
    return "by its slot's design" if slot else "(the slot cannot be seen)"


@cluster_check(
    name="gpu.pcie_outlier",
    family=_FAMILY,
    source="current PCIe link width at the same address of machines that are built alike",
    threshold="as most nodes have there; of two that differ the lesser WARN. Looked at where the slot cannot be seen",
    severity="FAIL",
    remedy=_RESEAT,
    action=Action.CHECK_LINK,
    gpu=True,
    vendors=JUDGED,
)
def pcie_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU has fewer PCIe lanes than those in the same slot of other nodes."""
    places = compare.by_slot(view, lambda node: compare.by_index(node, lambda device: _unseen_width(node, device)))
    if not places:
        seen = any(_slot_width(node, device) for node in view.views for device in gpus.used_gpus(node))
        return [skip("slots can be seen") if seen else compare.report_no_outlier(view, 0, "PCIe lanes")]
    outcomes = []
    for place, values in places.items():
        index, needed = int(place.rsplit(" ", 1)[1]), compare.expected_by_slot(values)
        say = warn if compare.count_votes(values).majority is None else fail
        for node, width in values.items():
            if width < needed:
                message = f"GPU {index}: {width} PCIe lanes, {needed} in the same slot of other nodes"
                outcomes.append(say(message, node=node, gpu=index, value=width, expected=needed))
    return outcomes or [ok(f"PCIe lanes: {len(places)} slots alike on all nodes")]


def _unseen_width(node: View, device: gpus.Device) -> int | None:
    """Return the lanes of a GPU that is not judged by its slot."""
    width = gpus.value(device, "pcie_width")
    return None if width is None or _slot_width(node, device) else int(width)


# --- Which NVLinks are up: behind an NVSwitch all of them have to be; without one, as many as somebody has fitted.

_NVLINK_REMEDY = "Reset the GPUs of the node; if the link stays down, reseat the module or bridge, or have it replaced"


def count_up(states: Sequence[int | None]) -> int:
    """Return how many links are up."""
    return sum(state == 1 for state in states)


def has_nvswitch(view: View, device: gpus.Device) -> bool:
    """Tell whether a GPU sits behind an NVSwitch: its fabric has a state, or the machine shows the switch."""
    state = (gpus.value(device, "fabric") or {}).get("state")
    return bool(state) or bool(view.group("driver").data.get("nvswitches"))


@node_check(
    name="gpu.nvlink",
    family=_FAMILY,
    source="NVML state of every NVLink; fabric state, NVSwitches on the PCI bus",
    threshold=(
        "as many up as `health.expect.nvlinks`; behind an NVSwitch as on most GPUs of the node, none up FAIL; bridged "
        "cards as their like on the node, else WARN; SKIP where no bridge is fitted"
    ),
    severity="FAIL",
    remedy=_NVLINK_REMEDY,
    action=Action.CHECK_LINK,
    gpu=True,
)
def nvlink(view: View) -> Iterable[Outcome]:
    """Every GPU has its NVLinks up. Cards without a bridge show theirs as down, and nothing is wrong with that."""
    wanted = view.context.expect.get("nvlinks")
    everybody = gpus.used_gpus(view)
    usual = _usual(everybody)
    links = [gpus.value(device, "nvlinks") or [] for device in everybody]
    if (
        wanted is None
        and any(links)
        and not any(map(count_up, links))
        and not any(has_nvswitch(view, d) for d in everybody)
    ):
        return [skip("no NVLink bridge is fitted")]

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        there, behind_switch = count_up(value), has_nvswitch(view, device)
        if wanted is not None:
            needed = int(wanted)
        elif len(everybody) < 2 or not (there or behind_switch):
            return None
        else:
            # Without a switch nobody knows how many bridges there are meant to be but its like.
            needed = usual or (len(value) if behind_switch else there)
        if there >= needed:
            return None
        say = fail if wanted is not None or behind_switch else warn
        down = [link for link, state in enumerate(value) if state == 0]
        message = f"{gpus.label(device)}: {there} of {needed} NVLinks active"
        return say(message, gpu=device["index"], value={"active": there, "down": down}, expected=needed)

    return gpus.judge_each(
        view, "nvlinks", judge, "NVLinks as they should be on {n} GPUs", absent="no NVLink on these GPUs"
    )


def _usual(devices: Sequence[gpus.Device]) -> int | None:
    """Return how many links most of the GPUs have up that have any; `None` without such a majority."""
    counts = Counter(there for device in devices if (there := count_up(gpus.value(device, "nvlinks") or [])))
    if not counts:
        return None
    number, times = counts.most_common(1)[0]
    return number if times * 2 > counts.total() else None


@cluster_check(
    name="gpu.nvlink_outlier",
    family=_FAMILY,
    source="NVML active NVLinks at the same address of machines that are built alike",
    threshold="as most nodes have there, of two nodes as the one that has more; a node without any bridge WARN",
    severity="FAIL",
    remedy=_NVLINK_REMEDY,
    action=Action.CHECK_LINK,
    gpu=True,
)
def nvlink_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No GPU has fewer NVLinks up than those in the same slot of other nodes."""
    places = compare.by_slot(view, lambda node: compare.by_index(node, _links))
    if not places:
        return [compare.report_no_outlier(view, 0, "active NVLinks")]
    bare = {node.node for node in view.views if _has_none(node)}
    outcomes = []
    for place, values in places.items():
        index, needed = int(place.rsplit(" ", 1)[1]), compare.expected_by_slot(values)
        for node, there in values.items():
            if there < needed:
                message = f"GPU {index}: {there} NVLinks active, {needed} in the same slot of other nodes"
                say = warn if node in bare else fail
                outcomes.append(say(message, node=node, gpu=index, value=there, expected=needed))
    return outcomes or [ok(f"active NVLinks: {len(places)} slots alike on all nodes")]


def _links(device: gpus.Device) -> int | None:
    states = gpus.value(device, "nvlinks")
    return None if states is None else count_up(states)


def _has_none(node: View) -> bool:
    """Tell whether no GPU of a node without NVSwitch has a link up: nobody has fitted a bridge, or it has come off."""
    devices = gpus.used_gpus(node)
    return not any(_links(device) for device in devices) and not any(has_nvswitch(node, device) for device in devices)


# --- The fabric of an NVSwitch: whether GPUs have joined it, who runs it, and whether it reaches beyond the machine.

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


# --- Whether GPUs of a node reach each other directly, by NVML's own word for each pair.

_P2P_REMEDY = "Reset the GPUs or reboot the node; check that the fabric manager and its version are right"
_WELL = 0
STATUSES = {
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


def _pairs(view: View) -> Pairs:
    """Return NVML's status over NVLink and for reading, by pair of GPUs that matter, where one was told."""
    mine = {d["index"] for d in gpus.used_gpus(view)}
    statuses_of = gpus.library(view).data.get("p2p") or []
    pairs = {f"{i}-{j}": [nvlink, read] for i, j, nvlink, read in statuses_of if {i, j} <= mine}
    return {pair: statuses for pair, statuses in pairs.items() if statuses != [None, None]}


def _reach(statuses: list[int | None]) -> bool:
    return _WELL in statuses


@node_check(
    name="gpu.p2p",
    family=_FAMILY,
    source="NVML nvmlDeviceGetP2PStatus for every pair (NVLink, read)",
    threshold=(
        "behind an NVSwitch every pair; elsewhere it is product and board that decide (SKIP), and nodes are compared"
    ),
    severity="FAIL",
    remedy=_P2P_REMEDY,
    action=Action.RESET_GPU,
    gpu=True,
)
def p2p(view: View) -> Iterator[Outcome]:
    """GPUs reach each other directly. A dead pair costs a factor of ten and nothing else tells of it."""
    blocked = gpus.why_library_not_judged(view)
    pairs = _pairs(view)
    if blocked is not None or len(gpus.used_gpus(view)) < 2:
        yield blocked or skip("fewer than two GPUs")
        return
    if not pairs:
        yield unknown("no pair of GPUs tells whether it is connected")
        return
    # An instance of MIG has no peers.
    whole = [d for d in gpus.used_gpus(view) if not (gpus.value(d, "mig") or [0])[0]]
    switched = {str(d["index"]) for d in whole if has_nvswitch(view, d)}
    dead = [pair for pair, statuses in pairs.items() if set(pair.split("-")) <= switched and (statuses[0] in _BROKEN)]
    if dead:
        yield fail(f"no NVLink between GPUs {', '.join(dead[:8])}, which share an NVSwitch", value=dead)
        return
    reached = sum(map(_reach, pairs.values()))
    over_nvlink = sum(statuses[0] == _WELL for statuses in pairs.values())
    if reached:
        yield ok(f"{reached} of {len(pairs)} pairs of GPUs reach each other, {over_nvlink} over NVLink")
    else:
        yield skip(f"no pair of GPUs has direct access: {_words(pairs)}")


def _words(pairs: Pairs) -> str:
    statuses = sorted({status for pair in pairs.values() for status in pair if status})
    return ", ".join(STATUSES.get(status, f"status {status}") for status in statuses) or "no reason told"


@cluster_check(
    name="gpu.p2p_outlier",
    family=_FAMILY,
    source="NVML nvmlDeviceGetP2PStatus of the pair at the same addresses of machines that are built alike",
    threshold="as most nodes have it; of two nodes that differ the one without WARN",
    severity="FAIL",
    remedy=_P2P_REMEDY,
    action=Action.RESET_GPU,
    gpu=True,
)
def p2p_outlier(view: ClusterView) -> Iterable[Outcome]:
    """No pair of GPUs has lost an access that the same pair of other nodes has."""
    reached = compare.by_slot(
        view, lambda node: {pair: int(_reach(statuses)) for pair, statuses in _pairs(node).items()}
    )
    linked = compare.by_slot(
        view, lambda node: {pair: int(statuses[0] == _WELL) for pair, statuses in _pairs(node).items()}
    )
    if not reached:
        return [compare.report_no_outlier(view, 0, "pairs of GPUs")]
    # A pair that has lost all access has lost its NVLink too: told once.
    odd = [*_odd(reached, "direct access")] or [*_odd(linked, "NVLink")]
    return odd or [ok("pairs of GPUs reach each other as on other nodes")]


def _odd(places: dict[str, dict[str, int]], what: str) -> Iterator[Outcome]:
    for place, values in places.items():
        needed, pair = compare.expected_by_slot(values), place.rsplit(" ", 1)[1]
        say = warn if compare.count_votes(values).majority is None else fail
        for node, has in values.items():
            if has < needed:
                yield say(f"no {what} between GPUs {pair}, on other nodes there is", node=node, value=[pair])


# --- SXids: errors that an NVSwitch reports in the kernel log.

_SILENT = (12021, 12023)
"""SXids of the ECC rate limit of a switch: data may be corrupted without a word."""


def _witness(view: View) -> Outcome | None:
    """Say whether the fabric speaks for its switches: GPUs that have joined it, or whose links are up."""
    if gpus.why_library_not_judged(view) is not None:
        return None
    devices = gpus.used_gpus(view)
    if not any(has_nvswitch(view, device) for device in devices):
        return skip("no NVSwitch")
    infos = [info for device in devices if (info := gpus.value(device, "fabric"))]
    if any(map(describe_problem, infos)):
        return None
    return report_closed_log(view, "the fabric state of the GPUs speaks for its switches")


@node_check(
    name="gpu.sxid",
    family="XID and SXid",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by switch and code",
    threshold="no fatal SXid within `lookback` seconds; others WARN",
    severity="FAIL",
    remedy="Restart the fabric manager and reset the GPUs of the node, or reboot it",
    action=Action.RESTART_FABRICMANAGER,
    gpu=True,
    group="kernel_log",
    root="the fabric state of the GPUs speaks for its switches",
    witness=_witness,
    thresholds={"lookback": 86400.0},
)
def sxid(view: View) -> Iterator[Outcome]:
    """Errors that an NVSwitch reported since boot."""
    events = [event for event in view.group().data.get("events") or [] if event["kind"] == "sxid"]
    for event in events:
        fatal, age = event["grade"] == "fatal", event["last_age_s"]
        silent = ", data may be corrupted silently" if event["code"] in _SILENT else ""
        recent = age is None or age <= view.limit("lookback")
        say = fail if fatal and recent else warn
        kind = "fatal" if fatal else "not fatal"
        yield say(
            f"NVSwitch {event['device']}: SXid {event['code']}, {kind}{silent}{describe_recurrence(event)}",
            value={"sxid": event["code"], "count": event["count"], "text": event["text"]},
            key=f"sxid.{event['code']}",
        )
    if not events:
        yield ok(f"no SXid {describe_reach(view)}")
