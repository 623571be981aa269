"""The newest samples of a run, from the ends of their replicas."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import files
from clusterctl.door import samples

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


def latest_samples(run: RunDir, node: str, kind: str) -> dict[str, Any] | None:
    """Return the newest sample of a kind (activity, health) that was replicated from a node."""
    path = run.node(node) / files.SAMPLES_FILE
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 256 * 1024))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    return next(samples.readable(reversed(lines), kind), None)


def latest_step(run: RunDir, state: RunState) -> int | None:
    """Return the step that the slowest rank of the newest attempt had reached, as far as the samples tell."""
    newest = [latest_samples(run, node, "activity") for node in state.nodes]
    ranks = [
        r
        for s in newest
        if s is not None and s.get("attempt") == state.attempt
        for r in (s.get("ranks") or {}).values()
    ]
    return min((step for r in ranks if (step := (r.get("inside") or {}).get("step")) is not None), default=None)


def last_bytes(path: Path, most: int = 4 << 20) -> bytes:
    """Return the end of a file from the begin of a line on; nothing where there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read()
    except FileNotFoundError:
        return b""
    return data if size <= most else data.partition(b"\n")[2]
