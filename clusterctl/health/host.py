"""Limits and state of the machine, as a worker would meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health import compare
from clusterctl.health.check import ClusterView, View, cluster_check, node_check
from clusterctl.health.model import Action, Outcome, failed, passed, skipped, unknown, warned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FAMILY = "Host"
_GIB = 1024**3


def size(count: float) -> str:
    """Say a number of bytes for a person."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return ""


@node_check(
    name="host.shm",
    family=_FAMILY,
    source="statvfs of /dev/shm",
    threshold="at least `warn` bytes; FAIL under `fail` bytes",
    severity="FAIL",
    remedy=(
        "Enlarge /dev/shm (`mount -o remount,size=...`; `--shm-size` for a container): NCCL and data loaders use it"
    ),
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"fail": 1.0 * _GIB, "warn": 8.0 * _GIB},
)
def shm(view: View) -> Iterator[Outcome]:
    """Shared memory is large enough for NCCL and data loaders.

    A container gives 64 MiB unless told otherwise.
    """
    found = view.group().data.get("shm")
    if not found:
        yield unknown("/dev/shm cannot be measured")
        return
    free = found["free"]
    say = failed if free < view.limit("fail") else warned if free < view.limit("warn") else passed
    yield say(f"{size(free)} of shared memory free", value=free, expected=view.limit("warn"))


@node_check(
    name="host.memlock",
    family=_FAMILY,
    source="RLIMIT_MEMLOCK of a process started as a worker is",
    threshold="unlimited or at least `need` bytes; FAIL where there is RDMA or below `fail` bytes",
    severity="FAIL",
    remedy=(
        "Set `memlock unlimited` in /etc/security/limits.d and `LimitMEMLOCK=infinity` for sshd: "
        "RDMA and pinned memory need it"
    ),
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"need": 16.0 * _GIB, "fail": 64.0 * 1024},
)
def memlock(view: View) -> Iterator[Outcome]:
    """Workers may pin memory. Measured through the same door that workers come by."""
    data = view.group().data
    if "memlock" not in data:
        yield unknown("the limit was not reported")
        return
    limit, rdma = data["memlock"], bool(view.group("net").data.get("ib"))
    if limit is None or limit >= view.limit("need"):
        yield passed("unlimited" if limit is None else size(limit), value=limit)
    elif rdma or limit <= view.limit("fail"):
        yield failed(f"memlock {size(limit)}", value=limit, expected=view.limit("need"))
    elif view.group("net").status != "ok":
        yield unknown(f"memlock {size(limit)}; could not look for RDMA devices", value=limit)
    else:
        yield passed(f"memlock {size(limit)}, enough without RDMA", value=limit)


@node_check(
    name="host.nofile",
    family=_FAMILY,
    source="RLIMIT_NOFILE of a process started as a worker is",
    threshold="at least `warn`; FAIL under `fail`",
    severity="FAIL",
    remedy="Set `nofile` in /etc/security/limits.d and `LimitNOFILE=` for sshd",
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"warn": 8192.0, "fail": 1024.0},
)
def nofile(view: View) -> Iterator[Outcome]:
    """Workers may open enough files and sockets."""
    data = view.group().data
    if "nofile" not in data:
        yield unknown("the limit was not reported")
        return
    limit = data["nofile"]
    if limit is None or limit >= view.limit("warn"):
        yield passed("unlimited" if limit is None else f"{limit} open files", value=limit)
        return
    say = failed if limit < view.limit("fail") else warned
    yield say(f"{limit} open files", value=limit, expected=view.limit("warn"))


@node_check(
    name="host.nproc",
    family=_FAMILY,
    source="RLIMIT_NPROC of a process started as a worker is",
    threshold="at least `warn`",
    severity="WARN",
    remedy="Set `nproc` in /etc/security/limits.d",
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"warn": 4096.0},
)
def nproc(view: View) -> Iterator[Outcome]:
    """Workers may start enough processes and threads."""
    data = view.group().data
    if "nproc" not in data:
        yield unknown("the limit was not reported")
        return
    limit = data["nproc"]
    enough = limit is None or limit >= view.limit("warn")
    say = passed if enough else warned
    yield say(
        "unlimited" if limit is None else f"{limit} processes",
        value=limit,
        expected=None if enough else view.limit("warn"),
    )


@node_check(
    name="host.memory",
    family=_FAMILY,
    source="/proc/meminfo, memory.max of the cgroup",
    threshold="at least `warn` of the memory available, no cgroup limit below `cgroup` of it",
    severity="WARN",
    remedy=("Find what uses the memory (`ps aux --sort -rss`), or lift the limit of the login session's cgroup"),
    action=Action.KILL_PROCS,
    group="host",
    thresholds={"warn": 0.2, "cgroup": 0.9},
)
def memory(view: View) -> Iterator[Outcome]:
    """Main memory is free for the run."""
    data = view.group().data
    total, free, capped = data.get("mem_total"), data.get("mem_available"), data.get("cgroup_mem_max")
    if not total or free is None:
        yield unknown("/proc/meminfo cannot be read")
    elif capped is not None and capped < view.limit("cgroup") * total:
        yield warned(
            f"the cgroup allows {size(capped)} of {size(total)}", value=capped, expected=total, action=Action.FIX_LIMITS
        )
    elif free < view.limit("warn") * total:
        yield warned(f"{size(free)} of {size(total)} available", value=free, expected=view.limit("warn") * total)
    else:
        yield passed(f"{size(free)} of {size(total)} available", value=free)


