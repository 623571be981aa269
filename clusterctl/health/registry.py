"""All checks, in the order in which they are shown."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from clusterctl.config.spec import INTERVAL_KEY
from clusterctl.health.checks import (
    amd_setup,
    amdgpu_log,
    clock,
    compatibility,
    devices,
    driver,
    ecc,
    environment,
    fabric,
    framework,
    gpu_modes,
    gpu_usage,
    hardware,
    host,
    ib,
    kernel_log,
    limits,
    memory,
    network,
    nvlink,
    p2p,
    pcie,
    presence,
    processors,
    ras,
    recovery,
    rendezvous,
    ring,
    row_remap,
    storage,
    sxid,
    thermal,
    throttle,
    versions,
    xgmi,
    xid,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.config.spec import HealthSpec
    from clusterctl.health.check import Check

_FAMILIES = (
    network,
    ib,
    driver,
    presence,
    devices,
    recovery,
    xid,
    sxid,
    amdgpu_log,
    ecc,
    row_remap,
    ras,
    thermal,
    throttle,
    pcie,
    nvlink,
    fabric,
    p2p,
    xgmi,
    gpu_usage,
    gpu_modes,
    amd_setup,
    limits,
    memory,
    processors,
    host,
    hardware,
    storage,
    kernel_log,
    rendezvous,
    ring,
    clock,
    versions,
    environment,
    framework,
    compatibility,
)

CHECKS: dict[str, Check] = {check.name: check for family in _FAMILIES for check in family.CHECKS}
"""Checks by name."""

DEADLINE_KEY = "probe.deadline"
"""A threshold of no check: seconds that the probe of a node may take."""
LIMITS = ("slowdown", "stuck", "disk", "swing", "silence", "mended")
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
    thresholds += [DEADLINE_KEY, INTERVAL_KEY, *(f"during.{key}" for key in LIMITS)]
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
