"""What `import clusterctl` gives inside a worker: say where the work stands, with one line and at no risk.

The words reach the supervisor through the status file that the injected shim keeps; where no shim is armed (a script
run by hand, `job.inject: false`, a child of the worker) every call is a no-op. Nothing here raises into user code.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from clusterctl.agent.worker.weight_check import verify_sync

__all__ = ["phase", "progress", "verify_sync"]

# The shim lives under a name of its own, so that it works with whatever clusterctl the worker's Python has installed.
_SHIM = "_clusterctl_shim"


def _shim() -> Any:
    return getattr(sys.modules.get(_SHIM), "armed", None)


def progress(step: int | None = None, **facts: float | str) -> None:
    """Says that the work moves; about a microsecond, so call it every step.

    Args:
        step: The step just finished; shown in `ps` and `status`. Without it the call only counts as a sign of life.
        **facts: A few short values to keep with the step (`loss=0.3`).
    """
    shim = _shim()
    if shim is not None:
        shim.state.report(step, facts)


class phase:  # noqa: N801  (reads as a statement: `with clusterctl.phase("checkpoint"):`)
    """Declares work during which no steps are expected, such as a checkpoint on rank 0 or a long validation.

    Args:
        name: What is being done; shown while it lasts.
        limit: How long it may take before the run is called stalled: seconds, or `90s`, `15m`, `1h30m`. What cannot be
            read counts as 15 minutes and is shown as such.
    """

    def __init__(self, name: str, limit: float | str = "15m") -> None:
        self.name = name
        self.limit = limit
        self._entered: list[Any] = []

    def __enter__(self) -> phase:
        shim = _shim()
        if shim is not None:
            self._entered.append((shim, shim.state.enter(self.name, self.limit)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered:
            shim, entry = self._entered.pop()
            shim.state.leave(entry)


def __getattr__(name: str) -> object:
    """Loads `verify_sync` on first use: it needs hashing and files, which most scripts never do."""
    if name != "verify_sync":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterctl.agent.worker import weight_check

    return weight_check.verify_sync
