"""All checks, in the order of their families."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from clusterctl.config.spec import SAMPLING_INTERVAL_KEY, HealthSpec
from clusterctl.health.check import Check
from clusterctl.health.checks import (
    amd,
    clocks,
    device_errors,
    driver,
    framework,
    gpu_links,
    gpu_memory,
    gpu_presence,
    gpu_usage,
    hardware_errors,
    infiniband,
    machine_kernel_log,
    network,
    resources,
    storage,
    thermal,
    versions,
    xid,
)

_FAMILIES = (
    *("Network", "RDMA", "GPU driver", "GPU state", "XID and SXid", "GPU memory", "GPU temperature, power, clocks"),
    *("PCIe, NVLink, fabric", "GPU already in use", "GPU modes", "Host", "Disks and mounts", "Kernel log"),
    *("Rendezvous", "Clocks", "Versions"),
)
_MODULES = (
    *(network, infiniband, driver, gpu_presence, device_errors, xid, amd, gpu_memory, thermal, gpu_links, gpu_usage),
    *(resources, hardware_errors, clocks, storage, machine_kernel_log, versions, framework),
)
_ALL = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Check)]

CHECKS = {check.name: check for check in sorted(_ALL, key=lambda check: _FAMILIES.index(check.family))}
"""Checks by name."""

DEADLINE_KEY = "probe.deadline"
"""A threshold of no check: seconds that the probe of a node may take."""
LIMITS = ("slowdown", "stuck", "disk", "clear_after", "silence", "recovered_after")
"""Thresholds of no check, each with the prefix `during.`: how long a symptom lasts before it is reported
(`monitor.Limits`).
"""


def find_unknown_names(health: HealthSpec) -> list[tuple[str, str, str | None]]:
    """Return the unknown names in a `health:` section: (key, name, closest known name).

    A rule for an unknown check would silently do nothing, so it is an error of the cluster file.
    """
    from clusterctl.health.context import EXPECT_KEYS

    wrong: list[tuple[str, str, str | None]] = []
    thresholds = [f"{check.name}.{key}" for check in CHECKS.values() for key in check.thresholds]
    thresholds += [DEADLINE_KEY, SAMPLING_INTERVAL_KEY, *(f"during.{key}" for key in LIMITS)]
    wrong += _unknown("ignore", (pattern.partition("@")[0] for pattern in health.ignore), CHECKS)
    wrong += _unknown("severity", health.severity, CHECKS)
    wrong += _unknown("required", health.required, CHECKS)
    wrong += _unknown("thresholds", health.thresholds, thresholds)
    wrong += _unknown("expect", health.expect, EXPECT_KEYS)
    return wrong


def _unknown(key: str, names: Iterable[str], known: Iterable[str]) -> list[tuple[str, str, str | None]]:
    everything = list(known)
    wrong: list[tuple[str, str, str | None]] = []
    for name in names:
        event = name.startswith(("xid.", "sxid.", "amdgpu.")) and key in ("ignore", "severity")
        if event or any(fnmatchcase(candidate, name) for candidate in everything):
            continue
        close = difflib.get_close_matches(name, everything, 1)
        wrong.append((key, name, close[0] if close else None))
    return wrong
