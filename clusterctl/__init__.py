"""What a training script may ask of clusterctl: `progress`, `phase`, `verify_sync`.

All three are safe anywhere: run by hand, outside a run, they do nothing. Nothing is imported until a name is used.
"""

from __future__ import annotations

# Not from `typing`: that alone would cost a short script a few milliseconds.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.worker import phase, progress, verify_sync

__all__ = ["phase", "progress", "verify_sync"]


def __getattr__(name: str) -> object:
    """Loads the asked name on first use (PEP 562) and keeps it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterctl.agent import worker

    value: object = getattr(worker, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
