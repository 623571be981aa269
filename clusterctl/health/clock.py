"""Clocks of the nodes against each other."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.model import Action, Outcome, failed, passed, unknown, warned

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
    known = {node: clock for node, clock in clocks.items() if clock.get("offset") is not None}
    if not known:
        yield unknown("no clock was measured")
        return
    offsets = [clock["offset"] for clock in known.values()]
    # The head votes too, so that one of two nodes can be told to be the odd one.
    reference = 0.0 if len(offsets) == 1 else median([*offsets, 0.0])
    odd = False
    for node, clock in known.items():
        apart = clock["offset"] - reference
        sure = abs(apart) - (clock.get("error") or 0.0)
        if sure > view.limit("warn"):
            odd = True
            say = failed if sure > view.limit("fail") else warned
            side = "ahead" if apart > 0 else "behind"
            yield say(f"clock {abs(apart):.1f} s {side}", node=node, value=round(apart, 3), expected=view.limit("warn"))
    if not odd:
        yield passed(f"{len(known)} clocks agree within {max(abs(x - reference) for x in offsets):.3f} s")


@node_check(
    name="host.time_daemon",
    family=_FAMILY,
    source="process list",
    threshold="chronyd, ntpd, systemd-timesyncd or ptp4l runs",
    severity="WARN",
    remedy="`sudo systemctl enable --now chronyd` (a virtual machine may get its time from its host)",
    action=Action.FIX_CONFIG,
    group="procs",
)
def time_daemon(view: View) -> Iterator[Outcome]:
    """Something keeps the clock right."""
    data = view.group().data
    if "time_daemon" not in data:
        yield unknown("the process list was not reported")
    elif data["time_daemon"]:
        yield passed(f"{data['time_daemon']} is running")
    else:
        yield warned("no time daemon is running")


CHECKS = (clock_skew, time_daemon)
