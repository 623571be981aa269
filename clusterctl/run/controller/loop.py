"""The loop of the controller, which handles queued items, decides and acts. One thread owns the state.

The controller is a process of its own without a terminal. If the controller dies, the run continues. A new controller
rebuilds the state from the journals and continues from the cursors.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import time
from collections.abc import Sequence
from typing import Any

from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ExitCode
from clusterctl.formatting import describe_duration
from clusterctl.run.controller.adoption import RunAdoption
from clusterctl.run.controller.attempts import RestartSequence, StartSequence
from clusterctl.run.controller.control_socket import ControlRequest
from clusterctl.run.controller.controlled_run import ControlledRun, Dial
from clusterctl.run.controller.executor import LoopCall
from clusterctl.run.controller.finish import FinishSequence
from clusterctl.run.controller.health_and_stall_monitors import HealthMonitor, IdleMonitor, StallMonitor
from clusterctl.run.controller.reconnection import SILENT_AFTER_S, Reconnection
from clusterctl.run.controller.replication import Replication
from clusterctl.run.nodes.evidence_requests import request_evidence
from clusterctl.run.nodes.preflight import Preflight
from clusterctl.run.record.disk_files import ignore_resource_shortage
from clusterctl.run.record.head_clock import read_head_time
from clusterctl.run.record.machine_ledger import record_run
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events, next_action
from clusterctl.run.rules.state import RunPhase
from clusterctl.session.controller_inbox import (
    AttemptsReplicated,
    ClockMeasured,
    ControllerSuperseded,
    EventReceived,
    OutputReceived,
    SessionLost,
)
from clusterctl.validation.node_samples import SampleLineSplitter

_TICK_S = 1.0
_MAX_ITEMS = 512
"""The most queued items to handle between two evaluations of the run."""
_EVALUATE_EVERY_S = 0.25
"""Seconds between evaluations while only frequent items arrive. An evaluation takes time for each node."""
_FREQUENT_ITEMS = (OutputReceived, AttemptsReplicated, ClockMeasured)


class Controller:
    """Controls a run to its end, from its start or after an adoption.

    Args:
        folder: The run directory; this object becomes its only writer.
        spec: The spec of the cluster file, with secrets.
        dial: Opens a session to a host.
        preflight: The checks before the start; `None` to skip them.
        max_wait_s: The most seconds to wait for GPUs that other runs hold.
    """

    def __init__(
        self,
        folder: RunDir,
        spec: ClusterSpec,
        dial: Dial,
        preflight: Preflight | None = None,
        max_wait_s: float = 0.0,
    ) -> None:
        self._run = run = ControlledRun(folder, spec, dial)
        self._stalls = StallMonitor(run)
        self._idle = IdleMonitor(run)
        self._health = HealthMonitor(folder, spec)
        self._samples = SampleLineSplitter()
        self._reconnection = Reconnection(run)
        run.links.on_dialed = self._reconnection.on_reconnect
        self._replication = Replication(run, self._feed)
        self._start = StartSequence(run, self._reconnection, preflight, max_wait_s)
        self._adoption = RunAdoption(run, self._reconnection, self._start)
        self._restart = RestartSequence(run, self._start, self._stalls)
        self._finish = FinishSequence(run, self._replication)
        self._is_dirty = True
        self._next_look_at = 0.0

    def start(self, warnings: Sequence[str] = ()) -> int:
        """Start the run and control it to its end; return its exit code. Record `warnings` first."""
        run = self._run
        run.record_event(controller_events.RunCreated(run=run.folder.run, name=run.spec.name, path=run.spec.path))
        for text in warnings:
            run.record_note(text)
        self._start.start_first_attempt()
        return self._loop()

    def adopt(self) -> int:
        """Continue a run that lost its controller; return its exit code."""
        run = self._run
        if run.spec.secrets:
            # The head never saves secrets. The nodes of the last attempt have the secrets; a spare has none.
            run.launcher.secrets = {}
            run.excluded_spares = dict.fromkeys((h.name for h in run.spec.spare_hosts), "no secrets")
        if run.state.attempt >= 0 and not run.cancelled.is_set():
            self._stalls.replay_samples()
            self._idle.replay_samples()
        self._adoption.start()
        return self._loop()

    def cancel(self, *, kill: bool) -> None:
        """Cancel the run: gracefully, or at once."""
        self._run.cancel(kill=kill)

    def post_note(self, text: str) -> None:
        """Have the loop record a warning. Any thread may call this."""
        self._run.post_note(text)

    def _loop(self) -> int:
        run = self._run
        parts = (self._reconnection, self._replication, self._start, self._restart, self._adoption, self._finish)
        for part in (run, self._stalls, self._idle, self._health, *parts):
            part.take_ownership()
        try:
            while not run.state.is_over:
                self._receive()
                if self._reconnection.is_superseded:
                    return int(ExitCode.UNATTENDED)
                if self._should_evaluate():
                    self._reconnection.record_silent_nodes()
                    self._act()
                    self._replication.acknowledge_when_due()
            while not run.writer.flush():
                time.sleep(_TICK_S)
            return run.state.exit_code or 0
        finally:
            run.close()

    def _should_evaluate(self) -> bool:
        """Return whether to evaluate the run now: an item may have changed the state, or some time has passed."""
        moment, run = time.monotonic(), self._run
        waits = run.state.phase is RunPhase.RESTARTING or self._finish.has_begun
        if not (self._is_dirty or waits or moment >= self._next_look_at):
            return False
        self._is_dirty, self._next_look_at = False, moment + _EVALUATE_EVERY_S
        return True

    # --- what arrives

    def _receive(self) -> None:
        """Wait for an item, then handle the queued items."""
        run = self._run
        wait = _TICK_S
        if run.state.phase is RunPhase.RESTARTING:
            wait = min(_TICK_S, max(0.01, (run.state.restart_at or 0.0) - read_head_time()))
        try:
            first = run.inbox.get(timeout=wait)
        except queue.Empty:
            self._is_dirty = True
            return
        self._handle(first)
        with contextlib.suppress(queue.Empty):
            for _ in range(_MAX_ITEMS - 1):
                self._handle(run.inbox.get_nowait())
        run.control.notify_watchers()

    def _handle(self, item: Any) -> None:
        """Handle an item. An invalid message of a node ends only the session with this node.

        Raises:
            OSError: The head itself failed, for example its disk. The run continues without a controller.
        """
        self._is_dirty = self._is_dirty or not isinstance(item, _FREQUENT_ITEMS)
        try:
            self._dispatch(item)
        except Exception as error:
            node = getattr(item, "node", None)
            if isinstance(item, ControlRequest):
                item.reply({"error": f"the request failed: {error!r}"})
            elif node is None or _is_head_failure(error):
                raise
            else:
                self._reconnection.on_invalid_message(node, error)

    def _dispatch(self, item: Any) -> None:
        match item:
            case EventReceived():
                self._run.apply_received_event(item)
            case OutputReceived():
                self._replication.store_output(item)
            case AttemptsReplicated():
                self._replication.mark_attempts_replicated(item)
            case ClockMeasured():
                self._reconnection.record_clock(item)
            case SessionLost():
                self._reconnection.on_session_lost(item)
            case ControllerSuperseded():
                self._reconnection.on_stale_epoch(item.node)
            case ControlRequest():
                answer_request(self._run, self._stalls, item)
            case LoopCall():
                item.call()
            case _:
                raise AssertionError(f"no handler for {type(item).__name__}")

    # --- acting

    def _act(self) -> None:
        run = self._run
        if self._finish.has_begun:
            self._finish.continue_finish()
            return
        self._adoption.continue_without_late_nodes()
        if self._adoption.is_active or self._start.has_no_attempt:
            self._start.cancel_start()
            return
        if not run.cancelled.is_set():
            # A cancelled run ignores stalls and health problems, because neither may delay its end.
            self._stalls.update_judgement()
            self._idle.update_judgement()
            self._record_health()
        if self._restart.is_checkpoint_search_pending():
            return
        observations = self._observe()
        has_lost_node = False
        while isinstance(
            action := next_action.decide_action(run.state, run.limits, observations, read_head_time()),
            next_action.GiveUpNode,
        ):
            # Give up all lost nodes in one evaluation, because all nodes of a rack may be lost at once.
            self._give_up_node(action)
            has_lost_node = True
            observations = self._observe()
        if has_lost_node:
            self._record_history()
        match action:
            case None:
                self._continue_restart()
            case next_action.EndAttempt():
                run.end_attempt(action.reason, action.message)
            case next_action.Restart():
                self._restart.plan_restart(action, observations)
                self._continue_restart()
            case next_action.Finish():
                self._finish.begin(action)

    def _give_up_node(self, action: next_action.GiveUpNode) -> None:
        run = self._run
        run.record_event(controller_events.LinkChanged(node=action.node, link="lost", why=action.why))
        # The fence of the node counts from this moment, because only a new connection can reach the node now.
        run.links.redial(run.hosts[action.node])
        self._note_fence(action.node)

    def _note_fence(self, node: str) -> None:
        """Record how long the run has to wait until the workers of an unreachable node have stopped."""
        run = self._run
        if run.limits.fence is not None and not run.cancelled.is_set():
            left = max(0.0, run.limits.fence - run.links.measure_unreachable_s().get(node, 0.0))
            text = f"waiting {describe_duration(left)} for {node}'s workers to time out (on_controller_loss.stop_after)"
            run.record_note(text, "info")

    def _continue_restart(self) -> None:
        run = self._run
        if run.state.phase is not RunPhase.RESTARTING or run.is_busy:
            return
        if run.cancelled.is_set():
            self._finish.begin(next_action.finish_cancelled(run.state))
        else:
            self._restart.start_when_due()

    def _feed(self, item: OutputReceived) -> None:
        """Pass samples to the monitors after the samples are stored."""
        if item.file == SAMPLES_FILE:
            lines = self._samples.split(item.node, item.payload)
            if not self._run.cancelled.is_set():
                self._stalls.add_sample_lines(item.node, lines)
                self._idle.add_sample_lines(item.node, lines)
                self._health.add_sample_lines(item.node, lines)

    def _record_health(self) -> None:
        """Record changes of the health of nodes and GPUs."""
        changes: list[controller_events.HealthChanged] = []
        with ignore_resource_shortage():
            changes = self._health.list_health_changes(self._run.state, time.monotonic())
        for event in changes:
            self._run.record_event(event)
        if changes:
            self._run.control.notify_watchers()
            self._record_history()

    def _record_history(self) -> None:
        """Store losses and findings in the history of the machines now, because the run may last for weeks."""
        run = self._run
        now = read_head_time()
        run.executor.run_in_thread(
            lambda: record_run(run.folder, now), on_failed=lambda error: run.record_note(str(error))
        )

    def _observe(self) -> next_action.RunObservations:
        run = self._run
        silent, moment = run.links.measure_silence_s(SILENT_AFTER_S), time.monotonic()
        return next_action.RunObservations(
            silent_s=silent,
            unreachable_s=run.links.measure_unreachable_s(),
            stopping_s=run.stopping.update([node for node in run.links.sessions if node not in silent], moment),
            kill_wait_s=run.stopping.measure_kill_wait_s(moment),
            idle_s=self._stalls.measure_idle_s(),
            gpu_idle_s=self._idle.measure_idle_s(),
            cancelled=run.cancelled.is_set(),
            is_evidence_pending=self._stalls.is_evidence_pending,
            repeated_failures=self._restart.count_repeated_failures(),
            spare_count=len(self._restart.list_free_spares()),
            unhealthy=self._health.find_unhealthy_nodes(run.state),
            degraded=self._health.find_degraded_nodes(run.state),
            dirty_node_s=self._restart.measure_dirty_node_s(),
        )


def _is_head_failure(error: Exception) -> bool:
    """Return whether the head itself failed. EFBIG is the fault of a node, because nodes decide the sizes of files."""
    return isinstance(error, OSError) and error.errno is not None and error.errno != errno.EFBIG


def answer_request(run: ControlledRun, stalls: StallMonitor, request: ControlRequest) -> None:
    """Answer a request, at once or in a new thread."""
    match request.command:
        case "down" if request.arguments.get("stalled"):
            request.reply(stalls.end_if_stalled(kill=bool(request.arguments.get("kill"))))
        case "down":
            run.cancel(kill=bool(request.arguments.get("kill")))
            request.reply({"ok": True, "grace": run.limits.grace})
        case "evidence":
            _send_evidence(run, request)
        case "ping":
            request.reply({"ok": True, "run": run.folder.run})
        case _:
            request.reply({"error": f"unknown command {request.command!r}"})


def _send_evidence(run: ControlledRun, request: ControlRequest) -> None:
    sessions, ranks = run.get_attempt_sessions(), request.arguments.get("ranks")
    unseen = {n: "not connected" for n in run.state.nodes if n not in sessions}

    def collect() -> None:
        collected = request_evidence(run.folder.run, "stacks", sessions, ranks)
        request.reply({"ranks": collected.ranks, "errors": {**collected.errors, **unseen}})

    run.executor.run_in_thread(collect)
