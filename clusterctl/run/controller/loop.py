"""The loop of one run: take what arrived, fold it, decide, act. One thread owns the state.

It is a process of its own, in a session of its own, without a terminal. If it dies, the run goes on; a new one rebuilds
the state from the journals and goes on from the cursors.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.errors import ExitCode
from clusterctl.formatting import duration_text
from clusterctl.run.controller.answering import answer
from clusterctl.run.controller.beginning import Beginning
from clusterctl.run.controller.connections import SHOWN_SILENT_AFTER, Connections
from clusterctl.run.controller.control import ControlRequest
from clusterctl.run.controller.finishing import Finishing
from clusterctl.run.controller.health import HealthWatch
from clusterctl.run.controller.next_attempt import NextAttempt
from clusterctl.run.controller.replication import Replication
from clusterctl.run.controller.run import ControlledRun, Then
from clusterctl.run.controller.stalls import StallGuard
from clusterctl.run.controller.takeover import TakeOver
from clusterctl.run.nodes.links import Redialed
from clusterctl.run.record.clock import read_head_time
from clusterctl.run.record.disk_files import ignore_shortage
from clusterctl.run.rules import controller_events, policy
from clusterctl.run.rules.state import RunPhase
from clusterctl.session.inbox import (
    AttemptsReplicated,
    ClockMeasured,
    EventReceived,
    OutputReceived,
    SessionLost,
    Superseded,
)
from clusterctl.validation.samples import SampleLineSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clusterctl.config.spec import ClusterSpec
    from clusterctl.run.controller.beginning import Preflight
    from clusterctl.run.controller.run import Dial
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.session.inbox import ItemQueue

_TICK = 1.0
_AT_ONCE = 512
"""How many items are taken in before the loop looks around again."""
_LOOK_SECONDS = 0.25
"""How often the loop looks around while only what nodes send all the time arrives: a look goes over all nodes."""
_ALL_THE_TIME = (OutputReceived, AttemptsReplicated, ClockMeasured)


class Controller:
    """Runs one run to its end, or goes on with one that lost its controller.

    Args:
        folder: The run directory; this becomes its one writer.
        spec: What to run, with its secrets.
        dial: Makes, for an inbox, what opens a session to a host with a callback for progress.
        preflight: Checks the nodes before anything starts, or `None`; raises UnhealthyError.
    """

    def __init__(
        self,
        folder: RunDir,
        spec: ClusterSpec,
        dial: Callable[[ItemQueue], Dial],
        preflight: Preflight | None = None,
    ) -> None:
        self._run = run = ControlledRun(folder, spec, dial)
        self._stalls = StallGuard(run)
        self._health = HealthWatch(folder, spec)
        self._samples = SampleLineSplitter()
        self._connections = Connections(run)
        self._replication = Replication(run, self._feed)
        self._beginning = Beginning(run, self._connections, preflight)
        self._takeover = TakeOver(run, self._connections, self._beginning)
        self._next_attempt = NextAttempt(run, self._beginning)
        self._finishing = Finishing(run, self._replication)
        self._news = True
        self._look_at = 0.0

    def start(self, warnings: Sequence[str] = ()) -> int:
        """Start the run and see it to its end; return its exit code. `warnings` are said first."""
        run = self._run
        run.record(controller_events.Created(run=run.folder.run, name=run.spec.name, path=run.spec.path))
        for text in warnings:
            run.note(text)
        self._beginning.first()
        return self._loop()

    def adopt(self) -> int:
        """Go on with a run whose controller is gone; return its exit code."""
        run = self._run
        if run.spec.secrets:
            # Their values were never written down here. The nodes of the last attempt kept them; a spare has none.
            run.launch.forget_secrets()
            run.unfit = dict.fromkeys((h.name for h in run.spec.spares), "no secrets")
        if run.state.attempt >= 0 and not run.cancelled.is_set():
            self._stalls.replay()
        self._takeover.begin()
        return self._loop()

    def cancel(self, *, kill: bool) -> None:
        """End the run: gracefully, or at once."""
        self._run.cancel(kill=kill)

    def _loop(self) -> int:
        run = self._run
        run.take_ownership()
        try:
            while not run.state.over:
                self._take_in()
                if self._connections.superseded:
                    return int(ExitCode.UNATTENDED)
                if self._must_look():
                    self._connections.look()
                    self._act()
                    self._replication.acknowledge()
            while not run.writer.flush():
                time.sleep(_TICK)
            return run.state.exit_code or 0
        finally:
            run.close()

    def _must_look(self) -> bool:
        """Tell whether it is time to look at everything: at once after what may change something, else now and then."""
        moment, run = time.monotonic(), self._run
        waits = run.state.phase is RunPhase.RESTARTING or self._finishing.begun
        if not (self._news or waits or moment >= self._look_at):
            return False
        self._news, self._look_at = False, moment + _LOOK_SECONDS
        return True

    # --- what arrives

    def _take_in(self) -> None:
        """Handle what has arrived; wait for the first item, not for the others."""
        run = self._run
        wait = _TICK
        if run.state.phase is RunPhase.RESTARTING:
            wait = min(_TICK, max(0.01, (run.state.restart_at or 0.0) - read_head_time()))
        try:
            first = run.inbox.get(timeout=wait)
        except queue.Empty:
            self._news = True
            return
        self._handle(first)
        with contextlib.suppress(queue.Empty):
            for _ in range(_AT_ONCE - 1):
                self._handle(run.inbox.get_nowait())
        run.control.wake()

    def _handle(self, item: Any) -> None:
        """Handle an item. What cannot be done with what a node said ends that node's session and nothing else.

        Raises:
            OSError: The head itself cannot do its part, which is no node's fault: the run goes on without a controller.
        """
        self._news = self._news or not isinstance(item, _ALL_THE_TIME)
        try:
            self._dispatch(item)
        except Exception as error:
            node = getattr(item, "node", None)
            if isinstance(item, ControlRequest):
                item.reply({"error": f"this cannot be done: {error!r}"})
            elif node is None or _is_ours(error):
                raise
            else:
                self._connections.misfit(node, error)

    def _dispatch(self, item: Any) -> None:
        match item:
            case EventReceived():
                self._run.take(item)
            case OutputReceived():
                self._replication.take(item)
            case AttemptsReplicated():
                self._replication.whole(item)
            case ClockMeasured():
                self._connections.beat(item)
            case SessionLost():
                self._connections.lost(item)
            case Superseded():
                self._connections.claimed(item.node)
            case Redialed():
                self._connections.back(item)
            case ControlRequest():
                answer(self._run, self._stalls, item)
            case Then():
                item.call()
            case _:
                raise AssertionError(f"nobody handles {type(item).__name__}")

    # --- acting

    def _act(self) -> None:
        run = self._run
        if self._finishing.begun:
            self._finishing.go_on()
            return
        self._takeover.go_on_when_due()
        if self._takeover.active or self._beginning.undecided:
            self._beginning.heed_a_cancel()
            return
        if not run.cancelled.is_set():
            # Nobody wants to know any more how a run is that is to end, and nothing of it may stand in the way.
            self._stalls.judge()
            self._look_at_health()
        if self._next_attempt.must_look_for_checkpoints():
            return
        observations = self._observe()
        while isinstance(
            action := policy.decide_action(run.state, run.limits, observations, read_head_time()), policy.GiveUpNode
        ):
            # All of a rack at once: one at each look would keep the others waiting for as many looks as it has nodes.
            self._give_up(action)
            observations = self._observe()
        match action:
            case None:
                self._go_on_with_restart()
            case policy.EndAttempt():
                run.end_attempt(action.reason, action.message)
            case policy.Restart():
                self._next_attempt.announce(action, observations)
                self._go_on_with_restart()
            case policy.Finish():
                self._finishing.begin(action)

    def _give_up(self, action: policy.GiveUpNode) -> None:
        run = self._run
        run.record(controller_events.Link(node=action.node, link="lost", why=action.why))
        # Its fence counts from here: nothing that we send may reach it any more but a new connection.
        run.links.broken(run.hosts[action.node])
        self._tell_of_fence(action.node)

    def _tell_of_fence(self, node: str) -> None:
        """Say for how long nothing can follow: a node that cannot be heard may still be at work until then."""
        run = self._run
        if run.limits.fence is not None and not run.cancelled.is_set():
            left = max(0.0, run.limits.fence - run.links.cut().get(node, 0.0))
            text = f"waiting {duration_text(left)} for {node}'s workers to time out (on_controller_loss.stop_after)"
            run.note(text, "info")

    def _go_on_with_restart(self) -> None:
        run = self._run
        if run.state.phase is not RunPhase.RESTARTING or run.launching:
            return
        if run.cancelled.is_set():
            self._finishing.begin(policy.finish_cancelled(run.state))
        else:
            self._next_attempt.begin_when_due()

    def _feed(self, item: OutputReceived) -> None:
        """Hand what is safe here to those who watch, where it is samples."""
        if item.file == SAMPLES_FILE:
            lines = self._samples.split(item.node, item.payload)
            if not self._run.cancelled.is_set():
                self._stalls.feed(item.node, lines)
                self._health.feed(item.node, lines)

    def _look_at_health(self) -> None:
        """Record what changed on nodes and GPUs."""
        changes: list[controller_events.Health] = []
        with ignore_shortage():
            changes = self._health.look(self._run.state, time.monotonic())
        for event in changes:
            self._run.record(event)
        if changes:
            self._run.control.wake()

    def _observe(self) -> policy.Observations:
        run = self._run
        silent, moment = run.links.silent(SHOWN_SILENT_AFTER), time.monotonic()
        return policy.Observations(
            silent_s=silent,
            unreachable_s=run.links.cut(),
            stopping_s=run.stopping.update([node for node in run.links.sessions if node not in silent], moment),
            kill_wait_s=run.stopping.kill_wait_s(moment),
            idle_s=self._stalls.idle(),
            cancelled=run.cancelled.is_set(),
            is_gathering_evidence=self._stalls.gathering,
            repeated_failures=self._next_attempt.alike(),
            spare_count=len(self._next_attempt.free_spares()),
            unhealthy=self._health.unhealthy(run.state),
            degraded=self._health.doubtful(run.state),
            dirty_s=self._next_attempt.dirty_for(),
        )


def _is_ours(error: Exception) -> bool:
    """Return whether it is the head's own disk that fails; only how long a file gets is what a node decides."""
    return isinstance(error, OSError) and error.errno is not None and error.errno != errno.EFBIG
