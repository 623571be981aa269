"""The files of a run on its node, what writes into them in the place of workers and of hours, and how large they are."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import proc
from clusterctl.agent.protocol import run_files

if TYPE_CHECKING:
    from collections.abc import Callable

DAY = 86400
HOUR = 3600
WIDTH = 99
_RECORD = run_files.INDEX_RECORD
_ENDINGS = {
    "samples.jsonl": "samples",
    ".idx": "index",
    ".log": "output",
    "journal.jsonl": "journal",
    "events.jsonl": "events",
}
KINDS = ("samples", "index", "output", "journal", "events", "other")


def numbered(rank: int, first: int, count: int) -> bytes:
    """Return lines of a rank, each of which says which it is, 99 bytes each."""
    stem = f"rank {rank} step %d loss 0.1234 and what else a rank has to say in a second of a long day"
    return b"".join((stem % number).encode().ljust(WIDTH - 1) + b"\n" for number in range(first, first + count))


class Files:
    """The files of the first attempt of a run.

    Args:
        folder: The folder of the run on its node.
        ranks: How many it has there.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.logs = [folder / run_files.format_output_path(0, rank) for rank in range(ranks)]
        self.indices = [folder / run_files.format_index_path(0, rank) for rank in range(ranks)]
        self.samples = folder / run_files.SAMPLES_FILE

    def line(self) -> None:
        """Let each rank write a line."""
        for rank, log in enumerate(self.logs):
            _append(log, numbered(rank, log.stat().st_size // WIDTH, 1))

    def hour(self, begun: float, lines: int, samples: float, *, sparse: bool) -> None:
        """Write what an hour leaves.

        Args:
            begun: When it began, by the clock of the run.
            lines: How many each rank has written in it, with a record of its index a second.
            samples: Bytes of samples that the supervisor would have written in it.
            sparse: But for the last line, the lines take no byte on the disk.
        """
        for rank, (log, index) in enumerate(zip(self.logs, self.indices, strict=True)):
            size = log.stat().st_size
            told = ((size + lines * WIDTH * second // HOUR, begun + second) for second in range(1, HOUR))
            _append(index, b"".join(_RECORD.pack(*each) for each in told))
            written = lines - 1 if sparse else 0
            if sparse:
                os.truncate(log, size + written * WIDTH)
            _append(log, numbered(rank, size // WIDTH + written, lines - written))
        _append(self.samples, self.last_sample() * round(self._unbroken(samples) / len(self.last_sample())))

    def indexed(self) -> bool:
        """Return whether the supervisor has told of all that there is."""
        return all(_last_told(index) >= log.stat().st_size for log, index in zip(self.logs, self.indices, strict=True))

    def last_sample(self) -> bytes:
        """Return the newest sample."""
        with self.samples.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 20)))
            return file.read().splitlines(keepends=True)[-1]

    def _unbroken(self, wanted: float) -> float:
        """Return how much of so many bytes of samples may be written for a supervisor, which looks where it cuts."""
        half = run_files.MAX_SAMPLES_BYTES // 2
        return min(wanted, half - self.samples.stat().st_size % half - len(self.last_sample()))


class Shims:
    """What shims write in ranks that make a step a second: the status files, in which the samples look."""

    def __init__(self, folder: str, pids: dict[int, int]) -> None:
        self._folder, self._steps = Path(folder), itertools.count(1)
        self._said = {rank: self._first(rank, pid) for rank, pid in pids.items()}

    def step(self, moment: float) -> None:
        """Let each rank make a step at a moment of the run's monotonic clock."""
        step = next(self._steps)
        for rank, said in self._said.items():
            path = self._folder / f"rank-{rank}.status.json"
            now = {"step": step, "beats": step, "time": moment, "progress_time": moment, "main_time": moment}
            path.with_suffix(".tmp").write_text(json.dumps({**said, **now}))
            path.with_suffix(".tmp").replace(path)

    @staticmethod
    def _first(rank: int, pid: int) -> dict[str, Any]:
        process = proc.read_stat(pid)
        assert process is not None, f"rank {rank} is gone"
        return {
            "pid": pid,
            "tid": pid,
            "start_time": process.start_time,
            "rank": rank,
            "attempt": "0",
            "source": "torch",
            "seq": {"0": [123456, 123456]},
            "backend": "nccl",
            "timeout_s": 600.0,
            "phase": None,
            "facts": {},
            "frameworks": ["torch"],
            "degraded": {},
            "looks": 0,
            "held": 0,
        }


def lengths(folder: Path) -> dict[str, int]:
    """Return how long the files below a folder are by kind, given up or not."""
    return _by_kind(folder, lambda status: status.st_size)


def on_disk(folder: Path) -> dict[str, int]:
    """Return how much of the disk the files below a folder take by kind."""
    return _by_kind(folder, lambda status: status.st_blocks * 512)


def _by_kind(folder: Path, measure: Callable[[os.stat_result], int]) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for path in folder.rglob("*"):
        if path.is_file():
            kind = next((kind for ending, kind in _ENDINGS.items() if path.name.endswith(ending)), "other")
            found[kind] += measure(path.stat())
    return found


def _append(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _last_told(index: Path) -> int:
    with index.open("rb") as file:
        size = file.seek(0, os.SEEK_END) // _RECORD.size * _RECORD.size
        file.seek(max(0, size - _RECORD.size))
        data = file.read(_RECORD.size)
    return int(_RECORD.unpack(data)[0]) if data else 0
