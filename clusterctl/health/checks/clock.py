"""Clocks of the nodes against each other."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.model import Action, Outcome, fail, ok, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Clocks"


@cluster_check(
    name="net.clock_skew",
    family=_FAMILY,
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
    family=_FAMILY,
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


CHECKS = (clock_skew, time_daemon)
