"""The machine: uptime, counted hardware errors, and the clock."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from clusterctl.health.check import ClusterView, NodeView, cluster_check, node_check, remedy
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

RECENT_BOOT_S = 600.0
"""Seconds after a boot in which it is asked whether a run was lost by it."""


@remedy(
    Action.NONE, "Find out why the node went down (`last -x`, `journalctl -b -1`) before trusting it with a long run"
)
@node_check("host.uptime", "Host", severity="WARN", group="host", thresholds={"warn": RECENT_BOOT_S})
def check_uptime(view: NodeView) -> Outcome:
    """The node has not just come back from a crash.

    Source: /proc/uptime; boot ids that this head knows, and runs that lost the node
    Healthy: more than `warn` seconds if the node went down during a run of this head. A reboot between runs is fine: it
        is the remedy of many faults
    """
    seconds, lost = view.read("uptime", "/proc/uptime cannot be read"), view.controller.get("rebooted_under")
    since = f"up for {seconds / 3600:.1f} h"
    if lost and seconds < view.limit("warn"):
        return warn(f"{since}: it went down under run {lost}", value=seconds)
    return ok(since, value=seconds)


# --- Errors that hardware has counted since the boot: PCIe links of GPUs and network cards, and main memory.

_FAMILY = "Host"
_LINK = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
"""Correctable errors of the link itself; what else is correctable is advice."""
_HARMLESS = frozenset({"UnsupReq", "SDES"})
"""Asked for something that a card does not have, as a look over the bus does; and a card that went for a reset."""
_DAY = 86400.0


@remedy(
    Action.CHECK_LINK,
    "Reseat the card or its riser, and exchange it with another one to see which of both the errors follow",
)
@node_check("host.pcie_errors", _FAMILY, severity="WARN", group="hardware", thresholds={"rate": 8.0})
def check_pcie_errors(view: NodeView) -> Outcome | list[Outcome]:
    """The PCIe links of GPUs and network cards carry data without errors.

    Source: sysfs aer_dev_correctable, aer_dev_nonfatal, aer_dev_fatal of GPUs and network cards, of the port above each
        and of its root port
    Healthy: since the boot fewer than `rate` corrected link errors a minute (DCGM's policy for PCIe replays), and no
        other errors, except requests that a card does not support and links that went down for a reset
    """
    links, uptime = view.read("pcie", "errors of PCIe links were not reported"), view.group("host").data.get("uptime")
    if not links:
        return skip("this machine counts no errors of PCIe links")
    errors = {link["address"]: (link["of"], _errors(link, uptime, view.limit("rate"))) for link in links}
    bad = [warn(f"{of} ({address}): {words}", value=address) for address, (of, words) in errors.items() if words]
    return bad or ok(f"{len(links)} PCIe links without errors that matter")


def _errors(link: dict[str, Any], uptime: float | None, rate: float) -> str:
    grave = {f"{kind} ({grade})": n for grade in ("fatal", "nonfatal") for kind, n in link[grade].items()}
    grave = {words: n for words, n in grave.items() if words.partition(" ")[0] not in _HARMLESS}
    corrected = sum(n for kind, n in link["correctable"].items() if kind in _LINK)
    errors = [f"{n} {words}" for words, n in grave.items()]
    if uptime and corrected / max(uptime / 60, 1.0) > rate:
        errors.append(f"{corrected} corrected link errors, {corrected * 60 / uptime:.0f} a minute")
    return ", ".join(errors)


@remedy(Action.CONTACT_SUPPORT, "Have the memory module replaced; `ras-mc-ctl --error-count` names it")
@node_check("host.memory_errors", _FAMILY, severity="WARN", group="hardware", thresholds={"corrected": 1000.0})
def check_memory_errors(view: NodeView) -> Outcome | list[Outcome]:
    """Main memory works: many corrected errors often precede uncorrected ones.

    Source: sysfs edac/mc/*/ce_count, ue_count, seconds_since_reset
    Healthy: no uncorrected error, and fewer than `corrected` corrected errors a day; ECC is made for single errors.
        SKIP if the machine counts no errors (no ECC, a virtual machine, or firmware that hides them)
    """
    controllers, most = view.read("memory", "errors of memory were not reported"), view.limit("corrected")
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
        return skip("this machine counts no errors of memory")
    return bad or ok(f"{len(controllers)} memory controllers without errors that matter")


# --- Clocks of the nodes against each other.

_CLOCK_FAMILY = "Clocks"


@remedy(Action.FIX_CONFIG, "Set the clock (`sudo chronyc makestep`) and keep a time daemon running")
@cluster_check("net.clock_skew", _CLOCK_FAMILY, thresholds={"warn": 1.0, "fail": 30.0})
def check_clock_skew(view: ClusterView) -> Outcome | list[Outcome]:
    """Clocks agree: certificates, caches and file times depend on it.

    Logs do not: clusterctl never orders events by them.

    Source: the node's clock against the controller's, measured over the connection with a bound of its error
    Healthy: within `warn` seconds of the median of all nodes and the head; FAIL above `fail` seconds. The measurement
        error counts in favour of the node
    """
    clocks = {n.node: n.controller.get("clock") or {} for n in view.views}
    measured = {node: clock for node, clock in clocks.items() if clock.get("offset") is not None}
    if not measured:
        return unknown("no clock was measured")
    offsets = [clock["offset"] for clock in measured.values()]
    # The head votes too, so that one of two nodes can be told to be the odd one.
    reference = 0.0 if len(offsets) == 1 else median([*offsets, 0.0])
    odd = []
    for node, clock in measured.items():
        difference = clock["offset"] - reference
        certain = abs(difference) - (clock.get("error") or 0.0)
        if certain > view.limit("warn"):
            say = fail if certain > view.limit("fail") else warn
            message = f"clock {abs(difference):.1f} s {'ahead' if difference > 0 else 'behind'}"
            odd.append(say(message, node=node, value=round(difference, 3), expected=view.limit("warn")))
    which = "its clock agrees" if len(measured) == 1 else f"{len(measured)} clocks agree"
    return odd or ok(f"{which} within {max(abs(x - reference) for x in offsets):.3f} s")


@remedy(
    Action.FIX_CONFIG, "`sudo systemctl enable --now chronyd`, and see that it reaches its servers (`chronyc tracking`)"
)
@node_check("host.time_daemon", _CLOCK_FAMILY, severity="WARN", group="host", thresholds={"error": 16.0, "agree": 0.5})
def check_time_daemon(view: NodeView) -> Iterator[Outcome]:
    """A time daemon, or the host of a virtual machine, sets the clock.

    Source: adjtimex: the bound that the kernel has for the clock's error (as systemd's timedatectl does; no root, and
        in containers too); process list; the node's clock against the head's
    Healthy: the bound is below `error` seconds: it is 16 s if no daemon sets the clock. With a larger bound, a clock
        within `agree` seconds of the head's passes too (the host of a virtual machine may set it), and the finding says
        so
    """
    bound, daemon = view.group().data.get("clock_error"), view.group("procs").data.get("time_daemon")
    who = f" by {daemon}" if daemon else ""
    if bound is not None and bound < view.limit("error"):
        yield ok(f"the clock is kept{who}, within {bound:.3f} s", value=bound)
    elif bound is None and daemon:
        yield ok(f"{daemon} is running")
    elif (apart := _from_head(view)) is not None and apart <= view.limit("agree"):
        seen = f"{daemon} has not set the clock" if daemon else "no time daemon is seen"
        yield ok(f"{seen}, but it agrees with the head's within {apart:.3f} s", value=apart)
    elif bound is None and view.group("procs").status != "ok":
        yield unknown("neither the kernel nor the process list tells who keeps the clock")
    else:
        seen = f"{daemon} runs and has not set the clock" if daemon else "no time daemon is running"
        yield warn(seen, value=bound)


def _from_head(view: NodeView) -> float | None:
    """Return the largest possible difference of the node's clock from the head's, or `None` if it was not measured."""
    clock = view.controller.get("clock") or {}
    if clock.get("offset") is None:
        return None
    return abs(float(clock["offset"])) + float(clock.get("error") or 0.0)
