"""How a run begins: its first attempt, and how a start is undone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from clusterctl import rlimits
from clusterctl.agent.protocol.requests import StopReason
from clusterctl.config.spec import Role
from clusterctl.errors import ClusterctlError, ExitCode, NodeError, NodesError, RefusedError
from clusterctl.plan import layout
from clusterctl.plan.layout import demote_to_spares
from clusterctl.run.nodes.fan_out import each, names, raise_first, sessions_of
from clusterctl.run.nodes.launch import Begun, NotBegun
from clusterctl.run.nodes.meeting import answer_of
from clusterctl.run.nodes.progress import CancelledError, Progress
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.rules import controller_events, logind, outcome
from clusterctl.run.rules.controller_events import build_start_failed
from clusterctl.run.rules.state import RunPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.run.controller.connections import Connections
    from clusterctl.run.controller.run import ControlledRun, Post
    from clusterctl.session.session import Session


_AFTER_KILL = 10.0
"""Seconds after which nothing is waited for that nodes have not answered, where a person wants the end at once."""
UNHEARD = "{} could not be told that the start failed: what was prepared there ends by itself"


class Preflight(Protocol):
    """The checks before the first attempt; each raises UnhealthyError where the run must not start."""

    def __call__(self, sessions: Mapping[str, Session], post: Post) -> dict[str, str]:
        """Check the nodes; return those that failed a check and are left out, and why, in a word."""

    def settle(self, spec: ClusterSpec) -> None:
        """Go on with fewer workers than the file names."""

    def after_sync(self, sessions: Mapping[str, Session]) -> None:
        """Check the code that is on the nodes now."""


class Beginning:
    """Brings attempts up in a thread, and takes in how that went.

    Args:
        run: The run.
        connections: Go on with spares that are not there yet.
        preflight: Checks the nodes before anything starts, or `None`.
    """

    def __init__(self, run: ControlledRun, connections: Connections, preflight: Preflight | None) -> None:
        self._run, self._connections, self._preflight = run, connections, preflight
        self._failing = self._hurried = False

    @property
    def undecided(self) -> bool:
        """Nothing may be concluded: no attempt has begun yet, or none will."""
        return self._failing or (self._run.launching and self._run.state.attempt < 0)

    def first(self) -> None:
        """Begin the first attempt of a new run."""
        self._run.raise_epoch(0)
        self._run.launch.begin()
        self.launch(self._first_attempt)

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
                return NotBegun(error=RefusedError(text, hint=rlimits.open_files_hint(error)), prepared=())

        self._run.launching = True
        self._run.aside(attempted, self._launched, self._broken_start)

    def heed_a_cancel(self) -> None:
        """Do what a person wants who ends a run of which nothing else can be decided yet."""
        run = self._run
        self._hurry_a_kill()
        if not run.cancelled.is_set() or self._failing:
            return
        if run.state.attempt < 0:
            if run.launch.give_up():
                self.fail(NotBegun(error=CancelledError("cancelled during the start"), prepared=()))
        elif run.state.reason is None:
            run.end_attempt(StopReason.CANCELLED, "")

    def _hurry_a_kill(self) -> None:
        """Let go of nodes on which a start hangs whose end a person wanted at once."""
        run = self._run
        killed = run.stopping.kill_wait_s(time.monotonic())
        if killed is not None and killed >= _AFTER_KILL and run.launching and not self._hurried:
            self._hurried = True
            for node in run.links.sessions:
                run.links.broken(run.hosts[node])

    # --- the first attempt, in the thread

    def _first_attempt(self) -> Begun | NotBegun:
        run = self._run
        sessions = self._connect(run.spec.hosts)
        unfit = self._refuse_harm(sessions)
        if self._preflight is not None:
            unfit |= self._preflight(sessions, run.post)
            self._begin_without([h.name for h in run.spec.workers if h.name in unfit])
        run.hand_over(lambda: run.unfit.update(unfit))
        hosts = run.spec.workers
        run.launch.sync(hosts, first=True)
        if self._preflight is not None:
            self._preflight.after_sync(sessions_of(run.links.sessions, [h.name for h in hosts]))
        return run.launch.attempt(0, hosts, run.following.follow)

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
            run.post(controller_events.Note(text=warning, level="warn"))
        self._tell_of_missing_gpus(hosts, opened)
        missing = {h.name: errors.pop(h.name) for h in hosts if h.role is Role.SPARE and h.name in errors}
        if errors and not self._begin_without(errors):
            each(opened, lambda _, session: session.close())
            left = sum(host.name in opened for host in run.spec.workers)
            if left:
                text = f"`--exclude {names(errors)}` begins with {left} of {len(run.spec.workers)} nodes"
                run.post(controller_events.Note(text=text))
            raise_first(errors)
        missing |= errors
        run.hand_over(lambda: self._connected(opened, missing))
        if run.cancelled.is_set():
            raise CancelledError("cancelled during the start")
        return opened

    def _tell_of_missing_gpus(self, hosts: Sequence[HostSpec], opened: Mapping[str, Session]) -> None:
        found = {host.name: answer_of(host, opened[host.name].hello).gpus for host in hosts if host.name in opened}
        on_cpu = layout.list_cpu_only_hosts(hosts, found)
        if on_cpu:
            where = "there" if len(on_cpu) == 1 else "on each"
            text = f"no GPU on {names(on_cpu)}: one rank {where}, on the CPU (`gpus: 0` says that it is meant)"
            self._run.post(controller_events.Note(text=text, level="warn"))

    def _begin_without(self, missing: Collection[str]) -> bool:
        """Begin with fewer workers, where a person allowed that; return whether the run may go on."""
        run = self._run
        if not missing:
            return True
        fewer = demote_to_spares(run.spec, missing)
        if fewer is None:
            return False
        run.hand_over(lambda: self._settle(fewer))
        left = len(fewer.workers)
        text = f"the run begins with {left} of {left + len(missing)} nodes: {names(missing)} will wait as spares"
        run.post(controller_events.Note(text=text, level="warn"))
        return True

    def _settle(self, spec: ClusterSpec) -> None:
        """Keep with the run who takes part: whoever adopts it goes on with these."""
        from clusterctl.config.spec import dump_spec

        run = self._run
        write_atomically(run.folder.spec, dump_spec(spec).encode(), durable=True)
        run.spec, run.hosts = spec, {host.name: host for host in spec.hosts}
        run.launch.settle(spec)
        if self._preflight is not None:
            self._preflight.settle(spec)

    def _connected(self, opened: Mapping[str, Session], missing: Mapping[str, ClusterctlError]) -> None:
        run = self._run
        for node, session in opened.items():
            run.join(node, session)
        for spare, error in missing.items():
            run.note(f"spare {spare} cannot be used yet: {str(error).removeprefix(f'{spare}: ')}")
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
            if logind.kills_at_logout(hello.get("logind")):
                unfit[spare] = "unfit"
                run.post(
                    controller_events.Note(text=f"spare {spare} ends processes at logout: it is left out", level="warn")
                )
        logind.refuse_kill_at_logout(hellos)
        return unfit

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
            run.record(build_start_failed(result.error))
        code = ExitCode.CANCELLED if cancelled else result.error.exit_code
        phase = RunPhase.CANCELLED if cancelled else RunPhase.FAILED
        if not cancelled and run.state.attempt >= 0:
            lost = isinstance(result.error, (NodeError, NodesError))
            phase, code = (RunPhase.LOST, ExitCode.LOST) if lost else (RunPhase.FAILED, ExitCode.FAILED)
        concerned = tuple(dict.fromkeys([*run.all_nodes(), *result.prepared]))
        left = [*outcome.list_remaining_processes(run.state), *result.remaining]
        ended = controller_events.Ended(state=phase.value, exit_code=int(code), remaining=left)
        run.aside(
            lambda: self._undo(concerned, result.prepared, ended),
            lambda left: self._undone(left, ended),
            lambda _: self._undone(list(result.prepared), ended),
        )

    def _undo(self, concerned: Sequence[str], prepared: Sequence[str], ended: controller_events.Ended) -> list[str]:
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
        run.raise_epoch(run.epoch)
        for node, session in opened.items():
            run.join(node, session)

    def _undone(self, left: list[str], ended: controller_events.Ended) -> None:
        run = self._run
        if left:
            run.note(UNHEARD.format(names(left)))
        run.record(ended)
        run.control.wake()
