"""Processors: how many a worker may use, what else keeps them busy, and how their clocks are set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.check import View, node_check
from clusterctl.health.checks import ranks
from clusterctl.health.model import Action, Outcome, ok, skip, unknown, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

_FAMILY = "Host"
_BY_THEMSELVES = ("intel_pstate", "amd-pstate-epp", "amd-pstate", "amd_pstate")
"""Drivers under which processors choose their clocks; `powersave` is then the usual governor and saves nothing."""
_THRIFTY = ("power", "balance_power")
_FIXED_LOW = ("powersave", "userspace")


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
    say = warn if each > view.limit("warn") else ok
    message = f"load {data['load1']:.1f} on {data['cpus']} CPUs"
    yield say(message, value=data["load1"], expected=view.limit("warn") * data["cpus"])


@node_check(
    name="host.cpus",
    family=_FAMILY,
    source="sched_getaffinity of a process started as a worker is; CPU quota of its control groups, version 1 and 2",
    threshold="`gpu` CPUs for a rank with a GPU, `cpu` for one without; a share of the machine is no fault by itself",
    severity="WARN",
    remedy="Ask the scheduler or container for more CPUs, or lift the limit of the login session (cpuset, taskset)",
    action=Action.FIX_LIMITS,
    group="host",
    thresholds={"gpu": 2.0, "cpu": 1.0},
)
def cpus(view: View) -> Iterator[Outcome]:
    """Workers may use enough CPUs."""
    data = view.group().data
    every, allowed, quota = data.get("cpus"), data.get("cpus_allowed"), data.get("cpu_quota")
    if not every or not allowed:
        yield unknown("CPUs were not reported")
        return
    usable = float(allowed) if quota is None else min(float(allowed), quota)
    needed = ranks.count_ranks(view) * view.limit("gpu" if ranks.uses_gpus(view) else "cpu")
    of_time = f", time of {quota:g} by quota" if usable < allowed else ""
    say = warn if usable < needed else ok
    message = f"{allowed} of {every} CPUs{of_time} for {ranks.describe_ranks(view)}"
    yield say(message, value=usable, expected=needed if say is warn else every)


@node_check(
    name="host.governor",
    family=_FAMILY,
    source="/sys/devices/system/cpu/*/cpufreq: scaling_governor, scaling_driver, energy_performance_preference",
    threshold=(
        "no governor that keeps clocks down (`powersave`, `userspace`); where processors choose their clocks "
        "(intel_pstate, amd-pstate) no preference for saving power; SKIP where the kernel does not set frequencies"
    ),
    severity="WARN",
    remedy="`sudo cpupower frequency-set -g performance`",
    action=Action.FIX_CONFIG,
    group="host",
)
def governor(view: View) -> Iterator[Outcome]:
    """CPU clocks are not saved on."""
    data = view.group().data
    governors, preferences = data.get("governors"), data.get("preferences") or {}
    if governors is None:
        yield unknown("governors were not reported")
        return
    if not governors:
        yield skip("the kernel does not set CPU frequencies")
        return
    by_themselves = data.get("frequency_driver") in _BY_THEMSELVES and bool(preferences)
    seen, bad = (preferences, _THRIFTY) if by_themselves else (governors, _FIXED_LOW)
    what = "preference of the CPUs" if by_themselves else "CPU governor"
    slow = sorted(set(seen) & set(bad))
    if slow and not (by_themselves and set(governors) == {"performance"}):
        yield warn(f"{what} {', '.join(slow)}", value=seen, expected="performance")
    else:
        yield ok(f"{what} {', '.join(sorted(seen))}", value=seen)


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
    source = view.group().data.get("clocksource")
    if not source:
        yield unknown("the clock source cannot be read")
        return
    say = warn if source in ("hpet", "acpi_pm", "jiffies") else ok
    yield say(f"clock source {source}", value=source, expected="tsc")


CHECKS = (load, cpus, governor, clocksource)
