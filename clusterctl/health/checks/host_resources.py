"""Checks of the resources of a host: limits of processes, memory and processors."""

from __future__ import annotations

from typing import Any

from clusterctl.formatting import format_size
from clusterctl.health.check import CheckedCluster, CheckedNode, NotJudgedError, cluster_check, node_check, remedy
from clusterctl.health.checks import comparison, gpu_facts, infiniband
from clusterctl.health.findings import Action, Outcome, fail, ok, skip, unknown, warn

_FAMILY = "Host"
_GIB = 1024.0**3


@remedy(
    Action.FIX_LIMITS,
    "Enlarge /dev/shm (`mount -o remount,size=...`; `--shm-size` or `--ipc=host` for a container): NCCL and data "
    "loaders use it",
)
@node_check(
    "host.shm", _FAMILY, group="host", thresholds={"fail": 32.0 * 1024**2, "warn": 1.0 * _GIB, "cpu": 128.0 * 1024**2}
)
def check_shared_memory(node: CheckedNode) -> Outcome:
    """Shared memory is large enough for NCCL and data loaders.

    The default of a container is 64 MiB.

    Source: statvfs of /dev/shm
    Healthy: `warn` free bytes for each rank with a GPU, FAIL below `fail` bytes (NCCL takes 10 MB for each rank,
        nccl#290); `cpu` free bytes for each rank without a GPU
    """
    free, number = node.read("shm", "/dev/shm cannot be measured")["free"], gpu_facts.count_ranks(node)
    has_gpu = gpu_facts.uses_gpus(node)
    wanted = number * node.limit("warn" if has_gpu else "cpu")
    say = fail if has_gpu and free < number * node.limit("fail") else warn if free < wanted else ok
    message = f"{format_size(free)} of shared memory free for {gpu_facts.format_rank_count(node)}"
    return say(message, value=free, expected=wanted)


@remedy(
    Action.FIX_LIMITS,
    "Set `memlock unlimited` in /etc/security/limits.d and `LimitMEMLOCK=infinity` for sshd, `--ulimit memlock=-1` "
    "for a container: RDMA pins memory",
)
@node_check("host.memlock", _FAMILY, group="host", thresholds={"need": 16.0 * _GIB, "fail": 1.0 * _GIB})
def check_memlock_limit(node: CheckedNode) -> Outcome:
    """Workers may lock memory for RDMA.

    Source: RLIMIT_MEMLOCK and capabilities of a process that starts like a worker (CAP_IPC_LOCK removes the limit)
    Healthy: if NCCL would use RDMA: unlimited or at least `need` bytes, FAIL below `fail` bytes. Without RDMA any limit
        is healthy: 64 KiB is the default of many distributions and of Docker
    """
    limit = _read_limit(node, "memlock")
    if limit is None or limit >= node.limit("need"):
        return ok("unlimited" if limit is None else format_size(limit), value=limit)
    blocked = infiniband.find_missing_facts(node)
    if blocked is not None:
        return unknown(f"memlock {format_size(limit)}; {blocked.message}", value=limit)
    selection = infiniband.select_ports(node)
    if not selection.used:
        return ok(f"memlock {format_size(limit)}, enough without RDMA: {selection.why_unused}", value=limit)
    say = fail if limit < node.limit("fail") else warn
    message = f"memlock {format_size(limit)}, but NCCL would use {infiniband.format_port_names(selection.used)}"
    return say(message, value=limit, expected=node.limit("need"))


def _read_limit(node: CheckedNode, name: str) -> Any:
    """Return a resource limit of the node; `None` for unlimited."""
    data = node.group().facts
    if name not in data:
        raise NotJudgedError(unknown("the limit was not reported"))
    return data[name]


@remedy(Action.FIX_LIMITS, "Set a hard `nofile` in /etc/security/limits.d and `LimitNOFILE=` for sshd")
@node_check("host.nofile", _FAMILY, group="host", thresholds={"warn": 4096.0, "fail": 1024.0})
def check_open_files_limit(node: CheckedNode) -> Outcome:
    """Workers may open enough files and sockets.

    Source: hard limit RLIMIT_NOFILE of a process that starts like a worker (clusterctl raises the soft limit to it)
    Healthy: at least `warn`; FAIL below `fail`
    """
    limit = _read_limit(node, "nofile")
    if limit is None or limit >= node.limit("warn"):
        return ok("unlimited" if limit is None else f"{limit} open files", value=limit)
    say = fail if limit < node.limit("fail") else warn
    return say(f"{limit} open files", value=limit, expected=node.limit("warn"))


