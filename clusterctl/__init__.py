"""Functions for training scripts: `progress`, `phase`, `verify_sync`.

Outside a run of clusterctl the functions do nothing. The module of the functions is imported at the first use of a
function.
"""

from __future__ import annotations

# Importing this name from `typing` would cost a short script a few milliseconds.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.worker import phase, progress, verify_sync

__all__ = ["phase", "progress", "verify_sync"]


def __getattr__(name: str) -> object:
    """Import a function at its first use (PEP 562), and store it in this module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterctl.agent import worker

    value: object = getattr(worker, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
