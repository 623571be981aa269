"""How a run begins: its first attempt, or where another controller left it; and how a start is undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from clusterctl.agent.protocol import Command, StopReason
from clusterctl.config.spec import Role
from clusterctl.errors import ClusterctlError, ExitCode, NodeError, NodesError, RefusedError, RunFailed
from clusterctl.run import attempts, ending, events, refusals
from clusterctl.run.controller.controlled import CALL_SECONDS
from clusterctl.run.launch import Begun, CancelledError, NotBegun, Progress
from clusterctl.run.links import Redialed, each, names, raise_first, sessions_of
from clusterctl.run.startfailure import start_failed
from clusterctl.run.state import RunPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clusterctl.config.spec import HostSpec
    from clusterctl.run.controller.connections import Connections
    from clusterctl.run.controller.controlled import ControlledRun, Post
    from clusterctl.session import Session

_NOT_BEGUN = ("new", "prepared", "finished")
"""What a node says of a run none of whose workers it was asked to start, or that is over."""

_UNHEARD = "{} could not be told that the start failed: what was prepared there ends by itself"


class Preflight(Protocol):
    """The checks before the first attempt; each raises UnhealthyError where the run must not start."""

    def __call__(self, sessions: Mapping[str, Session], post: Post) -> dict[str, str]:
        """Check the nodes; return the spares that failed a check, and why they are left out, in a word."""

    def after_sync(self, sessions: Mapping[str, Session]) -> None:
        """Check the code that is on the nodes now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """The nodes of a run that had a controller: who answers, why others do not, and how the run is there."""

    opened: Mapping[str, Session]
    errors: Mapping[str, ClusterctlError]
    told: Mapping[str, Mapping[str, Any]]


