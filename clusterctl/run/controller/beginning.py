"""How a run begins: its first attempt, or where another controller left it; and how a start is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from clusterctl.agent.protocol import Command, StopReason
from clusterctl.config.spec import Role
from clusterctl.errors import (
    ClusterctlError,
    ExitCode,
    NodeError,
    NodesError,
    RefusedError,
    RunFailed,
    UnhealthyError,
)
from clusterctl.run import ending, events, refusals
from clusterctl.run.controller.controlled import CALL_SECONDS
from clusterctl.run.launch import Begun, CancelledError, NotBegun, Progress
from clusterctl.run.links import Redialed, each, names
from clusterctl.run.state import RunPhase
from clusterctl.session import SessionLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from clusterctl.config.spec import HostSpec
    from clusterctl.run.controller.controlled import ControlledRun, Post
    from clusterctl.session import Session


class Preflight(Protocol):
    """The checks before the first attempt; each raises UnhealthyError where the run must not start."""

    def __call__(self, sessions: dict[str, Session], post: Post) -> None:
        """Check the nodes."""

    def after_sync(self, sessions: dict[str, Session]) -> None:
        """Check the code that is on the nodes now."""

    @property
    def unfit(self) -> dict[str, str]:
        """Return the spares that failed a check, and why they are left out, in a word."""


class Beginning:
    """Brings attempts up in a thread, and takes in how that went.

    Args:
        run: The run.
        preflight: Checks the nodes before anything starts, or `None`.
    """

    def __init__(self, run: ControlledRun, preflight: Preflight | None) -> None:
        self._run, self._preflight = run, preflight

    def first(self) -> None:
        """Begin the first attempt of a new run."""
        self._run.epoch = self._run.writer.next_epoch(0)
        self._run.launch.begin()
        self.launch(self._first_attempt)

    def taken_over(self) -> None:
        """Go on where another controller left the run."""
        self.launch(self._take_over)

    def launch(self, work: Callable[[], Begun | NotBegun | None]) -> None:
        """Let a thread bring something up: an attempt, or nothing new (`None`)."""
        self._run.launching = True

        def attempted() -> Begun | NotBegun | None:
            try:
                return work()
            except ClusterctlError as error:
                return NotBegun(error=error, prepared=())
            except OSError as error:
                place = f" ({error.filename})" if error.filename else ""
                text = f"the head cannot write what a start needs: {error.strerror}{place}"
                return NotBegun(error=RefusedError(text), prepared=())

        self._run.aside(attempted, self._launched)

    def give_up_if_cancelled(self) -> None:
        """End a first start that a person does not want any more and that has touched no node yet."""
        run = self._run
        if run.cancelled.is_set() and run.launch.give_up():
            run.launching = False
            self.fail(NotBegun(error=CancelledError("cancelled during the start"), prepared=()))

    # --- in the thread

    def _first_attempt(self) -> Begun | NotBegun:
        run = self._run
        hosts = run.spec.workers
        self._connect(run.spec.hosts)
        self._refuse_harm()
        if self._preflight is not None:
            self._preflight(run.links.sessions, run.post)
            run.unfit |= self._preflight.unfit
        run.launch.sync(hosts, first=True)
        if self._preflight is not None:
            self._preflight.after_sync({h.name: run.links.sessions[h.name] for h in hosts})
        return run.launch.attempt(0, hosts, run.follow)

    def _connect(self, hosts: tuple[HostSpec, ...]) -> None:
        """Open all sessions at once.

        Raises:
            NodeError, NodesError: Some cannot be had; every other one is closed again.
        """
        run = self._run
        step = Progress("connect", len(hosts), run.post)
        opened, errors = run.dial_all(hosts, step)
        run.join(opened)
        step.end(names(opened), failed=bool(errors))
        for warning in dict.fromkeys(warning for session in opened.values() for warning in session.warnings):
            run.post(events.Note(text=warning, level="warn"))
        for spare in [h for h in hosts if h.role is Role.SPARE and h.name in errors]:
            run.post(events.Note(text=f"spare {spare.name} cannot be used yet: {errors[spare.name]}", level="warn"))
            run.inbox.put(SessionLost(node=spare.name, error=errors.pop(spare.name)))
        if errors:
            run.links.close()
            found = list(errors.values())
            raise found[0] if len(found) == 1 else NodesError(found)
        if run.cancelled.is_set():
            raise CancelledError("cancelled during the start")

    def _refuse_harm(self) -> None:
        """Refuse nodes on which workers would not last; a spare like that is left out.

        Raises:
            RefusedError: A node of the first attempt is one of them.
        """
        run = self._run
        hellos = {node: session.hello for node, session in run.links.sessions.items()}
        for spare in [h.name for h in run.spec.spares if h.name in hellos]:
            hello = hellos.pop(spare)
            if refusals.ends_at_logout(hello.get("logind")):
                run.unfit[spare] = "unfit"
                run.post(events.Note(text=f"spare {spare} ends processes at logout: it is left out", level="warn"))
        refusals.refuse(hellos)

    def _take_over(self) -> NotBegun | None:
        run = self._run
        if run.state.attempt < 0:
            return self._undo_start()
        state = run.state
        waiting = [h.name for h in run.spec.spares] if run.spec.restart.max_restarts else []
        wanted = dict.fromkeys([*state.nodes, *state.next_nodes, *state.retired, *waiting])
        hosts = tuple(run.hosts[n] for n in wanted if n in run.hosts)
        step = Progress("connect", len(hosts), run.post)
        opened, errors = run.dial_all(hosts, step)
        step.end(names(opened), failed=bool(errors))
        asked = {"run": run.folder.run}
        seen, _ = each(opened, lambda n, s: s.call(Command.STATUS, {**asked, "node": n}, timeout=CALL_SECONDS))
        run.epoch = run.writer.next_epoch(max((int(s.get("epoch") or 0) for s in seen.values()), default=0))
        for host in hosts:
            if host.name in opened:
                run.inbox.put(Redialed(node=host.name, session=opened[host.name]))
            else:
                run.inbox.put(SessionLost(node=host.name, error=errors[host.name]))
        return None

    def _undo_start(self) -> NotBegun:
        """Undo on every node what a controller left that died before its first attempt was written down."""
        run = self._run
        opened, _ = run.dial_all(run.spec.hosts)
        run.epoch = run.writer.next_epoch(ending.highest_epoch(run.folder.run, opened))
        run.join(opened)
        # A node that never heard of the run keeps at least the epoch from which on it hears nothing of it.
        run.post(events.Traces(nodes=list(opened)))
        grace = 0.0 if run.kill else run.limits.grace
        each(opened, lambda n, s: ending.end_on_node(s, run.folder.run, n, grace))
        error = RunFailed("its controller ended during the start", exit_code=ExitCode.FAILED)
        return NotBegun(error=error, prepared=())

    # --- in the loop

    def _launched(self, result: Begun | NotBegun | None) -> None:
        run = self._run
        run.launching = False
        if not isinstance(result, NotBegun):
            return
        if run.state.attempt < 0 or not run.state.workers or run.state.phase is RunPhase.RESTARTING:
            self.fail(result)
            return
        cancelled = run.cancelled.is_set()
        if not cancelled:
            run.record(events.StartFailed(error=error_json(result.error)))
        if run.state.reason is None:
            run.end_attempt(StopReason.CANCELLED if cancelled else StopReason.START_FAILED, str(result.error))

    def fail(self, result: NotBegun) -> None:
        """End a run none of whose workers was started; undo what was prepared."""
        run = self._run
        cancelled = run.cancelled.is_set()
        if not cancelled:
            run.record(events.StartFailed(error=error_json(result.error)))
        code = ExitCode.CANCELLED if cancelled else result.error.exit_code
        phase = RunPhase.CANCELLED if cancelled else RunPhase.FAILED
        if not cancelled and run.state.attempt >= 0:
            lost = isinstance(result.error, (NodeError, NodesError))
            phase, code = (RunPhase.LOST, ExitCode.LOST) if lost else (RunPhase.FAILED, ExitCode.FAILED)
        untold = run.finish_nodes([*run.all_nodes(), *result.prepared], phase.value, int(code))
        self._undo_unheard([n for n in untold if n in result.prepared], phase.value, int(code))
        run.record(events.Ended(state=phase.value, exit_code=int(code)))
        run.control.wake()

    def _undo_unheard(self, nodes: list[str], state: str, code: int) -> None:
        """Dial nodes once more whose session broke while they prepared: what they hold must be given back."""
        if not nodes:
            return
        run = self._run
        opened, _ = run.dial_all(run.hosts[n] for n in nodes)
        # Above the epoch of what was asked for: where that arrives only now, it is refused.
        run.epoch = run.writer.next_epoch(run.epoch)
        run.join(opened)
        left = {*run.finish_nodes(list(opened), state, code), *(n for n in nodes if n not in opened)}
        if left:
            run.note(f"{names(left)} could not be told that the start failed: what was prepared there ends by itself")


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
