"""The loop of one run: take what arrived, fold it, decide, act. One thread owns the state.

It is a process of its own, in a session of its own, without a terminal. If it dies, the run goes on; a new one rebuilds
the state from the journals and goes on from the cursors.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from clusterctl.agent import protocol as wire
from clusterctl.agent.protocol import Command, StopReason
from clusterctl.config.spec import Role
from clusterctl.errors import (
    ClusterctlError,
    ExitCode,
    NodeError,
    NodesError,
    NotFoundError,
    RefusedError,
    RunFailed,
    UnhealthyError,
)
from clusterctl.run import ending, events, policy, refusals, restarting, tails
from clusterctl.run.control import ControlRequest, ControlServer
from clusterctl.run.gathering import Gatherer, ask
from clusterctl.run.healthwatch import HealthWatch
from clusterctl.run.intake import Intake
from clusterctl.run.launch import Begun, CancelledError, Launch, NotBegun, Progress
from clusterctl.run.links import Links, Redialed, each, names, quietly
from clusterctl.run.observer import StallObserver, last_bytes
from clusterctl.run.reader import load_state
from clusterctl.run.stall import Stall, StallPhase
from clusterctl.run.state import RunPhase, apply_head, apply_node
from clusterctl.run.store import RunDir, Writer, now
from clusterctl.session import BeatReceived, EventReceived, OutputReceived, SessionLost, Superseded

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.run.state import NodeState
    from clusterctl.session import Session

_TICK = 1.0
_SHOWN_SILENT_AFTER = 6.5
_SILENT = "no answer"
_ACKNOWLEDGE_EVERY = 2.0
_ACKNOWLEDGE_BYTES = 4 * 1024 * 1024
_DRAIN_WITHOUT_PROGRESS = 15.0
_CALL_SECONDS = 20.0

Post = Callable[[events.ControllerEvent], None]
Dial = Callable[["HostSpec", Callable[[str], None]], "Session"]


class Preflight(Protocol):
    """The checks before the first attempt; each raises UnhealthyError where the run must not start."""

    def __call__(self, sessions: dict[str, Session], post: Post) -> None:
        """Check the nodes."""

    def after_sync(self, sessions: dict[str, Session]) -> None:
        """Check the code that is on the nodes now."""

    @property
    def unfit(self) -> dict[str, str]:
        """Return the spares that failed a check, and why they are left out, in a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    """A controller event made by another thread."""

    event: events.ControllerEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A launch thread is through."""

    result: Begun | NotBegun


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """A launch thread met a bug of ours: the loop must not wait for it for ever."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How large the files of the nodes are, now that nobody writes to them any more."""

    targets: dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newest:
    """The newest checkpoint that the nodes of an attempt see, now that it is over."""

    attempt: int
    path: str | None


@dataclass(slots=True)
class _Ending:
    """The run is decided; what is still on its way is taken in first."""

    finish: policy.Finish
    targets: dict[tuple[str, str], int] | None = None
    moved: float = field(default_factory=time.monotonic)


