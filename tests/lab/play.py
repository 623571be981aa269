"""Three runs at once on two nodes of a world: one goes well, one has a worker that fails, one is ended by hand.

What happens in the world happens while all three are at work. Nothing is judged here: a `Play` is what was seen.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.lab.faulty import run_dir
from tests.lab.head_cli import Head
from tests.lab.spec import SHARED
from tests.lab.waiting import wait_for
from tests.lab.world import ENDED, FAILS, WELL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.world import Scene, World

SCRIPT: Final = f"""\
import os, select
rank, sign = os.environ["RANK"], "{SHARED}/" + os.environ["CLUSTERCTL_RUN_ID"]
number = 0
while not os.path.exists(sign + ".go"):
    if os.path.exists(sign + ".fail." + rank):
        os._exit(7)
    os.write(1, b"rank %s line %d: gr\\xc3\\xbc\\xc3\\x9fe\\n" % (rank.encode(), number))
    number += 1
    select.select([], [], [], 0.02)
os.write(1, b"%d lines" % number)
"""
RUNS: Final = (WELL, FAILS, ENDED)
FAILING: Final = 1
COMMAND_S: Final = 150.0
GONE_S: Final = 20.0
STALL: Final = {"timeout": "8s", "startup_timeout": "8s", "action": "stop"}
"""A false alarm is sure of itself 15 s later, and ends the run."""


def written(rank: int, lines: int) -> str:
    """Return what a rank has written that was at work until the end."""
    return "".join(f"rank {rank} line {number}: grüße\n" for number in range(lines)) + f"{lines} lines"


@dataclass(frozen=True)
class Done:
    """A command, how it ended, and how long it took; it was ended where the code is -1."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out)


@dataclass
class Play:
    """What was seen; of what is by name, the name is a run's: `WELL`, `FAILS`, `ENDED`.

    Attributes:
        nodes: The nodes, by node rank.
        started: `up` for each.
        runs: Their ids; none where one could not be started.
        before: `status` of each while all goes well.
        listed: What `ps` said then.
        after: `status` of each when all have ended.
        waited: `wait` for each.
        down: `down` of the run that is ended by hand.
        survivors: What was left of that run on the nodes.
        output: Of the run that goes well, by rank.
        events: What the head wrote down of each.
        left: What was left on the nodes in the end.
    """

    nodes: list[str]
    started: dict[str, Done] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    listed: list[Any] = field(default_factory=list)
    after: dict[str, Any] = field(default_factory=dict)
    waited: dict[str, Done] = field(default_factory=dict)
    down: Done | None = None
    survivors: list[str] = field(default_factory=list)
    output: dict[int, str] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def play(lab: Lab, world: World, folder: Path, *, quiet: float = 0.0) -> Play:
    """Play the three runs in a world.

    Args:
        lab: Has no nodes yet.
        world: The world.
        folder: For cluster files and state.
        quiet: For how long at least the run that goes well is at work after what happens in the world, in seconds.
    """
    with world.on(lab, 2) as scene:
        return _Player(lab, world, scene, folder).play(quiet)


