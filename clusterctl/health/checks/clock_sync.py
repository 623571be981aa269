"""Checks of the clocks of the nodes: differences between clocks, and the time daemon."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from clusterctl.health.check import CheckedCluster, CheckedNode, cluster_check, node_check, remedy
from clusterctl.health.findings import Action, Outcome, fail, ok, unknown, warn

_CLOCK_FAMILY = "Clocks"


@remedy(Action.FIX_CONFIG, "Set the clock (`sudo chronyc makestep`) and keep a time daemon running")
@cluster_check("net.clock_skew", _CLOCK_FAMILY, thresholds={"warn": 1.0, "fail": 30.0})
def check_clock_skew(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """The clocks of all nodes agree: certificates, caches and file times depend on the clock.

    The order of log lines does not depend on it, because clusterctl corrects their times.

    Source: the difference between the node's clock and the head's, measured over the connection, with its error bound
    Healthy: within `warn` seconds of the median of all nodes and the head; FAIL above `fail` seconds. The check
        subtracts the error bound from the difference
    """
    clocks = {n.name: n.controller.get("clock") or {} for n in cluster.nodes}
    measured = {node: clock for node, clock in clocks.items() if clock.get("offset") is not None}
    if not measured:
        return unknown("no clock was measured")
    offsets = [clock["offset"] for clock in measured.values()]
    # The clock of the head counts too, so that one of two nodes can be the wrong one.
    reference = 0.0 if len(offsets) == 1 else median([*offsets, 0.0])
    odd = []
    for node, clock in measured.items():
        difference = clock["offset"] - reference
        certain = abs(difference) - (clock.get("error") or 0.0)
        if certain > cluster.limit("warn"):
            say = fail if certain > cluster.limit("fail") else warn
            message = f"clock {abs(difference):.1f} s {'ahead' if difference > 0 else 'behind'}"
            odd.append(say(message, node=node, value=round(difference, 3), expected=cluster.limit("warn")))
    which = "its clock agrees" if len(measured) == 1 else f"{len(measured)} clocks agree"
    return odd or ok(f"{which} within {max(abs(x - reference) for x in offsets):.3f} s")


@remedy(
    Action.FIX_CONFIG,
    "`sudo systemctl enable --now chronyd`, and check that it reaches its servers (`chronyc tracking`)",
)
@node_check("host.time_daemon", _CLOCK_FAMILY, severity="WARN", group="host", thresholds={"error": 16.0, "agree": 0.5})
def check_time_daemon(node: CheckedNode) -> Iterator[Outcome]:
    """A time daemon, or the host of a virtual machine, sets the clock.

    Source: the kernel's error bound of the clock (adjtimex, as timedatectl does); process list; the difference between
        the node's clock and the head's
    Healthy: the error bound is below `error` seconds; it is 16 s if no daemon sets the clock. With a larger bound, a
        clock within `agree` seconds of the head's is healthy too: the host of a virtual machine may set it
    """
    bound, daemon = node.group().facts.get("clock_error"), node.group("procs").facts.get("time_daemon")
    who = f" by {daemon}" if daemon else ""
    if bound is not None and bound < node.limit("error"):
        yield ok(f"the clock is synchronised{who}, within {bound:.3f} s", value=bound)
    elif bound is None and daemon:
        yield ok(f"{daemon} is running")
    elif (apart := _compute_max_skew(node)) is not None and apart <= node.limit("agree"):
        seen = f"{daemon} has not set the clock" if daemon else "no time daemon is visible"
        yield ok(f"{seen}, but it agrees with the head's within {apart:.3f} s", value=apart)
    elif bound is None and node.group("procs").status != "ok":
        yield unknown("neither the kernel nor the process list shows whether a daemon sets the clock")
    else:
        seen = f"{daemon} runs, but has not set the clock" if daemon else "no time daemon is running"
        yield warn(seen, value=bound)


def _compute_max_skew(node: CheckedNode) -> float | None:
    """Return the largest possible difference of the node's clock from the head's, or `None` if there is none."""
    clock = node.controller.get("clock") or {}
    if clock.get("offset") is None:
        return None
    return abs(float(clock["offset"])) + float(clock.get("error") or 0.0)
