"""What nodes may say and not harm the head, the other nodes or other runs: each lie of `tests.hostile_agent` in a run.

All runs are at work at once, each with a controller of its own in this process; what is tested is how each has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.run_files import JOURNAL_FILE
from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, TransportKind, dump_spec
from clusterctl.run.controller.loop import Controller
from clusterctl.run.record import rundir
from clusterctl.run.record.state_reader import load_state
from clusterctl.session.node_session import Session
from clusterctl.transport.bootstrap import Preamble
from tests.hostile_agent import BORNE, LIES, Agent, Lie
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from clusterctl.run.rules.state import RunState
    from clusterctl.session.controller_inbox import InboxItemQueue

LIAR, HONEST = "liar", "honest"
GRACE = 1.0
KILL_SECONDS = GRACE + 45.0
LIMIT_SECONDS = 90.0
MOST_KB = 300 * 1024


class Pair:
    """A channel to a thread of this process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.login_note: str | None = None
        self.host_key: str | None = None
        self.warnings: tuple[str, ...] = ()
        self.acknowledged_bytes = 0
        self._reader: threading.Thread | None = None

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        self._sock.sendall(data)

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        self._reader = threading.current_thread()
        data = b""
        with contextlib.suppress(OSError):
            data = self._sock.recv(limit)
        if not data:
            self._sock.close()
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # Whoever receives closes it on the way out; the reading thread itself is not at it.
        if self._reader is threading.current_thread():
            self._sock.close()

    def stderr_tail(self) -> str:
        return ""


class Played:
    """A run of two nodes, one of which lies."""

    def __init__(self, root: Path, name: str, lie: Lie | None) -> None:
        hosts = [
            HostSpec(name=n, host="localhost", transport=TransportKind.LOCAL, gpus=0, workers=1, workdir=str(root))
            for n in (LIAR, HONEST)
        ]
        job = JobSpec(command="true", grace=GRACE, inject=False)
        self.spec = ClusterSpec(name="r", path=str(root / "cluster.yaml"), hosts=tuple(hosts), job=job)
        self.dir = rundir.create_run_dir(name, root)
        self.dir.spec.write_text(dump_spec(self.spec))
        self.lie = lie
        self.dialed = {LIAR: 0, HONEST: 0}
        self.agents: dict[str, Agent] = {}
        self.code: int | None = None
        self.seconds = 0.0
        self.controller = Controller(self.dir, self.spec, self._dial)
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        self.code = self.controller.start()

    def _dial(self, host: HostSpec, inbox: InboxItemQueue, _: Callable[[str], None]) -> Session:
        here, there = socket.socketpair()
        before, lie = self.agents.get(host.name), self.lie if host.name == LIAR else None
        descriptor = there.detach()
        agent = before.again(descriptor) if before else Agent(descriptor, lie, int(host.name == HONEST))
        self.agents[host.name] = agent
        self.dialed[host.name] += 1
        threading.Thread(target=agent.serve, daemon=True).start()
        session = Session(host.name, Pair(here), Preamble("python3", "3.11.2", archive_sent=False), inbox)
        session.start()
        try:
            session.hello = session.call(Command.HELLO, timeout=10.0)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def state(self) -> RunState:
        return load_state(self.dir)

    @property
    def said(self) -> str:
        return self.dir.events.read_text()

    def running(self) -> bool:
        return self.state.phase.value == "running"

    def kill(self) -> None:
        """Have it ended as `down --kill` has, and take the time."""
        began = time.monotonic()
        self.controller.cancel(kill=True)
        self.thread.join(LIMIT_SECONDS)
        self.seconds = time.monotonic() - began


def memory_kb(what: str, status: str | None = None) -> int:
    """What the status of a process (of this one, where none is given) says of its memory, in KiB."""
    lines = (Path("/proc/self/status").read_text() if status is None else status).splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


