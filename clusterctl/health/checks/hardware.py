"""Errors that hardware has counted since the boot: PCIe links of GPUs and network cards, and main memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.check import View, node_check
from clusterctl.health.model import Action, Outcome, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Host"
_LINK = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
"""Correctable errors of the link itself; what else is correctable is advice."""
_HARMLESS = frozenset({"UnsupReq", "SDES"})
"""Asked for something that a card does not have, as a look over the bus does; and a card that went for a reset."""
_DAY = 86400.0


@node_check(
    name="host.pcie_errors",
    family=_FAMILY,
    source=(
        "sysfs aer_dev_correctable, aer_dev_nonfatal, aer_dev_fatal of GPUs and network cards, of the port above each "
        "and of its root port"
    ),
    threshold=(
        "since the boot fewer than `rate` corrected link errors a minute (DCGM's policy for PCIe replays) and no "
        "others, except requests that a card does not support and links that went down for a reset"
    ),
    severity="WARN",
    remedy="Reseat the card or its riser, and exchange it with another one to see which of both the errors follow",
    action=Action.CHECK_LINK,
    group="hardware",
    thresholds={"rate": 8.0},
)
def pcie_errors(view: View) -> Iterator[Outcome]:
    """The PCIe links of GPUs and network cards carry data without errors."""
    links, uptime = view.group().data.get("pcie"), view.group("host").data.get("uptime")
    if links is None:
        yield unknown("errors of PCIe links were not reported")
        return
    bad = False
    for link in links:
        words = _errors(link, uptime, view.limit("rate"))
        if words:
            bad = True
            yield warn(f"{link['of']} ({link['address']}): {words}", value=link["address"])
    if not links:
        yield skip("this machine counts no errors of PCIe links")
    elif not bad:
        yield ok(f"{len(links)} PCIe links without errors that matter")


def _errors(link: dict[str, Any], uptime: float | None, rate: float) -> str:
    grave = {f"{kind} ({grade})": n for grade in ("fatal", "nonfatal") for kind, n in link[grade].items()}
    grave = {words: n for words, n in grave.items() if words.partition(" ")[0] not in _HARMLESS}
    corrected = sum(n for kind, n in link["correctable"].items() if kind in _LINK)
    errors = [f"{n} {words}" for words, n in grave.items()]
    if uptime and corrected / max(uptime / 60, 1.0) > rate:
        errors.append(f"{corrected} corrected link errors, {corrected * 60 / uptime:.0f} a minute")
    return ", ".join(errors)


@node_check(
    name="host.memory_errors",
    family=_FAMILY,
    source="sysfs edac/mc/*/ce_count, ue_count, seconds_since_reset",
    threshold=(
        "no uncorrected error, and fewer than `corrected` a day that were corrected; one alone is what ECC is for. "
        "SKIP where the machine counts none (no ECC, a virtual machine, or firmware that keeps them to itself)"
    ),
    severity="WARN",
    remedy="Have the memory module replaced; `ras-mc-ctl --error-count` names it",
    action=Action.CONTACT_SUPPORT,
    group="hardware",
    thresholds={"corrected": 1000.0},
)
def memory_errors(view: View) -> Iterator[Outcome]:
    """Main memory is sound: errors that had to be corrected often come before those that cannot be."""
    controllers = view.group().data.get("memory")
    if controllers is None:
        yield unknown("errors of memory were not reported")
        return
    bad = False
    for entry in controllers:
        corrected, uncorrected = entry.get("corrected") or 0, entry.get("uncorrected") or 0
        days = max((entry.get("seconds") or 0) / _DAY, 1.0)
        if uncorrected:
            bad = True
            yield warn(f"{entry['controller']}: {uncorrected} uncorrected memory errors", value=uncorrected)
        elif corrected / days > view.limit("corrected"):
            bad = True
            message = f"{entry['controller']}: {corrected / days:.0f} corrected memory errors a day"
            yield warn(message, value=corrected, expected=view.limit("corrected"))
    if not controllers:
        yield skip("this machine counts no errors of memory")
    elif not bad:
        yield ok(f"{len(controllers)} memory controllers without errors that matter")


CHECKS = (pcie_errors, memory_errors)
