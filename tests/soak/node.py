"""A node through weeks: a real agent, supervisor, waiters and workers, whose clocks leap and whose output is sparse.

The time of a run goes by in two ways. In steps of a second, each of which all processes live through: what they write
then is what they write in a day. And in leaps of an hour, in which the output grows by an hour's lines without a byte
on the disk, and the index and the samples by what the supervisor slept through: so files reach the sizes, and clocks
the ages, at which something has to give way.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent import protocol
from clusterctl.agent.protocol import Command
from tests.agent.conftest import Node
from tests.soak import processes
from tests.soak.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.talk import Talk

DAY = 86400
HOUR = 3600
MAX_SIZE = 64 << 20
RESERVE = 1 << 20
LINE = b"step 12345 loss 0.1234 and what else a rank has to say every second of a day, a hundred bytes each\n"
WORKER = ["sleep", "1000000000"]


@dataclass
class Held:
    """What a run holds on its node at a moment: bytes on the disk by kind, and what its processes hold."""

    disk: dict[str, int] = field(default_factory=dict)
    descriptors: int = 0
    memory_mb: float = 0.0


@dataclass
class Played:
    """What was measured.

    Attributes:
        days: How long the run lived by its own clocks.
        output: Bytes that its ranks have written together.
        lines: How many lines that is.
        written: Bytes a day by kind, in steps: all that is written, given up again or not.
        cpu: Seconds a day that supervisor, samplers and waiters use.
        peak_mb: The most memory that the supervisor held at once.
        before: What was held after half of the leaps.
        after: What was held in the end.
    """

    ranks: int
    days: float = 0.0
    output: int = 0
    lines: float = 0.0
    written: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0
    peak_mb: float = 0.0
    before: Held = field(default_factory=Held)
    after: Held = field(default_factory=Held)


class LongRun:
    """A run on a node, and a controller that has stored all that it has."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks, self.clock = ranks, Clock(folder)
        self._node = Node(folder, env=self.clock.environment, idle=1e12)
        self._talk: Talk = self._node.talk()
        self._node.prepare(self._talk, ranks, max_size=MAX_SIZE, reserve=RESERVE)
        self._node.start(self._talk, *([WORKER] * ranks))
        self._logs = [self._node.folder / protocol.output_file(0, rank) for rank in range(ranks)]
        self.supervisor = self._node.supervisor()

    def end(self) -> None:
        self._node.end()

    def second(self, real: float) -> None:
        """Live through a second in `real` seconds: each rank writes a line."""
        for log in self._logs:
            self._write(log, LINE)
        self.clock.leap(1.0)
        time.sleep(real)

    def hour(self, grown: int, samples: float) -> None:
        """Leap over an hour, and wait until the supervisor has seen what there is then.

        Args:
            grown: Bytes that each rank has written in it, with a record of its index a second.
            samples: Bytes of samples that the supervisor would have written in it.
        """
        for rank, log in enumerate(self._logs):
            size, begun = log.stat().st_size, time.time() + self.clock.ahead
            told = ((size + grown * second // HOUR, begun + second) for second in range(1, HOUR))
            self._write(self._index(rank), b"".join(protocol.INDEX_RECORD.pack(*each) for each in told))
            os.truncate(log, size + grown)
            self._write(log, LINE)
        self._write(self._samples, self._sample() * round(self._unbroken(samples) / len(self._sample())))
        self.clock.leap(HOUR)
        wanted = self._logs[-1].stat().st_size
        self._talk.eventually(lambda: _last_told(self._index(self.ranks - 1)) >= wanted)
        self.store()

    def _unbroken(self, wanted: float) -> float:
        """Return how much of so many bytes of samples may be written for a supervisor, which looks where it cuts."""
        half = protocol.SAMPLES_KEPT // 2
        return min(wanted, half - self._samples.stat().st_size % half - len(self._sample()))

    def _index(self, rank: int) -> Path:
        return self._node.folder / protocol.index_file(0, rank)

    @property
    def _samples(self) -> Path:
        return self._node.folder / protocol.SAMPLES_FILE

    def _sample(self) -> bytes:
        with self._samples.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 20)))
            return file.read().splitlines(keepends=True)[-1]

    def _write(self, log: Path, data: bytes) -> None:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def store(self) -> None:
        """Say that all output and all indices are safe on the head."""
        files = [form(0, rank) for form in (protocol.output_file, protocol.index_file) for rank in range(self.ranks)]
        offsets = {name: (self._node.folder / name).stat().st_size for name in files}
        self._talk.post(Command.REPLICATED, **self._node.where, offsets=offsets)
        self._talk.read(0)

    def sizes(self) -> dict[str, int]:
        """Return how long the files are by kind, given up or not."""
        return self._by_kind(lambda status: status.st_size)

    def held(self) -> Held:
        """Return what there is of the run now."""
        family = processes.family(self.supervisor)
        return Held(
            self._by_kind(lambda status: status.st_blocks * 512),
            processes.descriptors(self.supervisor),
            processes.shared_out_mb(family),
        )

    def _by_kind(self, measure: Callable[[os.stat_result], int]) -> dict[str, int]:
        found = dict.fromkeys(KINDS.values(), 0)
        for path in self._node.folder.rglob("*"):
            if path.is_file():
                kind = next((kind for ending, kind in KINDS.items() if path.name.endswith(ending)), "other")
                found[kind] = found.get(kind, 0) + measure(path.stat())
        return found

    def cpu(self, seconds: float) -> float:
        """Return the seconds a day that the run's own processes use, from so many seconds that all go by themselves."""
        family = processes.family(self.supervisor)
        before, begun = processes.cpu_seconds(family), time.monotonic()
        time.sleep(seconds)
        used = processes.cpu_seconds(processes.family(self.supervisor)) - before
        return used / (time.monotonic() - begun) * DAY


KINDS = {"samples.jsonl": "samples", ".idx": "index", ".log": "output", "journal.jsonl": "journal"}


def _last_told(index: Path) -> int:
    record = protocol.INDEX_RECORD
    with index.open("rb") as file:
        size = file.seek(0, os.SEEK_END) // record.size * record.size
        file.seek(max(0, size - record.size))
        data = file.read(record.size)
    return int(record.unpack(data)[0]) if data else 0


def play(folder: Path, ranks: int, *, seconds: int, real: float, hours: int, lines: float, still: float) -> Played:
    """Play a run.

    Args:
        folder: Where it lies.
        ranks: How many it has on the node.
        seconds: How many it lives through one by one.
        real: How long each of those takes.
        hours: How many it leaps over then.
        lines: How many lines all ranks together write in those.
        still: Seconds for which its use of the processor is measured.
    """
    run = LongRun(folder, ranks)
    try:
        grown = round(lines * len(LINE) / ranks / hours)
        played = Played(ranks, cpu=run.cpu(still))
        for _ in range(10):
            run.second(real)
        before, begun, ahead = run.sizes(), time.monotonic(), run.clock.ahead
        for _ in range(seconds):
            run.second(real)
        lived = run.clock.ahead - ahead + time.monotonic() - begun
        played.written = {kind: (size - before[kind]) / lived * DAY for kind, size in run.sizes().items()}
        samples = played.written["samples"] / 24
        for _ in range(hours // 2):
            run.hour(grown, samples)
        played.before = run.held()
        for _ in range(hours - hours // 2):
            run.hour(grown, samples)
        played.after = run.held()
        played.days = run.clock.ahead / DAY
        played.output = run.sizes()["output"]
        played.lines = played.output / len(LINE)
        played.peak_mb = processes.peak_mb(run.supervisor)
        return played
    finally:
        run.end()
