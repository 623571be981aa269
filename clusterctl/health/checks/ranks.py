"""How many ranks a node is to run, which says how much of it they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.checks import gpus

if TYPE_CHECKING:
    from clusterctl.health.check import View


def uses_gpus(view: View) -> bool:
    """Tell whether the node takes part with GPUs."""
    count = view.expected.count
    return gpus.has_gpu_sign(view) if count is None else count > 0


def count_ranks(view: View) -> int:
    """Return how many ranks the node is to run: as declared, else one a GPU, else one."""
    declared = view.expected.workers
    if declared is not None:
        return max(1, declared)
    count = view.expected.count
    return max(1, len(gpus.used_gpus(view)) if count is None else count)


def describe_ranks(view: View) -> str:
    """Name them for a person."""
    number = count_ranks(view)
    return f"{number} rank{'s' if number > 1 else ''}"
