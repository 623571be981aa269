"""How many PCIe lanes each GPU has: fewer than its slot gives is damage, fewer than the card could take is design."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import cluster_check, node_check
from clusterctl.health.checks import compare, gpus
from clusterctl.health.model import Action, Outcome, fail, ok, skip, warn
from clusterctl.health.vendors import JUDGED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import ClusterView, View

_FAMILY = "PCIe, NVLink, fabric"
_RESEAT = "Reseat or replace the card or riser; the kernel log may say `limited by`"


def _slot_width(view: View, device: gpus.Device) -> int | None:
    """Return the lanes of the port above a card; `None` where the machine does not show it, as most VMs do not."""
    address = gpus.value(device, "pci")
    for entry in view.group("driver").data.get("pci") or []:
        if address and _same(entry["address"], address):
            width = entry.get("slot_width")
            return int(width) if width else None
    return None


def _same(one: str, other: str) -> bool:
    """Compare PCI addresses: NVML writes the domain with eight digits, the kernel with four."""
    return _split(one) == _split(other)


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


CHECKS = (pcie_width, pcie_outlier)
