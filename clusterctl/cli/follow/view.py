"""A run on the screen: its steps, its output, its end. Reads files; wakes when the controller rings, or for a key."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import requests
from clusterctl.cli.signals import heeded
from clusterctl.logs.fold import Folder
from clusterctl.logs.follow import Follower
from clusterctl.logs.line import LogQuery
from clusterctl.logs.select import FailingEnds, default_ranks
from clusterctl.render.log import LogWriter, Timestamps
from clusterctl.render.progress import PhaseEnd, PhaseView, PhaseWriter, ProgressMode
from clusterctl.run.controller import control, process
from clusterctl.run.controller.live_tail import ControllerSource, NotYetError
from clusterctl.run.record.reader import StateReader, load_state
from clusterctl.run.rules import events

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState

_REDRAW = 0.1
_UNATTENDED_LOOK = 1.0
_PATIENCE = 5.0


class Leave(str, Enum):
    """Why the view was left."""

    ENDED = "ended"
    DETACHED = "detached"
    UNATTENDED = "unattended"
    STARTED = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """What to show.

    Attributes:
        ranks: Only these, in full; `None` for the default view (rank 0, and the failing ends of the others).
        everything: All ranks in full.
        owns: This is the `up` that started the run: Ctrl-C stops it.
        until_started: Leave once every rank has started (`up -d`).
        output: Show output of workers at all.
        verbose: Name every node that is waited for, and tell what each one reports.
        heard: What of each node's reports is old news (`heard`); `None` for what is there at the first look.
    """

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    everything: bool = False
    timestamps: Timestamps = Timestamps.NONE
    progress: ProgressMode = ProgressMode.AUTO
    owns: bool = False
    until_started: bool = False
    output: bool = True
    tail: int | None = None
    phases: bool = True
    verbose: bool = False
    heard: Mapping[str, int] | None = None


def heard(run: RunDir) -> dict[str, int]:
    """Return node to the number of its last event that is here: what a command need not tell that begins now."""
    state = load_state(run)
    return {name: node.seq for name, node in {**state.retired, **state.nodes}.items()}


class RunScreen:
    """Follows one run until it ends or the person leaves."""

    def __init__(self, run: RunDir, console: Console, options: ViewOptions) -> None:
        self._run, self._console, self._options = run, console, options
        self._reader = StateReader(run)
        self._phases = PhaseWriter(console.err, mode=options.progress, every=options.verbose)
        self._log = LogWriter(console.out, timestamps=options.timestamps)
        self._follower: Follower | None = None
        self._folder = Folder()
        self._ends = FailingEnds(self._shown_ranks())
        self._bell = control.Bell(run)
        self._interrupts = 0
        self._leave: Leave | None = None
        self._told: set[str] = set()
        self._deaf = False
        self._joining = True
        self._patient_until = time.monotonic() + _PATIENCE

    @property
    def state(self) -> RunState:
        """What is known of the run."""
        return self._reader.state

    def follow(self) -> Leave:
        """Show the run; return why the view ended."""
        with _keys(enabled=sys.stdin.isatty() and sys.stderr.isatty()) as keys, self._signals() as wake:
            while self._leave is None:
                self._look(wake)
                if self._leave is None:
                    self._wait(keys, wake)
                    self._phases.tick(time.monotonic())
        self._phases.close()
        self._bell.close()
        return self._leave

    # --- looking

    def _look(self, wake: int) -> None:
        bell = self._bell.clear()
        heads, nodes = self._reader.refresh()
        for _, event in heads:
            self._show_head(event)
        # Whoever comes later need not hear every step that was before.
        old = {} if self._options.owns or not self._joining else self._options.heard
        self._joining = False
        if self._options.output:
            self._show_output()
        self._show_nodes(nodes, old)
        if self.state.over:
            self._finish(wake)
        elif self._options.until_started and self._all_started():
            self._leave = Leave.STARTED
        elif self._options.output and not self._console.out.has_reader():
            self._leave = Leave.DETACHED
        elif not bell and not self._run.attended:
            self._unattended(wake)

    def _all_started(self) -> bool:
        state = self.state
        return state.attempt >= 0 and all(w.pid is not None for w in state.workers.values())

    def _unattended(self, wake: int) -> None:
        """The controller is gone; what it wrote last may have come after our look."""
        self._reader.refresh()
        if self.state.over:
            self._finish(wake)
        elif self._bell.fileno() is None:
            self._bell = control.Bell(self._run)
            if self._bell.fileno() is None and not self._run.attended:
                self._leave = Leave.UNATTENDED

    def _finish(self, wake: int) -> None:
        """Show what is unread of a run that has ended. There is nothing left to stop: a signal only cuts that short."""
        self._leave = Leave.ENDED
        if not self._options.output or (follower := self._follower_there()) is None:
            return
        for lines in follower.finish():
            self._write(self._folder.feed(lines, time.monotonic()))
            if select.select([wake], [], [], 0)[0]:
                self._narrate(f"the rest of the output: `clusterctl logs {self._run.run}`")
                return
        self._write(self._folder.flush())

    def _show_head(self, event: events.ControllerEvent) -> None:
        match event:
            case events.Phase() if self._options.phases:
                self._phases.update(_phase_view(event), time.monotonic())
            case events.Note():
                self._phases.note(f"{event.level}: {event.text}" if event.level != "info" else event.text)
            case events.Link() if event.link == "unreachable":
                since = f" for {event.seconds:.0f} s" if event.seconds else ""
                self._narrate(f"{event.node}: unreachable{since} ({event.why or 'no answer'}); its workers go on")
                self._told.add(event.node)
            case events.Link() if event.link == "connected" and event.node in self._told:
                self._told.discard(event.node)
                self._narrate(f"{event.node}: connected again")
            case events.Link() if event.link == "lost":
                self._narrate(f"{event.node}: lost ({event.why})")
            case events.Decided():
                self._narrate(_decided_text(event))
            case events.Restarting():
                self._narrate(f"restarting ({event.why}): attempt {event.attempt} follows")
            case events.Health() if self._is_news(event):
                from clusterctl.render.words import health_news

                self._narrate(health_news(event))
            case events.StallSeen():
                from clusterctl.render.words import stall_news

                for line in stall_news(event, self._run.run):
                    self._narrate(line)
            case _:
                pass

    def _is_news(self, event: events.Health) -> bool:
        """Whoever comes later need not hear of trouble that is over."""
        return not self._joining or (event.node, event.gpu, event.key) in self.state.troubles

    def _show_nodes(
        self, news: list[tuple[str, node_events.Stamp, node_events.Event]], old: Mapping[str, int] | None
    ) -> None:
        ended = [(node, stamp, event) for node, stamp, event in news if isinstance(event, node_events.Exited)]
        exits = [(node, stamp.wall - self._ahead(node), event) for node, stamp, event in ended]
        if self._options.output and exits:
            self._write(self._folder.flush())
            self._write(self._ends.lines(exits))
        for node, stamp, event in news:
            fresh = old is not None and stamp.seq > old.get(node, 0)
            if self._options.verbose and fresh and (told := _reported(event)):
                self._narrate(f"{node}: {told}")
            match event:
                case node_events.Alarm():
                    where = f"{node} GPU {event.gpu}" if event.gpu is not None else node
                    self._narrate(f"{event.severity}: {where}: {event.message}")
                case node_events.Dropped() if event.lost:
                    self._narrate(
                        f"warning: {node} r{event.rank}: {event.lost} bytes of output were dropped ({event.why})"
                    )
                case node_events.Adopted():
                    self._narrate(f"{node}: {_adopted_text(self.state, node, stamp)}")
                case _:
                    pass

    def _narrate(self, text: str) -> None:
        self._console.out.clear()
        self._phases.note(text)

    # --- output

    def _shown_ranks(self) -> frozenset[int] | None:
        if self._options.everything:
            return None
        return self._options.ranks if self._options.ranks is not None else default_ranks(1)

    def _show_output(self) -> None:
        if (follower := self._follower_there()) is not None:
            self._write(self._folder.feed(follower.poll(), time.monotonic()))

    def _follower_there(self) -> Follower | None:
        """Return what follows the output, made when the first attempt begins, its history shown."""
        state = self.state
        if self._follower is None and state.attempt >= 0:
            ranks = self._shown_ranks()
            query = LogQuery(ranks=ranks, nodes=self._options.nodes, tail=self._options.tail)
            follower = Follower(self._run.path, query, skew=self._ahead, source=self._source(query))
            try:
                history = [] if self._options.tail is None else list(follower.history())
            except NotYetError:
                return None
            self._follower = follower
            self._log.expect(list(state.nodes), state.workers.keys() if ranks is None else ranks)
            self._folder = Folder(frozenset(state.workers) if ranks is None else ranks)
            self._write(self._folder.feed(history, time.monotonic()))
        return self._follower

    def _ahead(self, node: str) -> float:
        """Return how far a node's clock is ahead, as far as that is known when this is called."""
        return self.state.ahead(node)

    def _source(self, query: LogQuery) -> ControllerSource | None:
        """Return where the tail comes from while replicas lag behind; a controller is waited for, but not for long."""
        if self._options.tail is None or time.monotonic() > self._patient_until:
            return None
        return ControllerSource(self._run, self.state, query)

    def _write(self, lines: Any) -> None:
        if lines:
            self._phases.close()
            self._log.write(lines)

    # --- waiting

    def _wait(self, keys: int | None, wake: int) -> None:
        bell = self._bell.fileno()
        keys = None if self._deaf else keys
        watched = [fd for fd in (bell, keys, wake) if fd is not None]
        timeout = _UNATTENDED_LOOK if self.state.attempt >= 0 else _REDRAW
        if self._follower is not None and self._follower.more:
            timeout = 0.0
        if self._follower is None and self._options.tail is not None:
            timeout = _REDRAW
        due = self._folder.next_due()
        if due is not None:
            timeout = min(timeout, max(0.0, due - time.monotonic()))
        ready, _, _ = select.select(watched, [], [], timeout)
        if wake in ready:
            self._signalled(os.read(wake, 64))
        if keys is not None and keys in ready:
            self._pressed(_read_keys(keys))

    def _pressed(self, data: bytes) -> None:
        if data[:1] in (b"d", b"\x04"):
            self._leave = Leave.DETACHED
        self._deaf = not data

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGHUP:
                self._leave = Leave.DETACHED
            elif number in (signal.SIGINT, signal.SIGTERM):
                self._interrupted()

    def _interrupted(self) -> None:
        if not self._options.owns:
            self._leave = Leave.DETACHED
            return
        self._interrupts += 1
        kill = self._interrupts > 1
        try:
            answer = control.ask(self._run, "down", {"kill": kill}, timeout=5.0)
        except control.NoControllerError:
            self._leave = Leave.UNATTENDED
            return
        if kill:
            self._narrate("killing now")
        else:
            self._narrate(
                f"stopping {self._run.run}: SIGTERM, {answer.get('grace', 0):g} s grace, SIGKILL · again to kill now"
            )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        old_fd = signal.set_wakeup_fd(writer)
        old = {n: signal.signal(n, lambda *_: None) for n in heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        # What came while nobody could heed it is heeded now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, process.HELD_BACK)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)


@contextlib.contextmanager
def _keys(*, enabled: bool) -> Iterator[int | None]:
    """Give single key presses, not echoed; Ctrl-C stays a signal."""
    if not enabled:
        yield None
        return
    import termios

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    try:
        # In the background the terminal is not ours to change.
        if os.tcgetpgrp(fd) != os.getpgrp():
            yield None
            return
        termios.tcsetattr(fd, termios.TCSANOW, mode)
        yield fd
    finally:
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _read_keys(fd: int) -> bytes:
    """Return what was typed; nothing where the terminal is gone."""
    try:
        return os.read(fd, 64)
    except OSError:
        return b""


def _phase_view(event: events.Phase) -> PhaseView:
    end = PhaseEnd.RUNNING
    if event.ended:
        end = PhaseEnd.FAIL if event.failed else PhaseEnd.OK
    return PhaseView(
        name=event.name,
        done=event.done,
        total=event.total,
        detail=event.detail,
        waiting=tuple((node, what) for node, what in event.waiting),
        seconds=event.seconds,
        end=end,
        noun="worker" if event.name == "start" else "node",
    )


def _adopted_text(state: RunState, node: str, stamp: node_events.Stamp) -> str:
    """Return what a new supervisor of a node means: after a reboot nothing of the last one's workers is there."""
    before = state.nodes[node].boot if node in state.nodes else ""
    if before and stamp.boot != before:
        return "the machine has booted anew; what ran on it is gone"
    return "a new supervisor has taken over; workers went on"


def _reported(event: node_events.Event) -> str:
    """Return what a step of a node's journal says to somebody who wants to see each of them; mostly nothing."""
    from clusterctl.wording import signal_name

    match event:
        case node_events.Prepared():
            return f"ready for attempt {event.attempt}"
        case node_events.Started():
            return f"r{event.rank} started, pid {event.pid}"
        case node_events.Exited():
            how = "ended, exit code unknown" if event.exit_code is None else f"ended with exit code {event.exit_code}"
            how = how if event.signal is None else f"ended by {signal_name(event.signal)}"
            return f"r{event.rank} {how}" + (", stopped" if event.stopped else "")
        case node_events.Stopping():
            return f"SIGTERM to all of attempt {event.attempt}, {event.grace:g} s grace"
        case node_events.Swept():
            left = f"{len(event.remaining)} processes could not be ended" if event.remaining else "nothing is left"
            return f"{left} of attempt {event.attempt}" + (f", {event.killed} killed" if event.killed else "")
        case _:
            return ""


def _decided_text(event: events.Decided) -> str:
    words = {
        requests.StopReason.PEER_FAILED.value: "a worker failed: stopping the others",
        requests.StopReason.CANCELLED.value: "stopping every worker",
        requests.StopReason.STALLED.value: "stalled: stopping every worker",
        requests.StopReason.TIME_LIMIT.value: "time limit reached: stopping every worker",
        requests.StopReason.NODE_LOST.value: "a node is lost: stopping the other workers",
        requests.StopReason.UNHEALTHY.value: "a node is unhealthy: stopping every worker",
        requests.StopReason.PORT_TAKEN.value: "a port of the run is taken: stopping every worker",
        requests.StopReason.START_FAILED.value: "the start failed: stopping what had started",
    }
    text = words.get(event.reason, f"{event.reason}: stopping every worker")
    return f"{text} ({event.message})" if event.message else text
