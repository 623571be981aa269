"""The machine as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.check import View, node_check
from clusterctl.health.model import Outcome, ok, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

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


CHECKS = (uptime,)
