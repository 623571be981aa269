"""Controllers on nodes of this machine, without ssh: in this process, or as a process of its own that can be killed.

Agents, supervisors and workers are real. Between a controller and its nodes lies a wire that a test can cut, hold up and
look at; `python -m tests.agent.controlling RUN [NODE:COMMAND]` runs a controller whose wire to NODE swallows a command.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, Role, TransportKind, dump_spec, load_spec
from clusterctl.run.controller.loop import Controller
from clusterctl.run.nodes.run_end_on_nodes import end_run_on_node
from clusterctl.run.record import rundir
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.session.connect import open_session
from clusterctl.transport.local import LocalTransport
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from clusterctl.run.nodes.preflight import Preflight
    from clusterctl.run.rules.state import RunState
    from clusterctl.session.controller_inbox import InboxItemQueue
    from clusterctl.session.node_session import Session
    from clusterctl.transport.local import LocalChannel

_LAST_EPOCH = 1_000_000
_COMMAND = re.compile(rb'"cmd":"(\w+)"')
REPOSITORY = Path(__file__).resolve().parents[2]


class Wire:
    """A channel with a far end.

    Args:
        inner: The stream.
        delay: Seconds for which all that the node says is under way; what is said meanwhile travels along with it.
        swallow: A command that never arrives, nor does anything after it.
        replace: Bytes of the node's words that arrive as others.

    Attributes:
        asked: How often each command was asked.
    """

    def __init__(
        self,
        inner: LocalChannel,
        delay: float = 0.0,
        swallow: str | None = None,
        replace: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self._inner, self._delay, self._replace = inner, delay, replace
        self._swallow = f'"cmd":"{swallow}"'.encode() if swallow else None
        self._dead = False
        self.asked: Counter[str] = Counter()
        self._arriving: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self.login_note, self.host_key, self.warnings = inner.login_note, inner.host_key, inner.warnings
        if delay:
            threading.Thread(target=self._travel, daemon=True).start()

    @property
    def acknowledged_bytes(self) -> int:
        return self._inner.acknowledged_bytes

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        self._dead = self._dead or (self._swallow is not None and self._swallow in data)
        self.asked.update(found.decode() for found in _COMMAND.findall(data))
        if not self._dead:
            self._inner.send(data, timeout=timeout)

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        if not self._delay:
            data = self._inner.recv(limit, timeout=timeout)
            return data.replace(*self._replace) if self._replace[0] else data
        due, data = self._arriving.get(timeout=timeout)
        time.sleep(max(0.0, due - time.monotonic()))
        return data

    def _travel(self) -> None:
        data = b"-"
        while data:
            data = self._inner.recv(1 << 20)
            self._arriving.put((time.monotonic() + self._delay, data))

    def close(self) -> None:
        self._inner.close()

    def stderr_tail(self) -> str:
        return self._inner.stderr_tail()


class Nodes:
    """The way of a controller to nodes that are this machine.

    Attributes:
        opened: The sessions that were opened to each node.
        before: Called before a node is dialed, with how often that was done already; may wait or raise.
        wires: Options of the wires to a node that are laid from now on.
    """

    def __init__(self, home: Path) -> None:
        self._transport = LocalTransport({**os.environ, "XDG_STATE_HOME": str(home)})
        self._dialed: dict[str, int] = defaultdict(int)
        self._wires: dict[str, Wire] = {}
        self.opened: dict[str, list[Session]] = defaultdict(list)
        self.before: dict[str, Callable[[int], object]] = {}
        self.wires: dict[str, dict[str, Any]] = defaultdict(dict)

    def open(self, host: HostSpec, *, progress: Callable[[str], None] = lambda _: None) -> Wire:
        wire = self._wires[host.name] = Wire(self._transport.open(host, progress=progress), **self.wires[host.name])
        return wire

    def close(self) -> None:
        pass

    def dial(self, host: HostSpec, inbox: InboxItemQueue, progress: Callable[[str], None]) -> Session:
        count = self._dialed[host.name]
        self._dialed[host.name] += 1
        if host.name in self.before:
            self.before[host.name](count)
        session = open_session(self, host, inbox, progress=progress)
        self.opened[host.name].append(session)
        return session

    def asked(self, node: str) -> Counter[str]:
        """Return how often each command was asked of a node over its newest wire."""
        return self._wires[node].asked

    def cut(self, node: str) -> None:
        """Break the wire to a node."""
        session = self.opened[node][-1]
        self._wires[node].close()
        wait_for(lambda: not session.alive, what=f"the loss of {node}")


class Run:
    """A run on this machine, and the controllers that it has."""

    def __init__(
        self, folder: Path, command: str, names: tuple[str, ...], spares: tuple[str, ...] = (), **more: Any
    ) -> None:
        self.home = folder / "state"
        hosts = [
            HostSpec(
                name=name,
                host="localhost",
                transport=TransportKind.LOCAL,
                gpus=0,
                workers=1,
                workdir=str(folder),
                role=role,
            )
            for role, some in ((Role.WORKER, names), (Role.SPARE, spares))
            for name in some
        ]
        job = JobSpec(command=command, **{"grace": 1.0, "inject": False, **more.pop("job", {})})
        self.spec = ClusterSpec(name="r", path=str(folder / "cluster.yaml"), hosts=tuple(hosts), job=job, **more)
        self.dir = rundir.create_run_dir("r", self.home / "clusterctl" / "runs")
        self.dir.spec.write_text(dump_spec(self.spec))
        self.nodes = Nodes(self.home)
        self.code: int | None = None
        self._controller: Controller | None = None
        self._thread: threading.Thread | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def state(self) -> RunState:
        return load_state(self.dir)

    def on(self, node: str) -> Path:
        """Return the directory of the run on a node."""
        return self.home / "clusterctl" / "nodes" / self.dir.run / node

    # --- a controller in this process

    def start(self, preflight: Preflight | None = None, max_wait_s: float = 0.0) -> None:
        """Start the run."""
        self._controller = Controller(self.dir, self.spec, self.nodes.dial, preflight, max_wait_s)
        self._work(self._controller.start)

    def adopt(self, *, cancel: bool = False) -> None:
        """Have a new controller go on with the run."""
        self._controller = Controller(self.dir, self.spec, self.nodes.dial)
        if cancel:
            self._controller.cancel(kill=False)
        self._work(self._controller.adopt)

    def cancel(self, *, kill: bool = False) -> None:
        """End the run, as a person would."""
        assert self._controller is not None
        self._controller.cancel(kill=kill)

    def _work(self, work: Callable[[], int]) -> None:
        def controller() -> None:
            self.code = work()

        self.code = None
        self._thread = threading.Thread(target=controller, daemon=True)
        self._thread.start()

    def ended(self, seconds: float = 30.0) -> int | None:
        """Wait until the controller in this process has ended; return its exit code, `None` where it broke."""
        assert self._thread is not None
        self._thread.join(seconds)
        assert not self._thread.is_alive(), (
            f"the controller is at work after {seconds:g} s, the run {self.state.phase.value}"
        )
        return self.code

    def reaches(self, predicate: Callable[[RunState], object], seconds: float = 30.0, what: str = "") -> RunState:
        """Wait for a state of the run, and return it."""
        return wait_for(lambda: state if predicate(state := self.state) else None, seconds, what=what, every=0.02)

    # --- one that can be killed

    def start_process(self, *arguments: str) -> None:
        """Start the run with a controller of its own process."""
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.agent.controlling", str(self.dir.path), *arguments],
                cwd=REPOSITORY,
                env={**os.environ, "XDG_STATE_HOME": str(self.home)},
            )
        )

    def pause_controller(self, until: Callable[[], object], what: str) -> None:
        """Have the controller that is a process of its own stand still until something has happened."""
        self._processes[-1].send_signal(signal.SIGSTOP)
        try:
            wait_for(until, what=what)
        finally:
            self._processes[-1].send_signal(signal.SIGCONT)

    def kill_controller(self) -> None:
        """Kill the controller that is a process of its own."""
        self._processes[-1].kill()
        self._processes[-1].wait()

    def end(self) -> None:
        """End whatever is left of the run, whoever thinks that it is over."""
        for process in self._processes:
            process.kill()
            process.wait()
        if self._thread is not None and self._thread.is_alive():
            self.cancel(kill=True)
            self._thread.join(60)
        clean = Nodes(self.home)
        for host in self.spec.hosts:
            session = open_session(clean, host, queue.SimpleQueue(), epoch=_LAST_EPOCH)
            end_run_on_node(session, self.dir.run, host.name, 0.0)
            session.close()


@contextlib.contextmanager
def run_on(folder: Path, command: str, names: tuple[str, ...] = ("a", "b"), **more: Any) -> Iterator[Run]:
    """Give a run of one worker on each of these nodes, not started yet; nothing of it is left afterwards."""
    run = Run(folder, command, names, **more)
    try:
        yield run
    finally:
        run.end()


def main(path: str, *swallowed: str) -> int:
    """Run a controller as `up` does."""
    folder = RunDir(Path(path))
    nodes = Nodes(folder.path.parents[2])
    for one in swallowed:
        node, _, command = one.partition(":")
        nodes.wires[node]["swallow"] = command
    return Controller(folder, load_spec(folder.spec.read_text()), nodes.dial).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
