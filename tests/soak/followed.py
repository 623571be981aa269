"""A node and its head through days: a real controller, whose connections are killed amid what they carry.

All of them have one clock that leaps. What the ranks write is numbered, so that each byte on the head can be told.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from clusterctl.agent.node_state.run_dir import RunDir as NodeDir
from clusterctl.agent.protocol import run_files as protocol_files
from clusterctl.config.spec import HealthSpec, LogsSpec, dump_spec
from clusterctl.run.record.run_dir_writer import MAX_SAMPLES_BYTES
from clusterctl.run.rules.state import WorkerPhase
from tests.agent.controlling import REPOSITORY, Run
from tests.lab.waiting import wait_for
from tests.soak import processes
from tests.soak.clock import Clock
from tests.soak.files import DAY, HOUR, WIDTH, Files, Shims, lengths, numbered, on_disk
from tests.soak.head import CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RESERVE = 1 << 20
NODE = "a"
_STEADY_AFTER = 75
_SECONDS = 300.0


@dataclass
class Head:
    """What the head of a run holds at a moment.

    Attributes:
        disk: Bytes on the disk by kind.
        descriptors: How many its controller has open.
        memory_mb: What its controller holds.
        peak_mb: The most that it held at once.
        reconnects: How often it was connected again till then.
    """

    disk: dict[str, int] = field(default_factory=dict)
    descriptors: int = 0
    memory_mb: float = 0.0
    peak_mb: float = 0.0
    reconnects: int = 0


@dataclass
class Followed:
    """What was measured.

    Attributes:
        days: How long the run lived by its own clocks.
        on_node: Bytes a day by kind that were written there, in steps of a second.
        on_head: The same for the run directory on the head.
        clocks: Bytes a day on the head that tell of clocks which have moved: they do where one leaps amid a question.
        events: Bytes that a reconnect adds to the journal of the controller.
        before: What the head held after half of the leaps.
        after: What it held in the end.
        asked: Bytes of the largest request with which a session began to follow.
        came: Bytes that had come from the node when the last session began to follow: what it was asked for to
            compare is among them.
        stored: Bytes of the node's files that are on the head, given up again or not.
        differing: Files whose bytes on the head are not those that were written.
    """

    ranks: int
    days: float = 0.0
    on_node: dict[str, float] = field(default_factory=dict)
    on_head: dict[str, float] = field(default_factory=dict)
    clocks: float = 0.0
    events: float = 0.0
    before: Head = field(default_factory=Head)
    after: Head = field(default_factory=Head)
    asked: int = 0
    came: int = 0
    stored: int = 0
    differing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Written:
    """How long all files of a kind are at a moment, and how many bytes on the head tell of clocks."""

    moment: float
    on_node: dict[str, int]
    on_head: dict[str, int]
    clocks: int


class FollowedRun:
    """A run on a node, and its controller as a process of its own."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.clock = Clock(folder)
        self._run = Run(folder, "exec sleep 1000000000", (NODE,))
        hosts = tuple(replace(host, workers=ranks) for host in self._run.spec.hosts)
        quiet = HealthSpec(thresholds={"during.interval": 0.0})
        spec = replace(self._run.spec, hosts=hosts, logs=LogsSpec(reserve=RESERVE), health=quiet)
        self._run.spec = spec
        self.dir = self._run.dir
        self.dir.spec.write_text(dump_spec(spec))
        self._controller = self._start()
        self.files = Files(self._run.on(NODE), ranks)
        workers = self._begun(ranks)
        where = NodeDir(str(self._run.home / "clusterctl"), self.dir.run, NODE)
        self.shims = Shims(where.status_dir(0), workers)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.clock.environment, "XDG_STATE_HOME": str(self._run.home)}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.soak.head", str(self.dir.path)], cwd=REPOSITORY, env=environment
        )

    def _begun(self, ranks: int) -> dict[int, int]:
        def running() -> dict[int, int]:
            workers = self._run.state.workers
            return {r: w.pid for r, w in workers.items() if w.phase is WorkerPhase.RUNNING and w.pid is not None}

        return wait_for(lambda: found if len(found := running()) == ranks else None, _SECONDS, "all ranks", 0.1)

    def end(self) -> None:
        self._controller.kill()
        self._controller.wait()
        self._run.end()

    def seconds(self, count: int, real: float) -> None:
        """Live through some seconds: each rank writes a line and makes a step in each, and the head has got it."""
        begun = self.clock.monotonic()
        for number in range(count):
            self.shims.step(begun + number + 1)
            self.files.line()
            self.clock.second(begun + number + 1, real)
            self._replicated(self.files.logs)

    def hour(self, lines: int, samples: float) -> None:
        """Leap over an hour, kill the connection amid what it carries, and wait until the head has all of it."""
        agents, before = processes.children(self._controller.pid), self.reconnects()
        self.files.hour(time.time() + self.clock.ahead, lines, samples, sparse=False)
        self.shims.step(self.clock.monotonic() + HOUR)
        self.clock.leap(HOUR)
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent, signal.SIGKILL)
        self._steps_until(lambda: self.reconnects() > before, "another connection")
        self._steps_until(self.files.indexed, "the supervisor")
        self._replicated(self._all())

    def _replicated(self, files: list[Path]) -> None:
        there = {path: path.stat().st_size for path in files}

        def all_there() -> bool:
            return all(_size(self.on_head(path)) >= size for path, size in there.items())

        self._steps_until(all_there, "the head to have all")

    def _steps_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait while time goes on by itself, and the ranks with it."""
        stepped = time.monotonic()

        def looked() -> bool:
            nonlocal stepped
            if time.monotonic() >= stepped + 1:
                stepped = time.monotonic()
                self.shims.step(self.clock.monotonic())
            return reached()

        wait_for(looked, _SECONDS, what, 0.005)

    def on_head(self, path: Path) -> Path:
        """Return where the head has a file of the node."""
        return self.dir.node(NODE) / path.relative_to(self.files.folder)

    def connections(self) -> list[tuple[int, int]]:
        """Return the bytes in which each session asked the node to tell, and those that had come by then."""
        lines = self.dir.path.with_name(f"{self.dir.run}.{CONNECTIONS}").read_text().splitlines()
        return [(int(asked), int(came)) for asked, came in (line.split() for line in lines)]

    def reconnects(self) -> int:
        return len(self.connections()) - 1

    def written(self) -> _Written:
        """Return how much there is once the head has what the node has."""
        moment, on_node = self.clock.monotonic(), lengths(self.files.folder)
        self._replicated(self._all())
        # Read once: the controller may write between two looks.
        events = self.dir.events.read_bytes()
        clocks = sum(len(line) for line in events.splitlines(True) if b'"kind":"clock"' in line)
        return _Written(moment, on_node, {**lengths(self.dir.path), "events": len(events)}, clocks)

    def _all(self) -> list[Path]:
        return [*self.files.logs, *self.files.indices, self.files.samples]

    def head(self) -> Head:
        """Return what the head holds."""
        pid = self._controller.pid
        return Head(
            on_disk(self.dir.path),
            processes.lasting_descriptors(pid),
            processes.lasting_memory_mb(pid),
            processes.peak_mb(pid),
            self.reconnects(),
        )

    def differing(self) -> list[str]:
        """Return the files that the head does not have as they were written, up to where it has them."""
        files, wrong = self.files, []
        for rank, path in enumerate(files.logs):
            if self.on_head(path).read_bytes() != numbered(rank, 0, path.stat().st_size // WIDTH):
                wrong.append(path)
        first = protocol_files.find_first_kept_byte(_size(self.on_head(files.samples)), MAX_SAMPLES_BYTES)
        for path, kept in [*dict.fromkeys(files.indices, 0).items(), (files.samples, first)]:
            size = _size(self.on_head(path))
            if _part(path, kept, size) != _part(self.on_head(path), kept, size):
                wrong.append(path)
        journal = files.folder / protocol_files.JOURNAL_FILE
        if _records(journal) != _records(self.on_head(journal)):
            wrong.append(journal)
        return [path.relative_to(files.folder).as_posix() for path in wrong]

    def stored(self) -> int:
        """Return how many bytes of the node's files the head has got, given up again or not."""
        return sum(lengths(self.dir.node(NODE)).values())


