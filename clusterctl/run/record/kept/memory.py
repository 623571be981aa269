"""How full the memory of a node was shortly before one of its ranks was killed, as far as its samples tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.run.record.samples import last_lines
from clusterctl.validation import samples

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_LATELY_S = 60.0
_MOST_BYTES = 1 << 20


def before_the_kill(run: RunDir, state: RunState) -> tuple[float, float] | None:
    """Return how full it was when it was last measured, percent, and how many seconds before the rank ended.

    Nothing where what failed first was not killed by a SIGKILL of unknown origin, or nobody had measured lately.
    """
    cause = state.cause
    if cause is None or (cause.kind, cause.signal) != ("signal", "SIGKILL") or cause.rank not in state.workers:
        return None
    worker = state.workers[cause.rank]
    if worker.exit_analysis is None:
        return None
    ended = worker.exit_analysis.latest + state.ahead(worker.node)
    lines = last_lines(run.node(worker.node) / SAMPLES_FILE, _MOST_BYTES)
    for health in samples.parse_samples(reversed(lines), "health", "t", "mem"):
        full, age = health["mem"], ended - health["t"]
        if full is not None and age >= 0.0:
            return (full, age) if age <= _LATELY_S else None
    return None
