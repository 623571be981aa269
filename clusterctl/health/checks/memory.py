"""Main memory: what is free of it for the run, whether anything swaps, and whether a module is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import format_size
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.checks import compare, ranks
from clusterctl.health.model import Action, Outcome, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FAMILY = "Host"
_GIB = 1024.0**3
_MIB = 1024.0**2


@node_check(
    name="host.memory",
    family=_FAMILY,
    source="/proc/meminfo; limit and use of memory of the control groups, version 1 and 2",
    threshold=(
        "at least `warn` available of what we may use, and `rank` bytes for each rank with a GPU; a limit by itself is "
        "what a scheduler or a container is for"
    ),
    severity="WARN",
    remedy="Find what uses the memory (`ps aux --sort -rss`), or lift the limit of the login session or container",
    action=Action.KILL_PROCS,
    group="host",
    thresholds={"warn": 0.2, "rank": 2.0 * _GIB},
)
def memory(view: View) -> Iterator[Outcome]:
    """Main memory is free for the run."""
    data = view.group().data
    total, free, capped = data.get("mem_total"), data.get("mem_available"), data.get("cgroup_mem_max")
    if not total or free is None:
        yield unknown("/proc/meminfo cannot be read")
        return
    by = ""
    if capped is not None and capped < total:
        left = data.get("cgroup_mem_free")
        total, free, by = capped, min(free, capped if left is None else left), " by the control group"
    needed = view.limit("rank") * ranks.count_ranks(view) if ranks.uses_gpus(view) else 0.0
    if free < view.limit("warn") * total:
        yield warn(
            f"{format_size(free)} of {format_size(total)} available{by}",
            value=free,
            expected=view.limit("warn") * total,
        )
    elif total < needed:
        message = f"{format_size(total)} for {ranks.describe_ranks(view)}{by}"
        yield warn(message, value=total, expected=needed, action=Action.FIX_LIMITS)
    else:
        yield ok(f"{format_size(free)} of {format_size(total)} available{by}", value=free)


@node_check(
    name="host.swap",
    family=_FAMILY,
    source="/proc/vmstat, looked at twice where anything is swapped out",
    threshold="at most `warn` bytes a second in and out; what has been swapped out and lies there harms nobody",
    severity="WARN",
    remedy="Find what needs the memory; `sudo swapoff -a` if in doubt: a rank that swaps holds up all others",
    action=Action.FIX_CONFIG,
    group="host",
    thresholds={"warn": 1.0 * _MIB},
)
def swap(view: View) -> Iterator[Outcome]:
    """Nothing moves between memory and the swap space."""
    used, rate = view.group().data.get("swap_used"), view.group().data.get("swap_rate")
    if used is None or rate is None:
        yield unknown("/proc/meminfo or /proc/vmstat cannot be read")
    elif rate > view.limit("warn"):
        yield warn(f"swapping {format_size(rate)} a second, {format_size(used)} swapped out", value=rate, expected=0)
    else:
        yield ok(f"{format_size(used)} swapped out, nothing moves", value=rate)


@cluster_check(
    name="host.memory_total",
    family=_FAMILY,
    source="/proc/meminfo of all nodes",
    threshold="within `ratio` of the median",
    severity="WARN",
    remedy="A memory module may have failed: compare `dmidecode -t memory`",
    action=Action.CONTACT_SUPPORT,
    thresholds={"ratio": 0.05},
)
def memory_total(view: ClusterView) -> Iterable[Outcome]:
    """All nodes have about the same amount of memory: one with less may have lost a module."""
    totals = {v.node: v.group("host").data.get("mem_total") for v in view.views}
    numbers = {node: float(total) for node, total in totals.items() if total}
    if not numbers:
        return [unknown("no node tells its memory")]
    if len(numbers) < 4:
        return [skip("fewer than four nodes to compare")]
    ratio = view.limit("ratio")
    odd = compare.find_outliers(numbers, lambda x, middle: x < middle * (1 - ratio))
    middle = sorted(numbers.values())[len(numbers) // 2]
    return [
        warn(
            f"{format_size(total)} of memory, {format_size(middle)} elsewhere", node=node, value=total, expected=middle
        )
        for node, total in odd.items()
    ] or [ok(f"memory alike on {len(numbers)} nodes")]


CHECKS = (memory, swap, memory_total)
