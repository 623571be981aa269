"""Which NVLinks are up: behind an NVSwitch all of them have to be; without one, as many as somebody has fitted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clusterctl.health.check import ClusterView, View

_FAMILY = "PCIe, NVLink, fabric"
_REMEDY = "Reset the GPUs of the node; if the link stays down, reseat the module or bridge, or have it replaced"


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
    remedy=_REMEDY,
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
    remedy=_REMEDY,
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


CHECKS = (nvlink, nvlink_outlier)