@remedy(
    Action.FIX_LIMITS,
    "Set `nproc` in /etc/security/limits.d, `TasksMax=` of the slice, or `--pids-limit` of the container",
)
@node_check("host.nproc", _FAMILY, severity="WARN", group="host", thresholds={"warn": 512.0})
def check_process_limit(node: CheckedNode) -> Outcome:
    """Workers may start enough processes and threads.

    Source: RLIMIT_NPROC of a process that starts like a worker (not for root), pids.max of its control groups, version
        1 and 2
    Healthy: `warn` processes and threads per rank: a torch rank with its data loaders on a large machine uses 512
    """
    limits = {
        "the limit of this user": _read_limit(node, "nproc"),
        "the control group": node.group().facts.get("pids_free"),
    }
    given = {what: number for what, number in limits.items() if number is not None}
    if not given:
        return ok("unlimited")
    what, needed = min(given, key=given.__getitem__), node.limit("warn") * gpu_facts.count_ranks(node)
    message = f"{given[what]} processes for {gpu_facts.format_rank_count(node)} by {what}"
    return warn(message, value=given[what], expected=needed) if given[what] < needed else ok(message, value=given[what])


# --- Main memory: free memory, swapping, total memory

_MIB = 1024.0**2


@remedy(
    Action.KILL_PROCS,
    "Find what uses the memory (`ps aux --sort -rss`), or lift the limit of the login session or container",
)
@node_check("host.memory", _FAMILY, severity="WARN", group="host", thresholds={"warn": 0.2, "rank": 2.0 * _GIB})
def check_free_memory(node: CheckedNode) -> Outcome:
    """Main memory is free for the run.

    Source: /proc/meminfo; limit and use of memory of the control groups, version 1 and 2
    Healthy: at least the fraction `warn` of the usable memory is available, and the usable memory is at least `rank`
        bytes for each rank with a GPU. A limit of a scheduler or container alone is no fault
    """
    data = node.group().facts
    total, free, by = data.get("mem_total"), data.get("mem_available"), ""
    if not total or free is None:
        return unknown("/proc/meminfo cannot be read")
    capped = data.get("cgroup_mem_max")
    if capped is not None and capped < total:
        left = data.get("cgroup_mem_free")
        total, free, by = capped, min(free, capped if left is None else left), " by the control group"
    message, least = f"{format_size(free)} of {format_size(total)} available{by}", node.limit("warn") * total
    needed = node.limit("rank") * gpu_facts.count_ranks(node) if gpu_facts.uses_gpus(node) else 0.0
    if free < least:
        return warn(message, value=free, expected=least)
    if total < needed:
        message = f"{format_size(total)} for {gpu_facts.format_rank_count(node)}{by}"
        return warn(message, value=total, expected=needed, action=Action.FIX_LIMITS)
    return ok(message, value=free)


@remedy(
    Action.FIX_CONFIG,
    "Find the process that needs the memory, or run `sudo swapoff -a`: a rank that swaps delays all others",
)
@node_check("host.swap", _FAMILY, severity="WARN", group="host", thresholds={"warn": 1.0 * _MIB})
def check_swapping(node: CheckedNode) -> Outcome:
    """The node does not swap.

    Source: /proc/vmstat, read twice if any page is swapped out
    Healthy: at most `warn` bytes a second swapped in and out; pages that stay swapped out do no harm
    """
    missing = "/proc/meminfo or /proc/vmstat cannot be read"
    used, rate = node.read("swap_used", missing), node.read("swap_rate", missing)
    if rate > node.limit("warn"):
        return warn(f"swapping {format_size(rate)} a second, {format_size(used)} swapped out", value=rate, expected=0)
    return ok(f"{format_size(used)} swapped out, no swapping now", value=rate)


