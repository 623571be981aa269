"""Decides whether the GPUs of a run are idle, from the health samples of its nodes. Pure.

A GPU without a known utilisation counts as busy, and a gap between samples begins the idle time anew: only samples that
show idle GPUs count. Times are on the monotonic clock of each node, so they are only compared within a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from clusterctl.agent.protocol.record_types import HealthSample

MAX_IDLE_PERCENT = 1.0
"""A GPU with at most this utilisation in percent does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeActivity:
    """The samples of one node so far.

    Attributes:
        has_gpus: Whether the node has GPUs of the run.
        quiet_since: Time of the last sample with a busy GPU, or of the first sample after a gap.
        seen_at: Time of the newest sample.
        has_worked: Whether a sample has shown a busy GPU.
    """

    has_gpus: bool
    quiet_since: float
    seen_at: float
    has_worked: bool = False


def add_health_sample(
    before: NodeActivity | None, sample: HealthSample, gpus: Collection[int] | None, max_gap_s: float
) -> NodeActivity:
    """Return the activity of a node after one more sample.

    Args:
        before: The activity after the previous sample; `None` for the first sample of an attempt.
        sample: The sample.
        gpus: The GPUs of the run on this node; `None` for all.
        max_gap_s: The longest time between two samples in which the GPUs may count as idle.
    """
    now = float(sample["m"])
    devices = [gpu for gpu in sample.get("gpus") or () if gpus is None or gpu["gpu"] in gpus]
    is_absent = sample.get("status") == "absent" or (gpus is not None and not gpus)
    is_known = sample.get("status") == "ok" and bool(devices)
    utils = [gpu.get("util") for gpu in devices]
    is_busy = is_known and any(util is None or util > MAX_IDLE_PERCENT for util in utils)
    if before is None or not is_known or now - before.seen_at > max_gap_s or now < before.seen_at:
        before = NodeActivity(has_gpus=not is_absent, quiet_since=now, seen_at=now)
    return NodeActivity(
        has_gpus=not is_absent,
        quiet_since=now if is_busy else before.quiet_since,
        seen_at=now,
        has_worked=is_busy or before.has_worked,
    )


def measure_gpu_idle_s(nodes: Mapping[str, NodeActivity], expected: Collection[str]) -> float:
    """Return for how many seconds no GPU of the run has worked; 0 if a node has no sample, or no node has GPUs.

    Args:
        nodes: The activity of the nodes.
        expected: The nodes of the attempt.
    """
    if any(name not in nodes for name in expected):
        return 0.0
    return min((n.seen_at - n.quiet_since for name in expected if (n := nodes[name]).has_gpus), default=0.0)
