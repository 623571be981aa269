"""The shim inside a worker; it runs there as the package `_clusterctl_shim`.

It counts steps, measures how long the main thread has run no Python, writes one status file a second and lets the
supervisor dump all stacks by a signal. What it cannot do with this Python or this torch it lists under `degraded`.
"""

from __future__ import annotations

import os

from . import claim as claims
from .state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .beat import Beat


class Armed:
    """The active parts in this process: `state` for the worker API, and `beat`, which writes the status file."""

    def __init__(self, state: State, beat: Beat) -> None:
        self.state = state
        self.beat = beat


armed: Armed | None = None


def arm(status_dir: str, rank: int) -> None:
    """Start all parts if this process gets the rank; otherwise only watch for peers and failed children.

    Args:
        status_dir: The directory for the status files of this run, node and attempt.
        rank: The global rank.
    """
    global armed  # noqa: PLW0603  (one per process, by its nature)
    if claims.is_launcher():
        from .records import ExitRecord

        ExitRecord(status_dir, rank, claims.start_ticks("self") or 0).begin()
        return
    start_time = claims.claim(status_dir, rank)
    from . import hooks
    from .child_record import ChildRecord
    from .records import ExitRecord, GroupRecord, SignalRecord

    groups, children = GroupRecord(status_dir, rank), ChildRecord(status_dir, rank)
    watched = {**groups.hooks, **children.hooks}
    if start_time is None:
        hooks.watch(State(), watched)
        children.begin_script()
        return
    # Inner imports: the many Pythons that are not the rank need nothing of this.
    import atexit

    from .beat import Beat
    from .dump import Dumper

    state = State()
    beat = Beat(state, Dumper(status_dir, rank, start_time), status_dir, rank, start_time)
    armed = Armed(state, beat)
    signals = SignalRecord(status_dir, rank, start_time)
    hooks.watch_imports(state, {**watched, "signal": signals.watch})
    os.register_at_fork(before=beat.pause, after_in_parent=beat.resume, after_in_child=_disarm)
    groups.begin()
    atexit.register(beat.finish)
    atexit.register(groups.finish, state)
    ExitRecord(status_dir, rank, start_time).begin()
    signals.begin()
    beat.begin()


def _disarm() -> None:
    """Stop all parts in a forked child: the rank is the parent."""
    global armed  # noqa: PLW0603
    if armed is not None:
        armed.beat.forget()
        armed = None
