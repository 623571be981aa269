"""A node through weeks: a real agent, supervisor, waiters and workers, whose clocks leap and whose output is sparse.

The time of a run goes by in two ways. In steps of a second, each of which all processes live through: what they write
then is what they write in a day. And in leaps of an hour, in which the output grows by an hour's lines without a byte
on the disk, and the index and the samples by what the supervisor slept through: so files reach the sizes, and clocks
the ages, at which something has to give way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import Node
from tests.soak import processes
from tests.soak.clock import Clock
from tests.soak.files import DAY, HOUR, WIDTH, Files, lengths, on_disk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.talk import Talk

MAX_SIZE = 64 << 20
RESERVE = 1 << 20
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
        sample: Bytes of one sample of all ranks, of which there is one every two seconds.
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
    sample: int = 0
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
        self.files = Files(self._node.folder, ranks)
        self.supervisor = self._node.supervisor()

    def end(self) -> None:
        self._node.end()

    def seconds(self, count: int, real: float) -> None:
        """Live through some seconds in `real` seconds each: each rank writes a line in each."""
        begun = self.clock.monotonic()
        for number in range(count):
            self.files.line()
            self.clock.second(begun + number + 1, real)

    def hour(self, lines: int, samples: float) -> None:
        """Leap over an hour, and wait until the supervisor has seen what there is then.

        Args:
            lines: How many each rank has written in it.
            samples: Bytes of samples that the supervisor would have written in it.
        """
        self.files.hour(time.time() + self.clock.ahead, lines, samples, sparse=True)
        self.clock.leap(HOUR)
        self._talk.eventually(self.files.indexed)
        self.store()

    def store(self) -> None:
        """Say that all output and all indices are safe on the head."""
        files = [*self.files.logs, *self.files.indices]
        offsets = {str(path.relative_to(self.files.folder)): path.stat().st_size for path in files}
        self._talk.post(Command.REPLICATED, **self._node.where, offsets=offsets)
        self._talk.read(0)

    def lengths(self) -> dict[str, int]:
        """Return how long the files are by kind, given up or not."""
        return lengths(self.files.folder)

    def held(self) -> Held:
        """Return what there is of the run now."""
        return Held(
            on_disk(self.files.folder),
            processes.lasting_descriptors(self.supervisor),
            processes.lasting_memory_mb(self.supervisor),
        )

    def cpu(self, seconds: float) -> float:
        """Return the seconds a day that the run's own processes use, from so many seconds that all go by themselves."""
        family = processes.family(self.supervisor)
        before, begun = processes.cpu_seconds(family), time.monotonic()
        time.sleep(seconds)
        used = processes.cpu_seconds(processes.family(self.supervisor)) - before
        return used / (time.monotonic() - begun) * DAY


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
        each = round(lines / ranks / hours)
        played = Played(ranks, cpu=run.cpu(still))
        run.seconds(10, real)
        before, begun = run.lengths(), run.clock.monotonic()
        run.seconds(seconds, real)
        lived = run.clock.monotonic() - begun
        played.written = {kind: (size - before[kind]) / lived * DAY for kind, size in run.lengths().items()}
        played.sample = len(run.files.last_sample())
        samples = played.written["samples"] / 24
        for _ in range(hours // 2):
            run.hour(each, samples)
        played.before = run.held()
        for _ in range(hours - hours // 2):
            run.hour(each, samples)
        played.after = run.held()
        played.days = run.clock.ahead / DAY
        played.output = run.lengths()["output"]
        played.lines = played.output / WIDTH
        played.peak_mb = processes.peak_mb(run.supervisor)
        return played
    finally:
        run.end()
