"""What ranks had told before they were stopped with their peers: the ends of their outputs, and their last counters."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.run_files import format_index_path, format_output_path
from clusterctl.logs.time_index import TimeIndex
from clusterctl.run.record.samples import newest_lines
from clusterctl.run.rules import rank_timing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState, WorkerState

_END_BYTES = 8192
_MOST = 1024


def outputs(run: RunDir, state: RunState) -> dict[int, str]:
    """Return the ends of what ranks wrote before they were stopped, by rank; none where a failure tells for itself.

    A rank that the signal ended wrote nothing on account of it. Of one that may have caught it only that counts which
    was written before any rank had ended.
    """
    first = _first_loss(state)
    if first is None:
        return {}
    stopped = [worker for worker in state.workers.values() if worker.stopped and worker.exit_code != 0]
    return {worker.rank: end for worker in stopped[:_MOST] if (end := _end(run, state, worker, first))}


def counters(run: RunDir, state: RunState) -> dict[int, Mapping[str, tuple[int, int]]]:
    """Return what ranks had begun and ended, by process group, when they were last seen before one of them ended."""
    first = _first_loss(state)
    if first is None:
        return {}
    before = {node: first + state.ahead(node) for node in state.nodes}
    return rank_timing.read_counts_before(newest_lines(run, state), state.attempt, before)


def _first_loss(state: RunState) -> float | None:
    """Return when the first rank ended, where all that failed by themselves say that they lost a peer."""
    failed = [
        worker.exit_analysis for worker in state.workers.values() if worker.failed and worker.exit_analysis is not None
    ]
    if not failed or not all(verdict.cause.secondary for verdict in failed):
        return None
    return min(verdict.earliest for verdict in failed)


def _end(run: RunDir, state: RunState, worker: WorkerState, first: float) -> str:
    folder = run.node(worker.node)
    size = None
    if worker.signal != signal.SIGTERM:
        index = TimeIndex(str(folder / format_index_path(state.attempt, worker.rank)))
        size = index.size_before(first + state.ahead(worker.node))
    return _read(folder / format_output_path(state.attempt, worker.rank), size)


def _read(path: Path, size: int | None) -> str:
    """Return the end of a file, or of its first `size` bytes."""
    try:
        with path.open("rb") as file:
            end = path.stat().st_size if size is None else size
            file.seek(max(0, end - _END_BYTES))
            return file.read(min(end, _END_BYTES)).decode("utf-8", "replace")
    except OSError:
        return ""
