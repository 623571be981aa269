"""How long a person waits who looks at runs of 200 nodes with 8 ranks each: from the files of such runs alone."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measures import Measure, spread, timed
from tests.big_run import End, made

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GOAL_S = 0.3
SCREENS: tuple[tuple[str, ...], ...] = (
    ("ps",),
    ("ps", "-a"),
    ("status", "running"),
    ("logs", "-n", "50", "running"),
    ("logs", "--all-ranks", "-n", "50", "running"),
    ("top", "running"),
    ("stats", "running"),
    ("status", "stalled"),
    ("why", "stalled"),
    ("status", "failed"),
    ("logs", "failed"),
    ("why", "failed"),
    ("report", "failed", "-o", "/dev/null"),
    ("diff", "failed", "running"),
)
"""Every command that reads a run, of each kind of run that it is for."""


def measure(rounds: int) -> Iterable[Measure]:
    """Yield the time of each screen; three such runs lie on the head, two of them going on."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-screens-") as folder, contextlib.ExitStack() as stack:
        for end in End:
            stack.enter_context(made(Path(folder), end, name=end.value))
        # As installed: modules are compiled once, by the run that warms up.
        env = {**os.environ, "XDG_STATE_HOME": folder, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        yield _of(("version",), env, folder, rounds, goal=None)
        for arguments in SCREENS:
            yield _of(arguments, env, folder, rounds, goal=GOAL_S)


def _of(arguments: Sequence[str], env: dict[str, str], folder: str, rounds: int, goal: float | None) -> Measure:
    lines = 0

    def look() -> None:
        nonlocal lines
        argv = [sys.executable, "-m", "clusterctl", *arguments]
        done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, check=False)
        lines = done.stdout.count(b"\n")

    look()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    samples = [timed(look) for _ in range(rounds)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rounds
    return Measure(
        name=" ".join(arguments),
        value=statistics.median(samples),
        unit="s",
        goal=goal,
        detail=f"{spread(samples)}; processor {cpu:.2f} s; {lines} lines",
    )