class Beginning:
    """Brings attempts up in a thread, and takes in how that went.

    Args:
        run: The run.
        connections: Go on with nodes that were reached again.
        preflight: Checks the nodes before anything starts, or `None`.
    """

    def __init__(self, run: ControlledRun, connections: Connections, preflight: Preflight | None) -> None:
        self._run, self._connections, self._preflight = run, connections, preflight
        self._taking_over = False
        self._failing = False

    @property
    def undecided(self) -> bool:
        """Nothing may be concluded yet: no attempt has begun, or the nodes of the one there is are being reached."""
        return self._taking_over or self._failing or (self._run.launching and self._run.state.attempt < 0)

    def first(self) -> None:
        """Begin the first attempt of a new run."""
        self._run.epoch = self._run.writer.next_epoch(0)
        self._run.launch.begin()
        self.launch(self._first_attempt)

    def taken_over(self) -> None:
        """Go on where another controller left the run."""
        hosts = self._hosts_to_reach()
        self._run.launching = self._taking_over = True
        self._run.aside(lambda: self._reach(hosts), lambda reached: self._reached(hosts, reached), _end_controller)

    def launch(self, work: Callable[[], Begun | NotBegun]) -> None:
        """Let a thread bring an attempt up."""

        def attempted() -> Begun | NotBegun:
            try:
                return work()
            except ClusterctlError as error:
                return NotBegun(error=error, prepared=())
            except OSError as error:
                place = f" ({error.filename})" if error.filename else ""
                text = f"the head cannot write what a start needs: {error.strerror}{place}"
                return NotBegun(error=RefusedError(text), prepared=())

        self._run.launching = True
        self._run.aside(attempted, self._launched, self._broken_start)

    def heed_a_cancel(self) -> None:
        """Do what a person wants who ends a run of which nothing else can be decided yet."""
        run = self._run
        if not run.cancelled.is_set() or self._failing:
            return
        if run.state.attempt < 0:
            if run.launch.give_up():
                self.fail(NotBegun(error=CancelledError("cancelled during the start"), prepared=()))
        elif run.state.reason is None:
            run.end_attempt(StopReason.CANCELLED, "")

    # --- the first attempt, in the thread

    def _first_attempt(self) -> Begun | NotBegun:
        run = self._run
        hosts = run.spec.workers
        sessions = self._connect(run.spec.hosts)
        unfit = self._refuse_harm(sessions)
        if self._preflight is not None:
            unfit |= self._preflight(sessions, run.post)
        run.hand_over(lambda: run.unfit.update(unfit))
        run.launch.sync(hosts, first=True)
        if self._preflight is not None:
            self._preflight.after_sync(sessions_of(run.links.sessions, [h.name for h in hosts]))
        return run.launch.attempt(0, hosts, run.follow)

    def _connect(self, hosts: Sequence[HostSpec]) -> dict[str, Session]:
        """Open all sessions at once; return those there are. A spare may be missing.

        Raises:
            NodeError, NodesError: Some cannot be had; every other one is closed again.
        """
        run = self._run
        step = Progress("connect", len(hosts), run.post)
        opened, errors = run.dial_all(hosts, step)
        step.end(names(opened), failed=bool(errors))
        for warning in dict.fromkeys(warning for session in opened.values() for warning in session.warnings):
            run.post(events.Note(text=warning, level="warn"))
        missing = {h.name: errors.pop(h.name) for h in hosts if h.role is Role.SPARE and h.name in errors}
        if errors:
            each(opened, lambda _, session: session.close())
            raise_first(errors)
        run.hand_over(lambda: self._connected(opened, missing))
        if run.cancelled.is_set():
            raise CancelledError("cancelled during the start")
        return opened

    def _connected(self, opened: Mapping[str, Session], missing: Mapping[str, ClusterctlError]) -> None:
        run = self._run
        for node, session in opened.items():
            run.join(node, session)
        for spare, error in missing.items():
            run.note(f"spare {spare} cannot be used yet: {error}")
            self._connections.missing(run.hosts[spare], error)

    def _refuse_harm(self, sessions: Mapping[str, Session]) -> dict[str, str]:
        """Refuse nodes on which workers would not last; return the spares that are left out for it, with a word.

        Raises:
            RefusedError: A node of the first attempt is one of them.
        """
        run = self._run
        hellos = {node: session.hello for node, session in sessions.items()}
        unfit: dict[str, str] = {}
        for spare in [h.name for h in run.spec.spares if h.name in hellos]:
            hello = hellos.pop(spare)
            if refusals.ends_at_logout(hello.get("logind")):
                unfit[spare] = "unfit"
                run.post(events.Note(text=f"spare {spare} ends processes at logout: it is left out", level="warn"))
        refusals.refuse(hellos)
        return unfit

    # --- a run that had a controller

    def _hosts_to_reach(self) -> tuple[HostSpec, ...]:
        run, state = self._run, self._run.state
        if state.attempt < 0:
            return run.spec.hosts
        waiting = [h.name for h in run.spec.spares] if run.spec.restart.max_restarts else []
        wanted = dict.fromkeys([*state.nodes, *state.next_nodes, *state.retired, *waiting])
        return tuple(run.hosts[n] for n in wanted if n in run.hosts)

    def _reach(self, hosts: Sequence[HostSpec]) -> _Reached:
        """Reach all nodes at once, and ask how the run is there. In a thread."""
        run = self._run
        step = Progress("connect", len(hosts), run.post)
        opened, errors = run.dial_all(hosts, step)
        step.end(names(opened), failed=bool(errors))
        asked = {"run": run.folder.run}
        told, _ = each(opened, lambda n, s: s.call(Command.STATUS, {**asked, "node": n}, timeout=CALL_SECONDS))
        return _Reached(opened=opened, errors=errors, told=told)

    def _reached(self, hosts: Sequence[HostSpec], reached: _Reached) -> None:
        """Go on with the nodes. No session is joined before: this controller had no epoch."""
        run = self._run
        run.epoch = run.writer.next_epoch(max((int(s.get("epoch") or 0) for s in reached.told.values()), default=0))
        self._believe(reached.told)
        self._taking_over = False
        if run.state.attempt < 0:
            for node, session in reached.opened.items():
                run.join(node, session)
            self.launch(lambda: self._undo_start(reached.opened))
            return
        run.launching = False
        self._connections.distrust(reached.opened)
        for host in hosts:
            if host.name in reached.opened:
                self._connections.back(Redialed(node=host.name, session=reached.opened[host.name]))
            else:
                self._connections.missing(host, reached.errors[host.name])

    def _believe(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Write down the attempt that nodes have begun, where the head lost the line that said so in a crash."""
        run = self._run
        number = max((s["attempt"] for s in told.values() if s["state"] not in _NOT_BEGUN), default=-1)
        if number <= run.state.attempt:
            return
        attempt = attempts.stored(run.folder, number)
        if attempt is not None:
            run.note(f"the head had lost the begin of attempt {number}, which its nodes know of")
            run.record(attempt)

    def _undo_start(self, opened: Mapping[str, Session]) -> NotBegun:
        """Undo on every node what a controller left that died before its first attempt was written down."""
        run = self._run
        # A node that never heard of the run keeps at least the epoch from which on it hears nothing of it.
        run.post(events.Traces(nodes=list(opened)))
        left, _ = each(opened, lambda n, s: ending.end_on_node(s, run.folder.run, n, run.grace))
        unheard = [host.name for host in run.spec.hosts if host.name not in left]
        if unheard:
            run.post(events.Note(text=_UNHEARD.format(names(unheard)), level="warn"))
        error = RunFailed("its controller ended during the start", exit_code=ExitCode.FAILED)
        return NotBegun(error=error, prepared=(), remaining=tuple(entry for found in left.values() for entry in found))

    # --- what came of it, in the loop

    def _broken_start(self, error: Exception) -> None:
        """End a start that a mistake of ours has ended; its traceback is in the log."""
        text = f"this is a bug of clusterctl: {type(error).__name__}: {error}"
        bug = ClusterctlError(text, hint=f"the traceback is in {self._run.folder.log}")
        self._launched(NotBegun(error=bug, prepared=()))

    def _launched(self, result: Begun | NotBegun) -> None:
        run = self._run
        run.launching = False
        if self._failing or not isinstance(result, NotBegun):
            return
        if run.state.attempt < 0 or not run.state.workers or run.state.phase is RunPhase.RESTARTING:
            self.fail(result)
        else:
            run.end_start(result.error)

    def fail(self, result: NotBegun) -> None:
        """End a run none of whose workers was started; undo what was prepared."""
        run = self._run
        self._failing = True
        cancelled = run.cancelled.is_set()
        if not cancelled:
            run.record(start_failed(result.error))
        code = ExitCode.CANCELLED if cancelled else result.error.exit_code
        phase = RunPhase.CANCELLED if cancelled else RunPhase.FAILED
        if not cancelled and run.state.attempt >= 0:
            lost = isinstance(result.error, (NodeError, NodesError))
            phase, code = (RunPhase.LOST, ExitCode.LOST) if lost else (RunPhase.FAILED, ExitCode.FAILED)
        concerned = tuple(dict.fromkeys([*run.all_nodes(), *result.prepared]))
        ended = events.Ended(state=phase.value, exit_code=int(code), remaining=list(result.remaining))
        run.aside(
            lambda: self._undo(concerned, result.prepared, ended),
            lambda left: self._undone(left, ended),
            lambda _: self._undone(list(result.prepared), ended),
        )

    def _undo(self, concerned: Sequence[str], prepared: Sequence[str], ended: events.Ended) -> list[str]:
        """Tell nodes that the run is over; return those that hold something of it and did not hear that.

        What a node holds whose session broke while it prepared must be given back: it is dialed once more.
        """
        run = self._run
        sessions = {n: s for n, s in run.links.sessions.items() if n in concerned}
        errors = run.tell_finished(sessions, ended.state, ended.exit_code)
        unheard = [n for n in prepared if n not in sessions or isinstance(errors.get(n), NodeError)]
        if not unheard:
            return []
        opened, _ = run.dial_all(run.hosts[n] for n in unheard)
        # Above the epoch of what was asked for: where that arrives only now, it is refused.
        run.hand_over(lambda: self._join_above(opened))
        errors = run.tell_finished(opened, ended.state, ended.exit_code)
        return [n for n in unheard if n not in opened or isinstance(errors.get(n), NodeError)]

    def _join_above(self, opened: Mapping[str, Session]) -> None:
        run = self._run
        run.epoch = run.writer.next_epoch(run.epoch)
        for node, session in opened.items():
            run.join(node, session)

    def _undone(self, left: list[str], ended: events.Ended) -> None:
        run = self._run
        if left:
            run.note(_UNHEARD.format(names(left)))
        run.record(ended)
        run.control.wake()


def _end_controller(error: Exception) -> None:
    """Leave a run alone that could not be taken over: it goes on, and the next controller may have more luck."""
    raise error
