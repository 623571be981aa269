"""The shim inside a worker, where it runs as the package `_clusterctl_shim`.

The shim counts steps, measures for how long the main thread has run no Python code, and writes a status file once a
second. The shim also lets the supervisor dump all stacks by a signal. The field `degraded` of the status file lists
each part of the shim that does not work with this Python or this torch.
"""

from __future__ import annotations

import atexit
import os

from . import import_hooks, rank_claim
from .progress_counters import ProgressCounters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .child_failure_recorder import ChildFailureRecorder
    from .exit_and_peer_recorders import PeerRecorder
    from .status_writer import StatusWriter


class ActiveShim:
    """The active parts of the shim in this process: the counters, and the thread that writes the status file."""

    def __init__(self, counters: ProgressCounters, writer: StatusWriter) -> None:
        self.counters = counters
        self.writer = writer


active_shim: ActiveShim | None = None


def start_shim(status_dir: str, rank: int) -> None:
    """Start all parts of the shim if this process claims the rank. Otherwise only record peers and failed children.

    Args:
        status_dir: The directory for the status files of this run, node and attempt.
        rank: The global rank.
    """
    if rank_claim.is_rank_launcher():
        from .exit_and_peer_recorders import ExitRecorder

        ExitRecorder(status_dir, rank, rank_claim.read_start_ticks("self") or 0).start()
        return
    start_time = rank_claim.claim_rank(status_dir, rank)
    from .child_failure_recorder import ChildFailureRecorder
    from .exit_and_peer_recorders import ExitRecorder, ExitWatcher, PeerRecorder, record_error_for_torchrun

    record_error_for_torchrun()
    groups, children = PeerRecorder(status_dir, rank), ChildFailureRecorder(status_dir, rank)
    recorder_hooks = {**groups.hooks, **children.hooks}
    if start_time is None:
        # A wrapper, which is the rank, may have started this process. A process that trains imports a framework.
        take = dict.fromkeys(import_hooks.FRAMEWORK_MODULES, lambda _: _take_over(status_dir, rank, groups, children))
        import_hooks.hook_imports(ProgressCounters(), {**take, **recorder_hooks})
        children.watch_script(lambda write: ExitWatcher(write).start())
        return
    counters = _activate(status_dir, rank, start_time, groups, children)
    import_hooks.hook_imports(counters, recorder_hooks)
    ExitRecorder(status_dir, rank, start_time).start()


def _take_over(status_dir: str, rank: int, groups: PeerRecorder, children: ChildFailureRecorder) -> None:
    """Become the rank in place of a wrapper that has started this process and does not train itself."""
    start_time = None if active_shim else rank_claim.take_over_claim(status_dir, rank)
    if start_time is not None:
        _activate(status_dir, rank, start_time, groups, children)


def _activate(
    status_dir: str, rank: int, start_time: int, groups: PeerRecorder, children: ChildFailureRecorder
) -> ProgressCounters:
    """Start the parts of the shim that run only in the process that is the rank."""
    global active_shim  # noqa: PLW0603  (a process has one shim)
    # These imports are not at the top, because many Python processes of a worker are not the rank and do not need them.

    from .exit_and_peer_recorders import SignalRecorder
    from .stack_dumper import StackDumper
    from .status_writer import StatusWriter

    counters = ProgressCounters()
    writer = StatusWriter(counters, StackDumper(status_dir, rank, start_time), status_dir, rank, start_time)
    active_shim = ActiveShim(counters, writer)
    signals = SignalRecorder(status_dir, rank, start_time)
    hooks = {**import_hooks.make_framework_hooks(counters), "signal": signals.wrap_signal_module}
    import_hooks.hook_imports(counters, hooks)
    os.register_at_fork(before=writer.pause, after_in_parent=writer.resume, after_in_child=_stop_in_forked_child)
    groups.start()
    children.record_signals()
    atexit.register(writer.finish)
    atexit.register(groups.finish, counters)
    signals.start()
    writer.start()
    return counters


def _stop_in_forked_child() -> None:
    """Stop the shim in a forked child, because its parent is the rank."""
    global active_shim  # noqa: PLW0603
    if active_shim is not None:
        active_shim.writer.abandon_thread()
        active_shim = None
