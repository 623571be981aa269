"""The newest samples of a run, from the ends of their replicas."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import run_files
from clusterctl.validation import samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clusterctl.agent.protocol.sample_types import ActivitySample, HealthSample
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


_LOOK_BACK = 256 * 1024
_PIECE = 16 * 1024


def latest_activity(run: RunDir, node: str) -> ActivitySample | None:
    """Return the newest sample of its ranks that was replicated from a node."""
    return next(samples.parse_samples(_newest_lines(run, node), "activity"), None)


def latest_health(run: RunDir, node: str) -> HealthSample | None:
    """Return the newest sample of machine and GPUs that was replicated from a node."""
    return next(samples.parse_samples(_newest_lines(run, node), "health"), None)


def _newest_lines(run: RunDir, node: str) -> Iterator[bytes]:
    """Give the lines at the end of a node's samples, the newest first; mostly that is all that is looked at."""
    with _opened(f"{run.path}/nodes/{node}/{run_files.SAMPLES_FILE}") as fd:
        end = 0 if fd is None else os.fstat(fd).st_size
        least, torn = max(0, end - _LOOK_BACK), b""
        while fd is not None and end > least:
            begin = max(least, end - _PIECE)
            first, *lines = (os.pread(fd, end - begin, begin) + torn).split(b"\n")
            yield from reversed(lines)
            end, torn = begin, first
        yield torn


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[int | None]:
    """Give a file to read from: of a run there are hundreds, and what `open` does more is of no use here."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def latest_step(run: RunDir, state: RunState) -> int | None:
    """Return the step that the slowest rank of the newest attempt had reached, as far as the samples tell."""
    newest = [latest_activity(run, node) for node in state.nodes]
    ranks = [
        r
        for s in newest
        if s is not None and s.get("attempt") == state.attempt
        for r in (s.get("ranks") or {}).values()
    ]
    reports = [inside for rank in ranks if (inside := rank.get("inside")) is not None]
    return min((step for inside in reports if (step := inside.get("step")) is not None), default=None)


def newest_lines(run: RunDir, state: RunState, most: int = 1 << 20) -> dict[str, list[bytes]]:
    """Return the newest lines of each node's samples, so many bytes at most."""
    return {node: last_lines(run.node(node) / run_files.SAMPLES_FILE, most) for node in state.nodes}


def last_lines(path: Path, most: int = 4 << 20) -> list[bytes]:
    """Return the whole lines at the end of a file; none where there is no such file."""
    return last_bytes(path, most).split(b"\n")[:-1]


def last_bytes(path: Path, most: int = 4 << 20) -> bytes:
    """Return the end of a file, of whole lines; nothing where there is no such file."""
    with _opened(path) as fd:
        size = 0 if fd is None else os.fstat(fd).st_size
        data = b"" if fd is None else os.pread(fd, min(size, most), max(0, size - most))
    begin = data.find(b"\n") + 1 if size > most else 0
    return data[begin : data.rfind(b"\n") + 1]


def newest_activity(run: RunDir, state: RunState) -> dict[str, ActivitySample]:
    """Return the newest sample of ranks of each node that has told one."""
    found = {node: latest_activity(run, node) for node in state.nodes}
    return {node: sample for node, sample in found.items() if sample is not None}
