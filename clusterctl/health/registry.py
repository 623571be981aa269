"""The registry of all health checks, sorted by family."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from clusterctl.config.spec import SAMPLING_INTERVAL_KEY, HealthSpec
from clusterctl.health.check import Check
from clusterctl.health.checks import (
    amd,
    clock_sync,
    framework,
    gpu_driver,
    gpu_failures,
    gpu_links,
    gpu_memory,
    gpu_presence,
    gpu_thermal,
    gpu_usage,
    hardware_errors,
    host_resources,
    infiniband,
    machine_kernel_log,
    network,
    storage,
    versions,
    xid,
)
from clusterctl.health.deep import comparison

_FAMILIES = (
    *("Network", "RDMA", "GPU driver", "GPU state", "XID and SXid", "GPU memory", "GPU temperature, power, clocks"),
    *("PCIe, NVLink, fabric", "GPU already in use", "GPU modes", "Host", "Disks and mounts", "Kernel log"),
    *("Rendezvous", "Clocks", "Versions", "Under load"),
)
_MODULES = (
    *(network, infiniband, gpu_driver, gpu_presence, gpu_failures, xid, amd, gpu_memory, gpu_thermal, gpu_links),
    *(gpu_usage, host_resources, hardware_errors, clock_sync, storage, machine_kernel_log, versions, framework),
    comparison,
)
_ALL = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Check)]

CHECKS = {check.name: check for check in sorted(_ALL, key=lambda check: _FAMILIES.index(check.family))}
"""Checks by name."""

DEADLINE_KEY = "probe.deadline"
"""Name of the threshold that limits the collection of facts on a node, in seconds. This threshold belongs to no
check."""
LIMIT_KEYS = ("slowdown", "stuck", "disk", "clear_after", "silence", "recovered_after")
"""Thresholds `during.KEY` for symptoms during a run (`monitor.SymptomLimits`). These thresholds belong to no check."""


def find_unknown_names(health: HealthSpec) -> list[tuple[str, str, str | None]]:
    """Return the unknown names in a `health` section, each as (key, name, closest known name).

    Unknown names are errors of the cluster file, because a rule for an unknown check would silently have no effect.
    """
    from clusterctl.health.settings import EXPECT_KEYS

    wrong: list[tuple[str, str, str | None]] = []
    thresholds = [f"{check.name}.{key}" for check in CHECKS.values() for key in check.thresholds]
    thresholds += [DEADLINE_KEY, SAMPLING_INTERVAL_KEY, *(f"during.{key}" for key in LIMIT_KEYS)]
    wrong += _find_unknown("ignore", (pattern.partition("@")[0] for pattern in health.ignore), CHECKS)
    wrong += _find_unknown("severity", health.severity, CHECKS)
    wrong += _find_unknown("required", health.required, CHECKS)
    wrong += _find_unknown("thresholds", health.thresholds, thresholds)
    wrong += _find_unknown("expect", health.expect, EXPECT_KEYS)
    return wrong


def _find_unknown(key: str, names: Iterable[str], known: Iterable[str]) -> list[tuple[str, str, str | None]]:
    everything = list(known)
    wrong: list[tuple[str, str, str | None]] = []
    for name in names:
        event = name.startswith(("xid.", "sxid.", "amdgpu.")) and key in ("ignore", "severity")
        if event or any(fnmatchcase(candidate, name) for candidate in everything):
            continue
        close = difflib.get_close_matches(name, everything, 1)
        wrong.append((key, name, close[0] if close else None))
    return wrong
