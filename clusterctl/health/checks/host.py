"""The machine: uptime, counted hardware errors, and the clock."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.model import Action, Outcome, fail, ok, skip, unknown, warn

YOUNG = 600.0
"""Seconds after a boot in which it is asked whether a run was lost by it."""


@node_check(
    name="host.uptime",
    family="Host",
    source="/proc/uptime; boot ids that this head has seen, and runs that lost the node",
    threshold=(
        "more than `warn` seconds, where the node went down under a run of this head; a reboot between runs is what is "
        "advised for many faults"
    ),
    severity="WARN",
    remedy="Find out why the node went down (`last -x`, `journalctl -b -1`) before trusting it with a long run",
    group="host",
    thresholds={"warn": YOUNG},
)
def uptime(view: View) -> Iterator[Outcome]:
    """The node has not just come back from a crash."""
    seconds, lost = view.group().data.get("uptime"), view.controller.get("rebooted_under")
    if seconds is None:
        yield unknown("/proc/uptime cannot be read")
        return
    since = f"up for {seconds / 3600:.1f} h"
    if lost and seconds < view.limit("warn"):
        yield warn(f"{since}: it went down under run {lost}", value=seconds)
    else:
        yield ok(since, value=seconds)


# --- Errors that hardware has counted since the boot: PCIe links of GPUs and network cards, and main memory.

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


# --- Clocks of the nodes against each other.

_CLOCK_FAMILY = "Clocks"


@cluster_check(
    name="net.clock_skew",
    family=_CLOCK_FAMILY,
    source=("the node's clock against the controller's, measured over the connection with a bound of its error"),
    threshold=(
        "within `warn` seconds of the median of all nodes and the head; FAIL above `fail` "
        "seconds; the error is in the node's favour"
    ),
    severity="FAIL",
    remedy="Set the clock (`sudo chronyc makestep`) and keep a time daemon running",
    action=Action.FIX_CONFIG,
    thresholds={"warn": 1.0, "fail": 30.0},
)
def clock_skew(view: ClusterView) -> Iterator[Outcome]:
    """Clocks agree: certificates, caches and file times depend on it.

    Logs do not: clusterctl never orders events by them.
    """
    clocks = {n.node: n.controller.get("clock") or {} for n in view.views}
    asked_in_time = {node: clock for node, clock in clocks.items() if clock.get("offset") is not None}
    if not asked_in_time:
        yield unknown("no clock was measured")
        return
    offsets = [clock["offset"] for clock in asked_in_time.values()]
    # The head votes too, so that one of two nodes can be told to be the odd one.
    reference = 0.0 if len(offsets) == 1 else median([*offsets, 0.0])
    odd = False
    for node, clock in asked_in_time.items():
        apart = clock["offset"] - reference
        sure = abs(apart) - (clock.get("error") or 0.0)
        if sure > view.limit("warn"):
            odd = True
            say = fail if sure > view.limit("fail") else warn
            side = "ahead" if apart > 0 else "behind"
            yield say(f"clock {abs(apart):.1f} s {side}", node=node, value=round(apart, 3), expected=view.limit("warn"))
    if not odd:
        which = "its clock agrees" if len(asked_in_time) == 1 else f"{len(asked_in_time)} clocks agree"
        yield ok(f"{which} within {max(abs(x - reference) for x in offsets):.3f} s")


@node_check(
    name="host.time_daemon",
    family=_CLOCK_FAMILY,
    source=(
        "adjtimex: the bound that the kernel has for the clock's error (as systemd's timedatectl does; no root, and in "
        "containers too); process list; the node's clock against the head's"
    ),
    threshold=(
        "the bound is below `error` seconds: at 16 s nobody keeps the clock. Where it is not, but the clock agrees "
        "with the head's within `agree` seconds, something else keeps it (the host of a virtual machine), which is said"
    ),
    severity="WARN",
    remedy="`sudo systemctl enable --now chronyd`, and see that it reaches its servers (`chronyc tracking`)",
    action=Action.FIX_CONFIG,
    group="host",
    thresholds={"error": 16.0, "agree": 0.5},
)
def time_daemon(view: View) -> Iterator[Outcome]:
    """Something keeps the clock right."""
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


def _from_head(view: View) -> float | None:
    """Return by how many seconds the node's clock differs from the head's at most, or `None` where nobody measured."""
    clock = view.controller.get("clock") or {}
    if clock.get("offset") is None:
        return None
    return abs(float(clock["offset"])) + float(clock.get("error") or 0.0)
