"""The functions of `import clusterctl` inside a worker: report progress in one line and without risk.

The injected shim writes the reports to a status file, which the supervisor reads. Without a shim (a script run by hand,
`job.inject: false`, a child of the worker) every call does nothing. No function raises into user code.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from clusterctl.agent.worker.weight_check import verify_sync

__all__ = ["phase", "progress", "verify_sync"]

# The shim has its own module name, so it works beside any clusterctl that the worker's Python has installed.
_SHIM = "_clusterctl_shim"


def _shim() -> Any:
    return getattr(sys.modules.get(_SHIM), "armed", None)


def progress(step: int | None = None, **facts: float | str) -> None:
    """Report progress. It takes about a microsecond, so call it at every step.

    Args:
        step: The step just finished; `ps` and `status` show it. Without it the call only counts as a sign of life.
        **facts: A few short values to store with the step (`loss=0.3`).
    """
    shim = _shim()
    if shim is not None:
        shim.state.store_report(step, facts)


class phase:  # noqa: N801  (reads as a statement: `with clusterctl.phase("checkpoint"):`)
    """Declare work without steps, such as a checkpoint on rank 0 or a long validation.

    Args:
        name: What is done; shown while it lasts.
        limit: How long it may take before the run counts as stalled: seconds, or `90s`, `15m`, `1h30m`. An invalid
            limit counts as 15 minutes, and `status` shows a note about it.
    """

    def __init__(self, name: str, limit: float | str = "15m") -> None:
        self.name = name
        self.limit = limit
        self._entered: list[Any] = []

    def __enter__(self) -> phase:
        shim = _shim()
        if shim is not None:
            self._entered.append((shim, shim.state.begin_phase(self.name, self.limit)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            shim, entry = self._entered.pop()
            shim.state.end_phase(entry)


def __getattr__(name: str) -> object:
    """Load `verify_sync` on first use: it needs hashing and files, which most scripts never use."""
    if name != "verify_sync":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterctl.agent.worker import weight_check

    return weight_check.verify_sync
