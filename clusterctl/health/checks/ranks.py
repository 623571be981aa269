"""How many ranks a node is to run, which says how much of it they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.checks import gpus

if TYPE_CHECKING:
    from clusterctl.health.check import View


def with_gpus(view: View) -> bool:
    """Tell whether the node takes part with GPUs."""
    count = view.expected.count
    return gpus.present(view) if count is None else count > 0


def of(view: View) -> int:
    """Return how many ranks the node is to run: as declared, else one a GPU, else one."""
    declared = view.expected.workers
    if declared is not None:
        return max(1, declared)
    count = view.expected.count
    return max(1, len(gpus.devices(view)) if count is None else count)


def counted(view: View) -> str:
    """Name them for a person."""
    number = of(view)
    return f"{number} rank{'s' if number > 1 else ''}"