@remedy(Action.CONTACT_SUPPORT, "A memory module may have failed: compare `dmidecode -t memory`")
@cluster_check("host.memory_total", _FAMILY, severity="WARN", thresholds={"ratio": 0.05})
def check_total_memory(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """All nodes have about the same amount of memory: a node with less may have lost a memory module.

    Source: /proc/meminfo of all nodes
    Healthy: at most the fraction `ratio` below the median
    """
    totals = {v.name: v.group("host").facts.get("mem_total") for v in cluster.nodes}
    numbers = {node: float(total) for node, total in totals.items() if total}
    if len(numbers) < 4:
        return skip("fewer than four nodes to compare") if numbers else unknown("no node reports its memory")
    ratio, middle = cluster.limit("ratio"), sorted(numbers.values())[len(numbers) // 2]
    odd = comparison.find_outliers(numbers, lambda x, middle: x < middle * (1 - ratio))
    usual = f"{format_size(middle)} elsewhere"
    return [
        warn(f"{format_size(total)} of memory, {usual}", node=node, value=total, expected=middle)
        for node, total in odd.items()
    ] or ok(f"about equal memory on {len(numbers)} nodes")


# --- Processors: load, usable CPUs, frequencies, clock source

_BY_THEMSELVES = ("intel_pstate", "amd-pstate-epp", "amd-pstate", "amd_pstate")
"""Drivers with which processors choose their own frequency. With these drivers the governor `powersave` is harmless."""
_THRIFTY = ("power", "balance_power")
_FIXED_LOW = ("powersave", "userspace")


@remedy(Action.KILL_PROCS, "Find the processes that use the CPUs: `top` on the node")
@node_check("host.load", _FAMILY, severity="WARN", group="host", thresholds={"warn": 1.5})
def check_cpu_load(node: CheckedNode) -> Outcome:
    """The CPUs are free for the run.

    Source: /proc/loadavg
    Healthy: a load of at most `warn` per CPU
    """
    data = node.group().facts
    load1, cpus = data.get("load1"), data.get("cpus")
    if load1 is None or not cpus:
        return unknown("/proc/loadavg cannot be read")
    most = node.limit("warn") * cpus
    return (warn if load1 > most else ok)(f"load {load1:.1f} on {cpus} CPUs", value=load1, expected=most)


@remedy(
    Action.FIX_LIMITS,
    "Ask the scheduler or container for more CPUs, or lift the limit of the login session (cpuset, taskset)",
)
@node_check("host.cpus", _FAMILY, severity="WARN", group="host", thresholds={"gpu": 2.0, "cpu": 1.0})
def check_usable_cpus(node: CheckedNode) -> Outcome:
    """Workers may use enough CPUs.

    Source: sched_getaffinity of a process that starts like a worker; CPU quota of its control groups, version 1 and 2
    Healthy: `gpu` CPUs for each rank with a GPU, `cpu` CPUs for each rank without a GPU. Fewer CPUs than the machine
        has are no fault
    """
    data = node.group().facts
    every, allowed, quota = data.get("cpus"), data.get("cpus_allowed"), data.get("cpu_quota")
    if not every or not allowed:
        return unknown("CPUs were not reported")
    usable = float(allowed) if quota is None else min(float(allowed), quota)
    needed = gpu_facts.count_ranks(node) * node.limit("gpu" if gpu_facts.uses_gpus(node) else "cpu")
    of_time = f", CPU time of {quota:g} by quota" if usable < allowed else ""
    message = f"{allowed} of {every} CPUs{of_time} for {gpu_facts.format_rank_count(node)}"
    return (
        warn(message, value=usable, expected=needed) if usable < needed else ok(message, value=usable, expected=every)
    )


@remedy(Action.FIX_CONFIG, "`sudo cpupower frequency-set -g performance`")
@node_check("host.governor", _FAMILY, severity="WARN", group="host")
def check_cpu_governor(node: CheckedNode) -> Outcome:
    """The CPUs may run at their full frequency.

    Source: /sys/devices/system/cpu/*/cpufreq: scaling_governor, scaling_driver, energy_performance_preference
    Healthy: no governor that reduces the frequency (`powersave`, `userspace`). If processors choose their frequency
        (intel_pstate, amd-pstate), no preference for saving power. SKIP if the kernel does not set frequencies
    """
    data, governors = node.group().facts, node.read("governors", "governors were not reported")
    if not governors:
        return skip("the kernel does not set CPU frequencies")
    preferences = data.get("preferences") or {}
    by_themselves = data.get("frequency_driver") in _BY_THEMSELVES and bool(preferences)
    settings, bad = (preferences, _THRIFTY) if by_themselves else (governors, _FIXED_LOW)
    what = "preference of the CPUs" if by_themselves else "CPU governor"
    slow = sorted(set(settings) & set(bad))
    if slow and not (by_themselves and set(governors) == {"performance"}):
        return warn(f"{what} {', '.join(slow)}", value=settings, expected="performance")
    return ok(f"{what} {', '.join(sorted(settings))}", value=settings)


@remedy(Action.REBOOT_NODE, "The kernel does not trust the TSC (see its log): reboot the node or update its BIOS")
@node_check("host.clocksource", _FAMILY, severity="WARN", group="host")
def check_clock_source(node: CheckedNode) -> Outcome:
    """Programs can read the clock fast.

    Source: /sys/devices/system/clocksource
    Healthy: tsc, or a clock of the virtual machine or architecture; hpet, acpi_pm and jiffies are WARN
    """
    source = node.group().facts.get("clocksource")
    if not source:
        return unknown("the clock source cannot be read")
    say = warn if source in ("hpet", "acpi_pm", "jiffies") else ok
    return say(f"clock source {source}", value=source, expected="tsc")