def _part(path: Path, first: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(first)
        return file.read(end - first)


def _records(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def play(
    folder: Path, ranks: int, *, seconds: int, real: float, hours: int, lines: int, samples: float | None = None
) -> Followed:
    """Play a run that is followed; each of its hours ends a connection.

    Args:
        folder: Where it lies.
        ranks: How many it has on the node, each of which makes a step a second.
        seconds: How many it lives through one by one, after the minute in which it becomes steady.
        real: How long each of those takes at least.
        hours: How many it leaps over then.
        lines: How many lines each rank writes in each of those.
        samples: Bytes of samples that are written in each of those; default as many as in the seconds before.
    """
    run = FollowedRun(folder, ranks)
    try:
        played = Followed(ranks)
        run.seconds(_STEADY_AFTER, real)
        before = run.written()
        run.seconds(seconds, real)
        after = run.written()
        days = (after.moment - before.moment) / DAY
        played.on_node = {kind: (size - before.on_node[kind]) / days for kind, size in after.on_node.items()}
        played.on_head = {kind: (size - before.on_head[kind]) / days for kind, size in after.on_head.items()}
        played.clocks = (after.clocks - before.clocks) / days
        _hours(run, played, hours, lines, played.on_node["samples"] / 24 if samples is None else samples)
        played.days = run.clock.ahead / DAY
        return played
    finally:
        run.end()


def _hours(run: FollowedRun, played: Followed, hours: int, lines: int, samples: float) -> None:
    for _ in range(hours // 2):
        run.hour(lines, samples)
    played.before, events = run.head(), lengths(run.dir.path)["events"]
    for _ in range(hours - hours // 2):
        run.hour(lines, samples)
    played.after = run.head()
    played.events = (lengths(run.dir.path)["events"] - events) / (played.after.reconnects - played.before.reconnects)
    played.asked = max(asked for asked, _ in run.connections())
    played.came, played.stored = run.connections()[-1][1], run.stored()
    played.differing = run.differing()
