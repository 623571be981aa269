"""The functions of `import clusterctl` inside a worker, with which a training script reports its progress.

The injected shim writes the reports to a status file, which the supervisor reads. Without a shim (a script run by hand,
`job.inject: false`, a child of the worker) `progress` and `phase` do nothing. `progress` and `phase` never raise an
exception.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from clusterctl.agent.worker.weight_check import verify_sync

__all__ = ["phase", "progress", "verify_sync"]

# The shim has its own module name, so the shim works beside a clusterctl that is installed in the worker's Python.
_SHIM = "_clusterctl_shim"


def _shim() -> Any:
    return getattr(sys.modules.get(_SHIM), "active_shim", None)


def progress(step: int | None = None, **facts: float | str) -> None:
    """Report progress. A call takes about a microsecond, so call this function at every step.

    Args:
        step: The number of the finished step, which `ps` and `status` show. A call without a step only shows that the
            worker makes progress.
        **facts: A few short values that are stored with the step (`loss=0.3`).
    """
    shim = _shim()
    if shim is not None:
        shim.counters.store_report(step, facts)


class phase:  # noqa: N801  (reads as a statement: `with clusterctl.phase("checkpoint"):`)
    """Declare work without steps, such as a checkpoint on rank 0 or a long validation.

    Args:
        name: The name of the work, which `status` shows while the work lasts.
        limit: The time after which the run counts as stalled: seconds, or a text such as `90s`, `15m` or `1h30m`. An
            invalid limit counts as 15 minutes, and `status` shows a note about it.
    """

    def __init__(self, name: str, limit: float | str = "15m") -> None:
        self.name = name
        self.limit = limit
        self._entered: list[Any] = []

    def __enter__(self) -> phase:
        shim = _shim()
        if shim is not None:
            self._entered.append((shim, shim.counters.begin_phase(self.name, self.limit)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            shim, entry = self._entered.pop()
            shim.counters.end_phase(entry)


def __getattr__(name: str) -> object:
    """Import `verify_sync` at its first use, because most scripts never need its imports."""
    if name != "verify_sync":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterctl.agent.worker import weight_check

    return weight_check.verify_sync