class Controller:
    """Runs one run to its end, or goes on with one that lost its controller.

    Args:
        run: The run directory; this becomes its one writer.
        spec: What to run, with its secrets.
        dial: Opens a session to a host, with a callback for progress.
        preflight: Checks the nodes before anything starts, or `None`; raises UnhealthyError.
    """

    def __init__(
        self,
        run: RunDir,
        spec: ClusterSpec,
        dial: Callable[[queue.SimpleQueue[Any]], Dial],
        preflight: Preflight | None = None,
    ) -> None:
        self._run, self._spec, self._preflight = run, spec, preflight
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._dial = dial(self._inbox)
        self._writer = Writer(run)
        self._links = Links(lambda host: self._dial(host, lambda _: None), self._inbox)
        self._cancelled = threading.Event()
        self._boots: dict[str, str] = {}
        self._launch = Launch(run, spec, self._links.sessions, self._post, self._cancelled)
        self._hosts = {h.name: h for h in spec.hosts}
        self._limits = limits_of(spec)
        self._state = load_state(run)
        self._epoch = 0
        self._launching = False
        self._ending: _Ending | None = None
        self._kill = False
        self._intake = Intake(self._writer, self._stored, self._note)
        self._acknowledged = 0.0
        self._unacknowledged = 0
        self._sizes: dict[tuple[str, str], int] = {}
        self._unfit: dict[str, str] = {}
        self._newest: dict[int, str | None] = {}
        self._asked_newest = -1
        self._observer: StallObserver | None = None
        self._health = HealthWatch(run, spec)
        self._gatherer = Gatherer(run)
        self._stall = Stall(known=False)
        self._control = ControlServer(run.control_address(), self._inbox.put)

    # --- beginnings

    def start(self, warnings: Sequence[str] = ()) -> int:
        """Start the run and see it to its end; return its exit code. `warnings` are said first."""
        self._record(events.Created(run=self._run.run, name=self._spec.name, path=self._spec.path))
        for text in warnings:
            self._note(text, "warn")
        self._epoch = self._writer.next_epoch(0)
        self._launch.begin()
        self._in_background(self._first_attempt)
        return self._loop()

    def adopt(self) -> int:
        """Go on with a run whose controller is gone; return its exit code."""
        if self._spec.secrets:
            # Their values were never written down here. The nodes of the last attempt kept them; a spare has none.
            self._launch.forget_secrets()
            self._unfit = dict.fromkeys((h.name for h in self._spec.spares), "no secrets")
        if self._state.attempt >= 0:
            self._watch_attempt()
            self._replay_samples()
        self._in_background(self._take_over)
        return self._loop()

    def _in_background(self, work: Callable[[], Begun | NotBegun]) -> None:
        self._launching = True

        def run() -> None:
            try:
                result: Begun | NotBegun = work()
            except ClusterctlError as error:
                result = NotBegun(error=error, prepared=())
            except OSError as error:
                place = f" ({error.filename})" if error.filename else ""
                refused = RefusedError(f"the head cannot write what a start needs: {error.strerror}{place}")
                result = NotBegun(error=refused, prepared=())
            except Exception as error:
                self._inbox.put(_Broken(error=error))
                return
            self._inbox.put(_Started(result=result))

        threading.Thread(target=run, name="launch", daemon=True).start()

    def _first_attempt(self) -> Begun | NotBegun:
        hosts = self._spec.workers
        self._connect(self._spec.hosts)
        self._refuse_harm()
        if self._preflight is not None:
            self._preflight(self._links.sessions, self._post)
            self._unfit |= self._preflight.unfit
        self._launch.sync(hosts, first=True)
        if self._preflight is not None:
            self._preflight.after_sync({h.name: self._links.sessions[h.name] for h in hosts})
        return self._launch.attempt(0, hosts, self._follow)

    def _connect(self, hosts: tuple[HostSpec, ...]) -> None:
        """Open all sessions at once.

        Raises:
            NodeError, NodesError: Some cannot be had; every other one is closed again.
        """
        step = Progress("connect", len(hosts), self._post)
        opened, errors = dial_all(hosts, self._dial, step, self._spec.ssh.parallel)
        self._join(opened)
        step.end(names(opened), failed=bool(errors))
        for session in opened.values():
            for warning in session.warnings:
                self._post(events.Note(text=warning, level="warn"))
        for spare in [h for h in hosts if h.role is Role.SPARE and h.name in errors]:
            self._post(events.Note(text=f"spare {spare.name} cannot be used yet: {errors[spare.name]}", level="warn"))
            self._inbox.put(SessionLost(node=spare.name, error=errors.pop(spare.name)))
        if errors:
            self._links.close()
            found = list(errors.values())
            raise found[0] if len(found) == 1 else NodesError(found)
        if self._cancelled.is_set():
            raise CancelledError("cancelled during the start")

    def _join(self, opened: dict[str, Session]) -> None:
        """Take sessions as the run's own: what they ask for carries this controller's epoch."""
        for node, session in opened.items():
            session.epoch = self._epoch
            self._links.add(node, session)

    def _undo_start(self) -> NotBegun:
        """Undo on every node what a controller left that died before its first attempt was written down."""
        opened, _ = dial_all(self._spec.hosts, self._dial, Progress("connect", 1, lambda _: None), 64)
        run = self._run.run
        self._epoch = self._writer.next_epoch(ending.highest_epoch(run, opened))
        self._join(opened)
        each(opened, lambda n, s: ending.end_on_node(s, run, n, 0.0 if self._kill else self._limits.grace))
        error = RunFailed("its controller ended during the start", exit_code=ExitCode.FAILED)
        return NotBegun(error=error, prepared=())

    def _refuse_harm(self) -> None:
        """Refuse nodes on which workers would not last; a spare like that is left out.

        Raises:
            RefusedError: A node of the first attempt is one of them.
        """
        hellos = {node: session.hello for node, session in self._links.sessions.items()}
        for spare in [h.name for h in self._spec.spares if h.name in hellos]:
            hello = hellos.pop(spare)
            if refusals.ends_at_logout(hello.get("logind")):
                self._unfit[spare] = "unfit"
                self._post(events.Note(text=f"spare {spare} ends processes at logout: it is left out", level="warn"))
        refusals.refuse(hellos)

    def _take_over(self) -> Begun | NotBegun:
        if self._state.attempt < 0:
            return self._undo_start()
        state = self._state
        waiting = [h.name for h in self._spec.spares] if self._spec.restart.max_restarts else []
        wanted = dict.fromkeys([*state.nodes, *state.next_nodes, *state.retired, *waiting])
        hosts = tuple(self._hosts[n] for n in wanted if n in self._hosts)
        step = Progress("connect", len(hosts), self._post)
        opened, errors = dial_all(hosts, self._dial, step, self._spec.ssh.parallel)
        step.end(names(opened), failed=bool(errors))
        asked = {"run": self._run.run}
        seen, _ = each(opened, lambda n, s: s.call(Command.STATUS, {**asked, "node": n}, timeout=_CALL_SECONDS))
        self._epoch = self._writer.next_epoch(max((int(s.get("epoch") or 0) for s in seen.values()), default=0))
        for host in hosts:
            if host.name in opened:
                self._inbox.put(Redialed(node=host.name, session=opened[host.name]))
            else:
                self._inbox.put(SessionLost(node=host.name, error=errors[host.name]))
        raise _AdoptedError("adopted")

    def _follow(self, node: str) -> None:
        """Ask a node for everything after the cursors. Called from launch threads and from the loop."""
        known = self._known(node)
        request = wire.Follow(
            run=self._run.run, node=node, seq=known.seq if known else 0, cursors=self._writer.cursors(node)
        )
        session = self._links.sessions.get(node)
        if session is not None:
            session.call(Command.FOLLOW, wire.to_wire(request), timeout=_CALL_SECONDS)

    def _known(self, node: str) -> NodeState | None:
        """Return what is known of a node of this attempt, or of an earlier one."""
        return self._state.nodes.get(node) or self._state.retired.get(node)

    # --- the loop

    def _loop(self) -> int:
        try:
            while not self._state.over:
                self._take_in()
                if self._superseded:
                    return int(ExitCode.UNATTENDED)
                self._look_at_links()
                self._act()
                self._acknowledge()
            while not self._writer.flush():
                time.sleep(_TICK)
            return self._state.exit_code or 0
        finally:
            self._links.close()
            self._writer.close()
            self._control.close()

    def _take_in(self) -> None:
        """Handle what has arrived; wait for the first item, not for the others."""
        wait = _TICK
        if self._state.phase is RunPhase.RESTARTING:
            wait = min(_TICK, max(0.01, (self._state.restart_at or 0.0) - now()))
        try:
            item = self._inbox.get(timeout=wait)
        except queue.Empty:
            return
        handled = 0
        while True:
            self._handle(item)
            handled += 1
            if handled >= 512:
                break
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
        self._control.wake()

    def _handle(self, item: Any) -> None:
        match item:
            case EventReceived():
                self._event(item)
            case OutputReceived():
                self._intake.take(item)
            case BeatReceived():
                self._beat(item)
            case SessionLost():
                self._session_lost(item)
            case Superseded():
                self._superseded_by(item.node)
            case Redialed():
                self._redialed(item)
            case ControlRequest():
                self._control_request(item)
            case _Post():
                self._record(item.event)
            case _Started():
                self._launched(item.result)
            case _Broken():
                raise item.error
            case _Newest():
                self._newest[item.attempt] = item.path
            case _Sizes():
                if self._ending is not None:
                    self._ending.targets = item.targets
            case _:
                raise AssertionError(f"nobody handles {type(item).__name__}")

    def _post(self, event: events.ControllerEvent) -> None:
        self._inbox.put(_Post(event=event))

    def _record(self, event: events.ControllerEvent) -> None:
        moment = now()
        self._writer.append(event, moment)
        self._state = apply_head(self._state, moment, event)
        if isinstance(event, events.Attempt):
            self._watch_attempt()

    def _note(self, text: str, level: str) -> None:
        self._record(events.Note(text=text, level=level))

    def _watch_attempt(self) -> None:
        ranks = self._state.workers
        self._observer = StallObserver(self._state.attempt, ranks, self._spec.stall, time.monotonic())

    def _replay_samples(self) -> None:
        """Tell the stall rule what it knew before: how long steps take, and when the last one was."""
        if self._observer is not None:
            known = {n: last_bytes(self._run.node(n) / wire.SAMPLES_FILE) for n in self._state.nodes}
            self._observer.replay(known, time.monotonic())

    # --- what arrives from nodes

    def _event(self, item: EventReceived) -> None:
        known = self._known(item.node)
        if known is None or item.stamp.seq <= known.seq:
            return
        self._writer.journal(item.node, item.record)
        self._state = apply_node(self._state, item.node, item.stamp, item.event)

    def _stored(self, item: OutputReceived, size: int) -> None:
        """Let a node send as much again as is safe here now."""
        if item.file == wire.SAMPLES_FILE and self._observer is not None:
            self._observer.feed(item.node, item.payload, time.monotonic())
        self._sizes[item.node, item.file] = size
        self._unacknowledged += len(item.payload)
        session = self._links.sessions.get(item.node)
        if session is not None:
            session.credit(len(item.payload))
        if self._ending is not None:
            self._ending.moved = time.monotonic()

    def _beat(self, item: BeatReceived) -> None:
        node = self._state.nodes.get(item.node)
        if node is None:
            return
        self._boots[item.node] = item.boot
        offset = now() - time.monotonic() - item.mono_offset_s
        if (
            node.clock is None
            or item.error_s < node.clock[1] / 2
            or abs(offset - node.clock[0]) > 5 * node.clock[1] + 0.005
        ):
            self._record(events.Clock(node=item.node, offset=offset, error=item.error_s, boot=item.boot))

    def _session_lost(self, item: SessionLost) -> None:
        host = self._hosts.get(item.node)
        if host is None or (self._ending is not None and self._ending.targets is None and not self._state.nodes):
            return
        node = self._state.nodes.get(item.node)
        silent = node is not None and node.link == "unreachable" and node.link_why == _SILENT
        if node is not None and (silent or node.link not in ("unreachable", "lost")):
            self._record(events.Link(node=item.node, link="unreachable", why=str(item.error)))
        self._links.broken(host)

    _superseded = False

    def _superseded_by(self, node: str) -> None:
        """Another controller commands the run from elsewhere: leave it alone from now on, whatever was decided."""
        if not self._superseded:
            self._superseded = True
            text = f"another controller has taken over on {node}: this one has ended and the run goes on"
            self._record(events.Note(text=text, level="warn"))

    def _redialed(self, item: Redialed) -> None:
        item.session.epoch = self._epoch
        self._links.add(item.node, item.session)
        node = self._known(item.node)
        if node is None:
            return
        boot = str(item.session.hello.get("boot_id") or "")
        if self._boots.setdefault(item.node, boot) != boot and not node.swept and item.node in self._state.nodes:
            self._record(events.Link(node=item.node, link="lost", why="it was rebooted", rebooted=True))
        elif node.link != "lost" and item.node in self._state.nodes:
            self._record(events.Link(node=item.node, link="connected"))
        threading.Thread(target=self._resume, args=(item.node, item.session), daemon=True).start()

    def _resume(self, node: str, session: Session) -> None:
        """Go on with a node from the cursors, and repeat what it may have missed."""
        with contextlib.suppress(ClusterctlError):
            self._compare_replicas(node, session)
            self._follow(node)
            state = self._state
            known = self._known(node)
            if known is None or known.swept:
                return
            if node in state.retired:
                self._stop_node(node, session, StopReason.NODE_LOST.value)
            elif state.reason is not None:
                self._stop_node(node, session, state.reason)

    def _compare_replicas(self, node: str, session: Session) -> None:
        from clusterctl.run.replicas import differing

        for file in differing(self._run, node, session):
            self._writer.restart_replica(node, file)

    # --- links

    def _look_at_links(self) -> None:
        silent = self._links.silent(_SHOWN_SILENT_AFTER)
        for node in self._state.nodes.values():
            seconds = silent.get(node.node)
            if (node.swept and node.finished) or node.link == "lost":
                continue
            if seconds is not None and node.link != "unreachable":
                self._record(events.Link(node=node.node, link="unreachable", why=_SILENT, seconds=seconds))
                self._control.wake()
            elif seconds is None and node.link != "connected" and node.node in self._links.sessions:
                self._record(events.Link(node=node.node, link="connected"))
                self._control.wake()

    def _acknowledge(self) -> None:
        """Tell nodes now and then what is safe here, so that a full disk there costs nothing."""
        self._intake.retry()
        self._writer.flush()
        pause = _ACKNOWLEDGE_EVERY if self._unacknowledged < _ACKNOWLEDGE_BYTES else _ACKNOWLEDGE_EVERY / 10
        if time.monotonic() - self._acknowledged >= pause:
            self._unacknowledged = 0
            self._acknowledged = time.monotonic()
            self._tell_what_is_safe()

    def _tell_what_is_safe(self) -> None:
        by_node: dict[str, dict[str, int]] = {}
        for (node, file), size in self._sizes.items():
            by_node.setdefault(node, {})[file] = size
        self._sizes.clear()
        for node, offsets in by_node.items():
            session = self._links.sessions.get(node)
            if session is not None:
                session.post(Command.REPLICATED, {"run": self._run.run, "node": node, "offsets": offsets})

    # --- acting

    def _act(self) -> None:
        if self._ending is not None:
            self._continue_ending()
            return
        if self._launching and self._state.attempt < 0:
            if self._cancelled.is_set() and self._launch.give_up():
                self._launching = False
                self._fail_start(NotBegun(error=CancelledError("cancelled during the start"), prepared=()))
            return
        self._judge_stall()
        self._look_at_health()
        if self._must_look_for_checkpoints():
            return
        action = policy.decide(self._state, self._limits, self._sight(), now())
        match action:
            case None:
                self._restart_when_due()
            case policy.EndAttempt():
                self._end_attempt(action.reason, action.message)
            case policy.GiveUpNode():
                self._record(events.Link(node=action.node, link="lost", why=action.why))
                # Its fence counts from here: nothing that we send may reach it any more but a new connection.
                self._links.broken(self._hosts[action.node])
            case policy.Restart():
                self._restart(action)
            case policy.Finish():
                self._finish(action)

    def _look_at_health(self) -> None:
        """Record what changed on nodes and GPUs."""
        changes = self._health.look(self._state, time.monotonic())
        for event in changes:
            self._record(event)
        if changes:
            self._control.wake()

    def _judge_stall(self) -> None:
        """Record what the stall rule says when it says something new; keep evidence before anybody acts."""
        if self._observer is None or self._state.phase not in (RunPhase.RUNNING, RunPhase.STALLED):
            return
        self._stall = stall = self._observer.judge(time.monotonic())
        for text in self._observer.news(stall, time.monotonic()):
            self._record(events.Note(text=text, level="warn"))
        shown = "none" if self._state.stall is None else self._state.stall.phase
        if not stall.known or stall.phase.value == shown:
            return
        evidence = None if stall.phase.value == "none" else self._gatherer.begin(self._sessions_of_run())
        self._record(
            events.StallSeen(
                attempt=self._state.attempt,
                phase=stall.phase.value,
                since_s=stall.since_s,
                limit_s=stall.limit_s,
                reason=stall.reason,
                evidence=evidence,
            )
        )
        self._control.wake()

    def _sessions_of_run(self) -> dict[str, Session]:
        return {n: s for n, s in self._links.sessions.items() if n in self._state.nodes}

    def _sight(self) -> policy.Sight:
        return policy.Sight(
            silent=self._links.silent(_SHOWN_SILENT_AFTER),
            cut=self._links.cut(),
            idle=0.0 if self._observer is None else self._observer.idle(self._state.unfinished_nodes()),
            cancelled=self._cancelled.is_set(),
            gathering=self._gatherer.busy or self._stall.phase is not StallPhase.CONFIRMED,
            alike=self._alike(),
            spares=len(self._free_spares()),
            unhealthy=self._health.unhealthy(self._state),
        )

    def _end_attempt(self, reason: StopReason, message: str) -> None:
        self._record(events.Decided(attempt=self._state.attempt, reason=reason.value, message=message))
        self._stop_all(reason.value)
        self._control.wake()

    def _stop_all(self, reason: str) -> None:
        for node in self._state.nodes.values():
            session = self._links.sessions.get(node.node)
            if session is not None and not node.swept:
                self._stop_soon(node.node, session, reason)

    def _stop_soon(self, node: str, session: Session, reason: str) -> None:
        threading.Thread(target=quietly, args=(lambda: self._stop_node(node, session, reason),), daemon=True).start()

    def _stop_node(self, node: str, session: Session, reason: str) -> None:
        grace = 0.0 if self._kill else self._limits.grace
        request = wire.Stop(run=self._run.run, node=node, grace=grace, reason=reason)
        session.call(Command.STOP, wire.to_wire(request), timeout=_CALL_SECONDS)

    # --- launches and restarts

    def _launched(self, result: Begun | NotBegun) -> None:
        self._launching = False
        match result:
            case Begun():
                return
            case NotBegun(error=_AdoptedError()):
                return
            case NotBegun() if self._state.attempt < 0 or not self._state.workers or self._before_its_attempt():
                self._fail_start(result)
            case NotBegun():
                if not self._cancelled.is_set():
                    self._record(events.StartFailed(error=error_json(result.error)))
                reason = StopReason.CANCELLED if self._cancelled.is_set() else StopReason.START_FAILED
                if self._state.reason is None:
                    self._end_attempt(reason, str(result.error))

    def _before_its_attempt(self) -> bool:
        return self._state.phase is RunPhase.RESTARTING

    def _fail_start(self, result: NotBegun) -> None:
        """End a run none of whose workers was started; undo what was prepared."""
        cancelled = self._cancelled.is_set()
        if not cancelled:
            self._record(events.StartFailed(error=error_json(result.error)))
        code = ExitCode.CANCELLED if cancelled else result.error.exit_code
        phase = RunPhase.CANCELLED if cancelled else RunPhase.FAILED
        if not cancelled and self._state.attempt >= 0:
            lost = isinstance(result.error, (NodeError, NodesError))
            phase, code = (RunPhase.LOST, ExitCode.LOST) if lost else (RunPhase.FAILED, ExitCode.FAILED)
        untold = self._finish_nodes([*self._all_nodes(), *result.prepared], phase.value, int(code))
        self._undo_unheard([n for n in untold if n in result.prepared], phase.value, int(code))
        self._record(events.Ended(state=phase.value, exit_code=int(code)))
        self._control.wake()

    def _undo_unheard(self, nodes: list[str], state: str, code: int) -> None:
        """Dial nodes once more whose session broke while they prepared: what they hold must be given back."""
        if not nodes:
            return
        hosts = tuple(self._hosts[n] for n in nodes)
        opened, _ = dial_all(hosts, self._dial, Progress("connect", 1, lambda _: None), self._spec.ssh.parallel)
        # Above the epoch of what was asked for: where that arrives only now, it is refused.
        self._epoch = self._writer.next_epoch(self._epoch)
        self._join(opened)
        left = {*self._finish_nodes(list(opened), state, code), *(n for n in nodes if n not in opened)}
        if left:
            text = f"{names(left)} could not be told that the start failed: what was prepared there ends by itself"
            self._record(events.Note(text=text, level="warn"))

    def _restart(self, action: policy.Restart) -> None:
        bad = policy.left_out(self._state, self._sight())
        without = {name: bad[name] for name in action.without}
        nodes, said = restarting.next_nodes(self._state, without, self._free_spares())
        for text in said:
            self._record(events.Note(text=text, level="warn"))
        self._record(
            events.Restarting(
                attempt=self._state.attempt + 1,
                why=action.why,
                at=action.at,
                nodes=nodes,
                ended=self._ending_words(),
                resume_from=self._state.resume_from,
            )
        )
        self._control.wake()
        self._restart_when_due()

    def _restart_when_due(self) -> None:
        """Begin the attempt that the journal announces, once it is time and its nodes are there."""
        state = self._state
        if state.phase is not RunPhase.RESTARTING or self._launching:
            return
        if self._cancelled.is_set():
            self._finish(policy.Finish(phase=RunPhase.CANCELLED, exit_code=int(ExitCode.CANCELLED)))
            return
        if now() < (state.restart_at or 0.0) or not self._nodes_are_there(state.next_nodes):
            return
        hosts = tuple(self._hosts[name] for name in state.next_nodes)
        number, why = state.attempt + 1, state.restart_why

        def begin() -> Begun | NotBegun:
            self._launch.sync(hosts, first=False)
            return self._launch.attempt(number, hosts, self._follow, why)

        self._in_background(begin)

    def _nodes_are_there(self, nodes: tuple[str, ...]) -> bool:
        """Return whether every node has a connection; one that stays away for too long ends the run."""
        missing = [n for n in nodes if n not in self._links.sessions]
        away = self._links.silent(0.0)
        gone = [n for n in missing if away.get(n, 0.0) >= self._limits.node_lost_after]
        if gone:
            error = NodeError(gone[0], f"{names(gone)}: no connection for the next attempt")
            self._fail_start(NotBegun(error=error, prepared=()))
        return not missing

    def _free_spares(self) -> list[HostSpec]:
        usable = [n for n in self._links.sessions if n not in self._unfit]
        return restarting.free_spares(self._spec, self._state, usable)

    def _ending_words(self) -> str:
        return restarting.ending_of(self._state, checkpoints=self._pattern() is not None, now=now())

    def _pattern(self) -> str | None:
        job = self._spec.job
        return None if job is None else job.checkpoint.pattern

    def _alike(self) -> int:
        """Return how many attempts before this one ended like it, without a newer checkpoint between or after."""
        state = self._state
        if self._newest.get(state.attempt, state.resume_from) != state.resume_from:
            return 0
        return restarting.alike(state, self._ending_words())

    def _must_look_for_checkpoints(self) -> bool:
        """Look, before attempts that ended alike are taken for hopeless, whether the last one got further after all."""
        state = self._state
        over = bool(state.nodes) and all(n.swept for n in state.nodes.values())
        if self._pattern() is None or not over or state.attempt in self._newest or self._alike() == 0:
            return False
        if self._asked_newest != state.attempt:
            self._asked_newest = state.attempt
            hosts = tuple(self._hosts[n] for n in state.nodes)

            def look() -> None:
                path: str | None = None
                with contextlib.suppress(ClusterctlError):
                    path = self._launch.newest_checkpoint(hosts)
                self._inbox.put(_Newest(attempt=state.attempt, path=path))

            threading.Thread(target=look, daemon=True).start()
        return True

    # --- endings

    def _finish(self, finish: policy.Finish) -> None:
        if finish.why_no_restart:
            self._record(events.Note(text=f"no restart: {finish.why_no_restart}", level="warn"))
        self._ending = _Ending(finish=finish)
        sessions = {n: s for n, s in self._links.sessions.items() if n in self._all_nodes()}
        files = self._files_of_run()

        def measure() -> None:
            found, _ = each(sessions, lambda n, s: self._sizes_on(n, s, files.get(n, [])))
            self._inbox.put(_Sizes(targets={(n, f): size for n, sizes in found.items() for f, size in sizes.items()}))

        threading.Thread(target=measure, daemon=True).start()

    def _sizes_on(self, node: str, session: Session, files: list[str]) -> dict[str, int]:
        sizes = {}
        for file in files:
            asked = {"run": self._run.run, "node": node, "file": file, "offset": 0, "length": 0}
            with contextlib.suppress(NotFoundError):
                sizes[file] = int(session.call(Command.READ, asked, timeout=_CALL_SECONDS)["size"])
        return sizes

    def _files_of_run(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for attempt, node, ranks in self._state.placed:
            for rank in ranks:
                found.setdefault(node, []).extend([wire.output_file(attempt, rank), wire.index_file(attempt, rank)])
        return found

    def _all_nodes(self) -> list[str]:
        return [*self._state.nodes, *self._state.retired]

    def _continue_ending(self) -> None:
        ending = self._ending
        if ending is None or ending.targets is None:
            return
        waited = time.monotonic() - ending.moved
        missing = [
            key
            for key, size in ending.targets.items()
            if self._replica_size(*key) < size and key[0] in self._links.sessions
        ]
        if missing and (waited < _DRAIN_WITHOUT_PROGRESS or (self._intake.paused and not self._kill)):
            return
        if missing:
            files = ", ".join(f"{n}: {f}" for n, f in missing[:3])
            self._record(
                events.Note(text=f"output was not replicated whole ({files}); the nodes still have it", level="warn")
            )
        finish = ending.finish
        self._tell_what_is_safe()
        self._finish_nodes(self._all_nodes(), finish.phase.value, finish.exit_code)
        self._record(
            events.Ended(state=finish.phase.value, exit_code=finish.exit_code, remaining=list(finish.remaining))
        )
        self._control.wake()

    def _replica_size(self, node: str, file: str) -> int:
        path = self._run.node(node) / file
        return path.stat().st_size if path.exists() else 0

    def _finish_nodes(self, nodes: list[str], state: str, code: int) -> list[str]:
        """Tell nodes that the run has ended; return those that did not hear it."""
        sessions = {n: s for n in nodes if (s := self._links.sessions.get(n)) is not None}
        asked = {"run": self._run.run, "state": state, "exit_code": code}
        _, errors = each(sessions, lambda n, s: s.call(Command.FINISH, {**asked, "node": n}, timeout=_CALL_SECONDS))
        return [n for n in dict.fromkeys(nodes) if n not in sessions or isinstance(errors.get(n), NodeError)]

    # --- what people ask

    def _control_request(self, item: ControlRequest) -> None:
        match item.command:
            case "down" if item.arguments.get("stalled"):
                item.reply(self._end_if_stalled(kill=bool(item.arguments.get("kill"))))
            case "down":
                self.cancel(kill=bool(item.arguments.get("kill")))
                item.reply({"ok": True, "grace": self._limits.grace})
            case "evidence":
                self._answer_evidence(item)
            case tails.COMMAND:
                self._answer_tails(item)
            case "ping":
                item.reply({"ok": True, "run": self._run.run})
            case _:
                item.reply({"error": f"unknown command {item.command!r}"})

    def _answer_tails(self, item: ControlRequest) -> None:
        """Read the ends of output files on their nodes, past all that still waits for its replication."""
        places, length = item.arguments.get("places", []), int(item.arguments.get("length", 0))
        sessions = dict(self._links.sessions)
        if self._launching and any(place[0] not in sessions for place in places):
            item.reply({"soon": True})
            return

        def answer() -> None:
            item.reply(tails.read_on_nodes(self._run.run, sessions, places, length))

        threading.Thread(target=answer, daemon=True).start()

    def _answer_evidence(self, item: ControlRequest) -> None:
        sessions, ranks = self._sessions_of_run(), item.arguments.get("ranks")
        unseen = {n: "not connected" for n in self._state.nodes if n not in sessions}

        def answer() -> None:
            found = ask(self._run.run, "stacks", sessions, ranks)
            item.reply({"ranks": found.ranks, "errors": {**found.errors, **unseen}})

        threading.Thread(target=answer, daemon=True).start()

    def _end_if_stalled(self, *, kill: bool) -> dict[str, Any]:
        """End the run if it is stalled at this very moment; no attempt follows, as a person wants it gone."""
        self._judge_stall()
        stalled = self._state.phase is RunPhase.STALLED and self._stall.phase is StallPhase.CONFIRMED
        if stalled:
            self._kill = self._kill or kill
            self._limits = self._limits.stopping_stalled()
        return {"ok": True, "stalled": stalled, "phase": self._stall.phase.value if self._stall.known else None}

    def cancel(self, *, kill: bool) -> None:
        """End the run: gracefully, or at once."""
        self._cancelled.set()
        self._links.hurry()
        if kill and not self._kill:
            self._kill = True
            if self._state.reason is not None:
                self._stop_all(self._state.reason)


class _AdoptedError(ClusterctlError):
    """Nothing failed: the run was there already."""


def dial_all(
    hosts: tuple[HostSpec, ...], dial: Dial, step: Progress, parallel: int
) -> tuple[dict[str, Session], dict[str, Any]]:
    """Open a session to every host, all at once; return them and the errors of those that cannot be had."""
    by_name = {h.name: h for h in hosts}

    def one(node: str, _: Any) -> Session:
        step.at(node, "connecting")
        session = dial(by_name[node], lambda what: step.at(node, what))
        step.through(node)
        return session

    placeholder: dict[str, Any] = dict.fromkeys(by_name)
    return each(placeholder, one, parallel)


def limits_of(spec: ClusterSpec) -> policy.Limits:
    """Return what the policy needs of a spec."""
    job = spec.job
    assert job is not None, "a run has a job"
    return policy.Limits(
        grace=job.grace,
        finish_grace=job.finish_grace,
        max_duration=job.max_duration,
        node_lost_after=spec.network.node_lost_after,
        stop_after=spec.stop_after,
        stall_action=spec.stall.action,
        restart=spec.restart,
    )


def error_json(error: ClusterctlError) -> dict[str, Any]:
    """Return an error as the controller's journal keeps it."""
    found: dict[str, Any] = {
        "class": type(error).__name__,
        "message": str(error),
        "hint": error.hint,
        "exit_code": int(error.exit_code),
        "node": getattr(error, "node", None),
    }
    if isinstance(error, NodesError):
        found["nodes"] = [
            {"node": e.node, "message": str(e), "hint": e.hint, "class": type(e).__name__} for e in error.errors
        ]
    if isinstance(error, UnhealthyError):
        found["findings"] = [f.to_json() for f in error.findings]
    return found
