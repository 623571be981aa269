"""The shim inside a worker; it runs there as the package `_clusterctl_shim`.

It counts steps, measures how long the main thread has run no Python, writes one status file a second and lets the
supervisor dump all stacks by a signal. The status file lists under `degraded` each part that does not work with this
Python or this torch.
"""

from __future__ import annotations

import os

from . import rank_claim
from .progress_counters import ProgressCounters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .status_writer import StatusWriter


class ActiveShim:
    """The active parts in this process: `state` for the worker API, and `writer`, which writes the status file."""

    def __init__(self, state: ProgressCounters, writer: StatusWriter) -> None:
        self.state = state
        self.writer = writer


armed: ActiveShim | None = None


def arm(status_dir: str, rank: int) -> None:
    """Start all parts if this process claims the rank; otherwise only watch for peers and failed children.

    Args:
        status_dir: The directory for the status files of this run, node and attempt.
        rank: The global rank.
    """
    global armed  # noqa: PLW0603  (one per process, by its nature)
    if rank_claim.is_launcher():
        from .event_records import ExitRecord

        ExitRecord(status_dir, rank, rank_claim.read_start_ticks("self") or 0).begin()
        return
    start_time = rank_claim.claim_rank(status_dir, rank)
    from . import import_hooks
    from .child_failure import ChildFailureRecord
    from .event_records import ExitRecord, ExitWatch, PeerRecord, SignalRecord, record_error_for_torchrun

    record_error_for_torchrun()
    groups, children = PeerRecord(status_dir, rank), ChildFailureRecord(status_dir, rank)
    watched = {**groups.hooks, **children.hooks}
    if start_time is None:
        import_hooks.hook_imports(ProgressCounters(), watched)
        children.begin_script(lambda write: ExitWatch(write).begin())
        return
    # These imports are not at the top, because many Pythons of a worker are not the rank and need none of them.
    import atexit

    from .stack_dump import StackDumper
    from .status_writer import StatusWriter

    state = ProgressCounters()
    writer = StatusWriter(state, StackDumper(status_dir, rank, start_time), status_dir, rank, start_time)
    armed = ActiveShim(state, writer)
    signals = SignalRecord(status_dir, rank, start_time)
    import_hooks.hook_imports(state, {**import_hooks.make_framework_hooks(state), **watched, "signal": signals.watch})
    os.register_at_fork(before=writer.pause, after_in_parent=writer.resume, after_in_child=_disarm)
    groups.begin()
    children.listen()
    atexit.register(writer.finish)
    atexit.register(groups.finish, state)
    ExitRecord(status_dir, rank, start_time).begin()
    signals.begin()
    writer.start()


def _disarm() -> None:
    """Stop all parts in a forked child: the rank is the parent."""
    global armed  # noqa: PLW0603
    if armed is not None:
        armed.writer.abandon_thread()
        armed = None