class _Player:
    def __init__(self, lab: Lab, world: World, scene: Scene, folder: Path) -> None:
        self._lab, self._world, self._nodes, self._befall = lab, world, scene.nodes, scene.befall
        env = lab.head_env(XDG_STATE_HOME=str(folder / "state")) | scene.env
        self._heads = {name: Head(folder / name, env) for name in RUNS}
        enter = scene.enter or (lambda _: [])
        self._readers = {name: Head(head.folder, env, enter(head.folder)) for name, head in self._heads.items()}
        self._seen = Play(nodes=[node.name for node in scene.nodes])
        self._others = {(node.name, p.pid) for node in scene.nodes for p in node.leftovers()}

    def play(self, quiet: float) -> Play:
        seen = self._seen
        with ThreadPoolExecutor(len(RUNS)) as pool:
            seen.started = dict(zip(RUNS, pool.map(self._start, RUNS), strict=True))
        if not any(done.code for done in seen.started.values()):
            self._go_through(quiet)
        seen.left = self._left("")
        return seen

    def _go_through(self, quiet: float) -> None:
        seen = self._seen
        seen.runs = {name: done.json["run"] for name, done in seen.started.items()}
        for name in RUNS:
            self._write(name)
        seen.before = {name: self._status(name) for name in RUNS}
        seen.listed = self._run(self._readers[WELL], "ps", "--json").json
        self._befall()
        befell = time.monotonic()
        self._sign(FAILS, f"fail.{FAILING}")
        if self._world.outcomes[ENDED].cause.get("kind") == "node_lost":
            # It ends as what the head hears of first: without this, a matter of luck.
            wait_for(lambda: any(event.get("link") == "lost" for event in self._events(ENDED)), what="a lost node")
        seen.down = self._run(self._heads[ENDED], "down", seen.runs[ENDED], "--json")
        seen.waited[ENDED] = self._wait(ENDED)
        seen.survivors = self._left(seen.runs[ENDED])
        seen.waited[FAILS] = self._wait(FAILS)
        threading.Event().wait(max(0.0, befell + quiet - time.monotonic()))
        self._sign(WELL, "go")
        seen.waited[WELL] = self._wait(WELL)
        seen.after = {name: self._status(name) for name in RUNS}
        seen.events = {name: self._events(name) for name in RUNS}
        for rank in range(len(self._nodes)):
            seen.output[rank] = self._read(WELL, "logs", "--format", "raw", "--rank", str(rank)).out

    def _start(self, name: str) -> Done:
        head = self._heads[name]
        head.folder.mkdir(parents=True)
        (head.folder / "job.py").write_text(SCRIPT)
        hosts = {node.name: 1 for node in self._nodes}
        head.write(hosts, {"script": "job.py", "grace": "1s"}, name=name, stall=STALL, **self._world.file(name))
        return self._run(head, "up", "-d", "--no-health", "--json")

    def _read(self, name: str, *arguments: str) -> Done:
        return self._run(self._readers[name], *arguments, self._seen.runs[name])

    def _status(self, name: str) -> Any:
        return self._read(name, "status", "--json").json

    def _wait(self, name: str) -> Done:
        return self._read(name, "wait", "--timeout", "120s")

    def _write(self, name: str) -> None:
        """Return when all ranks of a run have written something that is on the head."""
        folder = run_dir(self._heads[name], self._seen.runs[name]) / "nodes"
        for rank, node in enumerate(self._nodes):
            log = folder / node.name / "attempt-0" / f"rank-{rank}.log"
            wait_for(lambda log=log: log.exists() and log.stat().st_size > 100, what=f"rank {rank} of {name}")  # type: ignore[misc]

    def _sign(self, name: str, sign: str) -> None:
        (self._lab.shared / f"{self._seen.runs[name]}.{sign}").touch()

    def _events(self, name: str) -> list[dict[str, Any]]:
        path = run_dir(self._heads[name], self._seen.runs[name]) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def _left(self, run: str) -> list[str]:
        """Return what of a run (of all, where none is named) is there when it should have gone."""

        def left() -> list[str]:
            alive = [(node, p) for node in self._nodes for p in node.leftovers()]
            ours = [(node, p) for node, p in alive if (node.name, p.pid) not in self._others]
            return [
                f"{node.name}: {p.command}"
                for node, p in ours
                if run in p.command or node.environ(p.pid).get("CLUSTERCTL_RUN_ID") == run
            ]

        return _until_none(left)

    @staticmethod
    def _run(head: Head, *arguments: str) -> Done:
        begun = time.monotonic()
        try:
            done = head.run(*arguments, timeout=COMMAND_S)
        except subprocess.TimeoutExpired as error:
            return Done(-1, "", f"not done: {error.stderr!r}", COMMAND_S)
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def _until_none(left: Callable[[], Sequence[str]]) -> list[str]:
    try:
        wait_for(lambda: not left(), GONE_S)
    except TimeoutError:
        return list(left())
    return []