class Stage:
    """All plays, at work at once, and beside them a run without any liar."""

    def __init__(self, root: Path) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before_kb = memory_kb("VmRSS")
        self.other = Played(root, "other", None)
        self.other.thread.start()
        wait_for(self.other.running, what="the run without a liar")
        self.caught = {f"lie-{i}": Played(root, f"lie-{i}", lie) for i, lie in enumerate(LIES.values())}
        self.borne = {f"borne-{i}": Played(root, f"borne-{i}", lie) for i, lie in enumerate(BORNE.values())}
        for play in (*self.caught.values(), *self.borne.values()):
            play.thread.start()
        for play in self.borne.values():
            wait_for(play.running, what=f"{play.dir.run} to run")
        ends = [threading.Thread(target=play.kill) for play in self.borne.values()]
        for end in ends:
            end.start()
        until = time.monotonic() + LIMIT_SECONDS
        for play in self.caught.values():
            play.thread.join(max(0.0, until - time.monotonic()))
        for end in ends:
            end.join()
        self.peak_kb = memory_kb("VmHWM")

    def end(self) -> None:
        for play in (self.other, *self.caught.values()):
            play.kill()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("runs"))
    yield made
    made.end()


@pytest.mark.parametrize("place", range(len(LIES)), ids=list(LIES))
def test_a_node_that_says_what_cannot_be_loses_its_session_and_in_the_end_itself_and_is_named(
    stage: Stage, place: int
) -> None:
    play = stage.caught[f"lie-{place}"]

    assert not play.thread.is_alive()
    assert play.code in (4, 100, 105)
    assert play.state.phase.value in ("lost", "failed")
    assert LIAR in play.said
    assert play.lie is not None
    assert play.lie.says in play.said
    assert play.dialed[HONEST] == 1


@pytest.mark.parametrize("place", range(len(BORNE)), ids=list(BORNE))
def test_whatever_a_node_does_a_run_that_is_to_end_at_once_has_ended_in_time(stage: Stage, place: int) -> None:
    play = stage.borne[f"borne-{place}"]

    assert not play.thread.is_alive()
    assert play.seconds < KILL_SECONDS
    assert play.code == 103
    assert play.dialed == {LIAR: 1, HONEST: 1}


def test_a_node_that_never_says_that_all_has_ended_is_named_in_what_remains(stage: Stage) -> None:
    left = stage.borne[f"borne-{list(BORNE).index('it never says that all has ended')}"].state.remaining

    assert [(entry["node"], entry["why"]) for entry in left] == [(LIAR, "its node has not reported its end")]


def test_no_lie_of_a_node_of_one_run_is_felt_by_another_run(stage: Stage) -> None:
    assert stage.other.running()
    assert stage.other.dialed == {LIAR: 1, HONEST: 1}
    assert '"link":"unreachable"' not in stage.other.said


def test_all_lies_at_once_do_not_make_the_head_large(stage: Stage) -> None:
    # This process holds what other tests have left, which no head does.
    program = "import clusterctl.run.controller.loop, clusterctl.session; print(open('/proc/self/status').read())"
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert memory_kb("VmRSS", fresh) + stage.peak_kb - stage.before_kb < MOST_KB


def test_no_lie_leaves_a_file_outside_its_run(stage: Stage) -> None:
    root = stage.other.dir.path.parent
    names = {
        "events.jsonl",
        "lock",
        "epoch",
        "spec.json",
        "plan-0.json",
        "nodes",
        "summary.json",
        "control",
    }
    for play in stage.caught.values():
        assert {entry.name for entry in os.scandir(play.dir.path)} <= names
        assert not list(play.dir.path.rglob("*escape*"))
    assert all(entry.name.startswith(("lie-", "borne-", "other-")) for entry in os.scandir(root))


def test_a_head_that_cannot_write_what_honest_nodes_say_calls_none_of_them_a_liar(tmp_path: Path) -> None:
    play = Played(tmp_path, "own", None)
    (play.dir.node(LIAR) / JOURNAL_FILE).mkdir(parents=True)

    with pytest.raises(IsADirectoryError):
        play.controller.start()

    assert "invalid message" not in play.said
    assert '"link":"lost"' not in play.said
    assert play.dialed == {LIAR: 1, HONEST: 1}
