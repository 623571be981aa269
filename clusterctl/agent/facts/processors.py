"""How the processors are run: who sets their clocks, and how time is told."""

from __future__ import annotations

from clusterctl.agent.linux import paths, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import host as shapes

_BASE = "/sys/devices/system/cpu"
_PREFERENCES = 16
"""Processors asked for their preference: each answer may cost an interrupt, and all are set alike."""


def collect(root: str) -> shapes.Processors:
    """Return the processors' part of the group `host`."""
    processors = [name for name in paths.names(root, _BASE) if name.startswith("cpu") and name[3:].isdigit()]
    first = f"{_BASE}/{processors[0]}/cpufreq" if processors else ""
    return {
        "load1": first_number(paths.text(root, "/proc/loadavg")),
        "governors": _count(root, processors, "scaling_governor"),
        "frequency_driver": paths.text(root, f"{first}/scaling_driver") if first else None,
        "preferences": _count(root, processors[:_PREFERENCES], "energy_performance_preference"),
        "clocksource": paths.text(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_error": syscalls.clock_error() if root == "/" else None,
    }


def _count(root: str, names: list[str], file: str) -> dict[str, int]:
    count: dict[str, int] = {}
    for name in names:
        value = paths.text(root, f"{_BASE}/{name}/cpufreq/{file}")
        if value:
            count[value] = count.get(value, 0) + 1
    return count


def first_number(content: str | None) -> float | None:
    """Return the number that a file of /proc begins with."""
    try:
        return float((content or "").split()[0])
    except (IndexError, ValueError):
        return None