@node_check(
    name="host.swap",
    family=_FAMILY,
    source="/proc/meminfo",
    threshold="at most `warn` bytes in use",
    severity="WARN",
    remedy="`sudo swapoff -a`: a rank that swaps holds up all others",
    action=Action.FIX_CONFIG,
    group="host",
    thresholds={"warn": 0.1 * _GIB},
)
def swap(view: View) -> Iterator[Outcome]:
    """Nothing is swapped out."""
    used = view.group().data.get("swap_used")
    if used is None:
        yield unknown("/proc/meminfo cannot be read")
        return
    say = warned if used > view.limit("warn") else passed
    yield say(f"{size(used)} swapped out", value=used, expected=0)


@node_check(
    name="host.load",
    family=_FAMILY,
    source="/proc/loadavg",
    threshold="below `warn` a CPU",
    severity="WARN",
    remedy="Something else keeps the CPUs busy; look at `top` on the node",
    action=Action.KILL_PROCS,
    group="host",
    thresholds={"warn": 1.5},
)
def load(view: View) -> Iterator[Outcome]:
    """The CPUs are free for the run."""
    data = view.group().data
    if data.get("load1") is None or not data.get("cpus"):
        yield unknown("/proc/loadavg cannot be read")
        return
    each = data["load1"] / data["cpus"]
    say = warned if each > view.limit("warn") else passed
    yield say(
        f"load {data['load1']:.1f} on {data['cpus']} CPUs",
        value=data["load1"],
        expected=view.limit("warn") * data["cpus"],
    )


@node_check(
    name="host.cpus",
    family=_FAMILY,
    source="sched_getaffinity of a process started as a worker is",
    threshold="all CPUs allowed",
    severity="WARN",
    remedy="Lift the CPU limit of the login session (cpuset, taskset in the prologue)",
    action=Action.FIX_LIMITS,
    group="host",
)
def cpus(view: View) -> Iterator[Outcome]:
    """Workers may use all CPUs."""
    data = view.group().data
    every, allowed = data.get("cpus"), data.get("cpus_allowed")
    if not every or not allowed:
        yield unknown("CPUs were not reported")
        return
    say = warned if allowed < every else passed
    yield say(f"{allowed} of {every} CPUs", value=allowed, expected=every)


@node_check(
    name="host.governor",
    family=_FAMILY,
    source="/sys/devices/system/cpu/*/cpufreq/scaling_governor",
    threshold="performance (or schedutil); SKIP where the kernel does not set frequencies",
    severity="WARN",
    remedy="`sudo cpupower frequency-set -g performance`",
    action=Action.FIX_CONFIG,
    group="host",
)
def governor(view: View) -> Iterator[Outcome]:
    """CPU clocks are not saved on."""
    found = view.group().data.get("governors")
    if found is None:
        yield unknown("governors were not reported")
    elif not found:
        yield skipped("the kernel does not set CPU frequencies")
    elif slow := sorted(set(found) - {"performance", "schedutil"}):
        yield warned(f"CPU governor {', '.join(slow)}", value=found, expected="performance")
    else:
        yield passed(f"CPU governor {', '.join(sorted(found))}", value=found)


@node_check(
    name="host.clocksource",
    family=_FAMILY,
    source="/sys/devices/system/clocksource",
    threshold="tsc, or a clock of the virtual machine or architecture",
    severity="WARN",
    remedy="The kernel gave up on the TSC (see its log); a reboot or a BIOS update brings it back",
    action=Action.REBOOT_NODE,
    group="host",
)
def clocksource(view: View) -> Iterator[Outcome]:
    """Reading the clock is cheap."""
    found = view.group().data.get("clocksource")
    if not found:
        yield unknown("the clock source cannot be read")
        return
    say = warned if found in ("hpet", "acpi_pm", "jiffies") else passed
    yield say(f"clock source {found}", value=found, expected="tsc")


@node_check(
    name="host.uptime",
    family=_FAMILY,
    source="/proc/uptime",
    threshold="more than `warn` seconds",
    severity="WARN",
    remedy="The node has just booted; find out why before trusting it with a long run",
    group="host",
    thresholds={"warn": 600.0},
)
def uptime(view: View) -> Iterator[Outcome]:
    """The node has not just come back from a crash."""
    seconds = view.group().data.get("uptime")
    if seconds is None:
        yield unknown("/proc/uptime cannot be read")
        return
    say = warned if seconds < view.limit("warn") else passed
    yield say(f"up for {seconds / 3600:.1f} h", value=seconds)


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
    known = {v.node: v.group("host").data.get("mem_total") for v in view.views}
    numbers = {node: float(total) for node, total in known.items() if total}
    if not numbers:
        return [unknown("no node tells its memory")]
    if len(numbers) < 4:
        return [skipped("fewer than four nodes to compare")]
    ratio = view.limit("ratio")
    odd = compare.outliers(numbers, lambda x, middle: x < middle * (1 - ratio))
    middle = sorted(numbers.values())[len(numbers) // 2]
    return [
        warned(f"{size(total)} of memory, {size(middle)} elsewhere", node=node, value=total, expected=middle)
        for node, total in odd.items()
    ] or [passed(f"memory alike on {len(numbers)} nodes")]


CHECKS = (shm, memlock, nofile, nproc, memory, swap, load, cpus, governor, clocksource, uptime, memory_total)
