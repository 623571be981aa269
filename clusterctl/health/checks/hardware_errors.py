"""Checks for signs of bad hardware: reboots during a run, and error counters of PCIe links and main memory."""

from __future__ import annotations

from typing import Any

from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.findings import Action, Outcome, ok, skip, warn

RECENT_BOOT_S = 600.0
"""Seconds after a boot during which the head checks whether the reboot interrupted a run."""


@remedy(
    Action.NONE, "Find out why the node went down (`last -x`, `journalctl -b -1`) before trusting it with a long run"
)
@node_check("host.uptime", "Host", severity="WARN", group="host", thresholds={"warn": RECENT_BOOT_S})
def check_no_reboot_in_run(node: CheckedNode) -> Outcome:
    """The node did not reboot during a recent run.

    Source: /proc/uptime; boot ids that this head knows, and runs that lost the node
    Healthy: more than `warn` seconds since the boot if the node went down during a run of this head. A reboot between
        runs is no problem, because it is the remedy of many faults
    """
    seconds, lost = node.read("uptime", "/proc/uptime cannot be read"), node.controller.get("rebooted_under")
    since = f"up for {seconds / 3600:.1f} h"
    if lost and seconds < node.limit("warn"):
        return warn(f"{since}: it went down during run {lost}", value=seconds)
    return ok(since, value=seconds)


# --- Error counters since the boot: PCIe links of GPUs and network cards, and main memory

_FAMILY = "Host"
_LINK_ERRORS = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
"""Names of correctable errors of the link itself. Other correctable errors are only notes."""
_HARMLESS_ERRORS = frozenset({"UnsupReq", "SDES"})
"""Harmless errors: a request that a card does not support (as in a bus scan), and a link that goes down in a reset."""
_DAY = 86400.0


@remedy(
    Action.CHECK_LINK,
    "Reseat the card or its riser. If errors continue, swap the card with another one: if the errors move with it, the "
    "card is broken, otherwise the slot",
)
@node_check("host.pcie_errors", _FAMILY, severity="WARN", group="hardware", thresholds={"rate": 8.0})
def check_pcie_errors(node: CheckedNode) -> Outcome | list[Outcome]:
    """The PCIe links of GPUs and network cards carry data without errors.

    Source: sysfs aer_dev_correctable, aer_dev_nonfatal, aer_dev_fatal of GPUs and network cards, of the port above each
        and of its root port
    Healthy: since the boot fewer than `rate` corrected link errors a minute (DCGM's limit for PCIe replays), and no
        uncorrected errors, except unsupported requests and links that went down for a reset
    """
    links, uptime = node.read("pcie", "errors of PCIe links were not reported"), node.group("host").facts.get("uptime")
    if not links:
        return skip("this machine does not count errors of PCIe links")
    errors = {link["address"]: (link["of"], _describe_errors(link, uptime, node.limit("rate"))) for link in links}
    bad = [warn(f"{of} ({address}): {words}", value=address) for address, (of, words) in errors.items() if words]
    return bad or ok(f"no relevant errors on {len(links)} PCIe links")


def _describe_errors(link: dict[str, Any], uptime: float | None, rate: float) -> str:
    grave = {f"{kind} ({grade})": n for grade in ("fatal", "nonfatal") for kind, n in link[grade].items()}
    grave = {words: n for words, n in grave.items() if words.partition(" ")[0] not in _HARMLESS_ERRORS}
    corrected = sum(n for kind, n in link["correctable"].items() if kind in _LINK_ERRORS)
    errors = [f"{n} {words}" for words, n in grave.items()]
    if uptime and corrected / max(uptime / 60, 1.0) > rate:
        errors.append(f"{corrected} corrected link errors, {corrected * 60 / uptime:.0f} a minute")
    return ", ".join(errors)


@remedy(Action.CONTACT_SUPPORT, "Have the memory module replaced; `ras-mc-ctl --error-count` names it")
@node_check("host.memory_errors", _FAMILY, severity="WARN", group="hardware", thresholds={"corrected": 1000.0})
def check_memory_errors(node: CheckedNode) -> Outcome | list[Outcome]:
    """Main memory works: many corrected errors often precede uncorrected ones.

    Source: sysfs edac/mc/*/ce_count, ue_count, seconds_since_reset
    Healthy: no uncorrected error, and fewer than `corrected` corrected errors a day. SKIP if the machine does not count
        errors (no ECC, a virtual machine, or firmware that hides them)
    """
    controllers, most = node.read("memory", "errors of memory were not reported"), node.limit("corrected")
    bad = []
    for entry in controllers:
        corrected, uncorrected = entry.get("corrected") or 0, entry.get("uncorrected") or 0
        a_day = corrected / max((entry.get("seconds") or 0) / _DAY, 1.0)
        if uncorrected:
            bad.append(warn(f"{entry['controller']}: {uncorrected} uncorrected memory errors", value=uncorrected))
        elif a_day > most:
            message = f"{entry['controller']}: {a_day:.0f} corrected memory errors a day"
            bad.append(warn(message, value=corrected, expected=most))
    if not controllers:
        return skip("this machine does not count errors of memory")
    return bad or ok(f"no relevant errors on {len(controllers)} memory controllers")
