"""Reads from the nodes' samples how healthy the nodes are, and whether the ranks make progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.config.spec import ClusterSpec
from clusterctl.run.controller.controlled_run import ControlledRun
from clusterctl.run.nodes.evidence_requests import collect_stall_evidence, find_last_stall
from clusterctl.run.record import saved_verdict
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import read_last_lines
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.record.thread_ownership import ThreadOwnedAttributes
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.health_observer import HealthObserver, list_run_gpus
from clusterctl.run.rules.idle_detection import NodeActivity, add_health_sample, measure_gpu_idle_s
from clusterctl.run.rules.stall_detection import StallJudgement, StallObserver, StallPhase
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.validation import node_samples
from clusterctl.why.verdict import format_brief_lines

_EVERY = 1.0
_MAX_GAP_SAMPLES = 4
"""The most intervals between two samples in which the GPUs of a node may count as idle."""


class HealthMonitor(ThreadOwnedAttributes):
    """Passes the samples of a run to a `HealthObserver`: first the samples in the replicas, then new samples.

    Thread: the loop.

    Args:
        run: The run directory, with the replicas.
        spec: The spec of the cluster file, with the limits.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec) -> None:
        self._run = run
        self._observer = HealthObserver(spec)
        self._new: dict[str, list[bytes]] = {}
        self._replayed: set[str] = set()
        self._looked = 0.0

    def add_sample_lines(self, node: str, lines: Sequence[bytes]) -> None:
        """Add lines of a node's samples. The replica of the samples already contains these lines."""
        self._new.setdefault(node, []).extend(lines)

    def list_health_changes(self, state: RunState, now: float) -> list[controller_events.HealthChanged]:
        """Return changes of health since the last call, or nothing if it was less than 1 s ago. `now` is monotonic."""
        if now - self._looked < _EVERY:
            return []
        self._looked = now
        if not self._replayed and not any((self._run.node(node) / SAMPLES_FILE).exists() for node in state.nodes):
            return []
        new, self._new = self._new, {}
        changes: list[controller_events.HealthChanged] = []
        for node in state.nodes:
            if node in self._replayed:
                changes += self._observer.add_sample_lines(node, new.get(node, []), now)
            else:
                self._replayed.add(node)
                recorded = [event for event in state.troubles.values() if event.node == node]
                lines = read_last_lines(self._run.node(node) / SAMPLES_FILE)
                changes += self._observer.replay_samples(node, lines, recorded, now)
        heard = {n.node for n in state.nodes.values() if n.link == "connected" and not n.finished}
        return changes + self._observer.find_silent_nodes(heard, now)

    def find_unhealthy_nodes(self, state: RunState) -> dict[str, str]:
        """Return the nodes that a restart should exclude, each with the reason: a failed check, or used GPU memory."""
        held = {n.node: n.gpu_memory_held for n in state.nodes.values() if n.gpu_memory_held}
        return held | self._observer.find_unhealthy_nodes(state.nodes)

    def find_degraded_nodes(self, state: RunState) -> dict[str, str]:
        """Return the nodes that a restart should avoid if possible, each with the reason."""
        return self._observer.find_degraded_nodes(state.nodes)


class StallMonitor(ThreadOwnedAttributes):
    """Watches the current attempt for a stall.

    Thread: the loop.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._observer: StallObserver | None = None
        self._attempt = -1
        self._last_stall = find_last_stall(run.folder)
        self._pending_evidence = 0
        self._stall = StallJudgement(has_all_samples=False)

    def _watch(self) -> StallObserver | None:
        state = self._run.state
        if state.attempt != self._attempt:
            self._attempt = state.attempt
            # A service that nobody asks is no stall, and one that prints must not hide the stall of the others.
            ranks = [worker.rank for worker in state.main_workers]
            self._observer = StallObserver(state.attempt, ranks, self._run.spec.stall, time.monotonic())
        return self._observer

    def replay_samples(self) -> None:
        """Add the samples from before the start of this controller to the observer."""
        observer = self._watch()
        if observer is not None:
            samples = {
                name: read_last_lines(self._run.folder.node(name) / run_files.SAMPLES_FILE)
                for name, node in self._run.state.nodes.items()
                if not node.is_service
            }
            observer.replay_samples(samples, time.monotonic())

    def add_sample_lines(self, node: str, lines: Sequence[bytes]) -> None:
        """Add lines of a node's samples."""
        observer, state = self._watch(), self._run.find_node(node)
        if observer is not None and not (state is not None and state.is_service):
            observer.add_sample_lines(node, lines, time.monotonic())

    def update_judgement(self) -> None:
        """Judge whether the run stalls, and record a change. Collect evidence before the policy acts."""
        run, observer = self._run, self._watch()
        if observer is None or run.state.phase not in (RunPhase.RUNNING, RunPhase.STALLED):
            return
        self._stall = stall = observer.judge(time.monotonic())
        for text in observer.list_new_warnings(stall, time.monotonic()):
            run.record_note(text)
        self._record_first_step(observer)
        shown = "none" if run.state.stall is None else run.state.stall.phase
        if not stall.has_all_samples or stall.phase.value == shown:
            return
        evidence = (
            None
            if stall.phase.value == "none"
            else self._collect_evidence(is_confirmed=stall.phase is StallPhase.CONFIRMED)
        )
        run.record_event(
            controller_events.StallChanged(
                attempt=run.state.attempt,
                phase=stall.phase.value,
                since_s=stall.since_s,
                limit_s=stall.limit_s,
                reason=stall.reason,
                evidence=evidence,
            )
        )
        run.control.notify_watchers()

    def _record_first_step(self, observer: StallObserver) -> None:
        """Record the first step of the attempt, and its number as soon as the number is known."""
        times = self._run.state.times
        if times.first_step_at is not None and times.first_step is not None:
            return
        first = observer.find_first_step()
        if first is not None and (times.first_step_at is None or first.number is not None):
            ago_s = max(0.0, time.monotonic() - first.at)
            self._run.record_event(
                controller_events.FirstStepSeen(attempt=self._attempt, step=first.number, ago_s=ago_s)
            )

    def _collect_evidence(self, *, is_confirmed: bool) -> str:
        """Collect and judge evidence of a stall in a thread; return the name of the evidence folder."""
        run, sessions = self._run, self._run.get_attempt_sessions()
        self._last_stall = number = self._last_stall + 1
        self._pending_evidence += 1

        def collect() -> list[str]:
            is_saved = collect_stall_evidence(run.folder, number, sessions)
            return self._judge_evidence() if is_saved and is_confirmed else []

        run.executor.run_in_thread(collect, self._on_collected, lambda _: self._on_collected([]))
        return f"stall-{number}"

    def _judge_evidence(self) -> list[str]:
        """Judge the evidence of a stall, save the verdict, and return the lines of the verdict. Runs in a thread."""
        folder = self._run.folder
        verdict = saved_verdict.judge_saved_run(folder, load_state(folder))
        saved_verdict.save_verdict(folder, verdict)
        return list(format_brief_lines(verdict, folder.run))

    def _on_collected(self, lines: list[str]) -> None:
        self._pending_evidence -= 1
        for number, line in enumerate(lines):
            self._run.record_note(line, "info" if number else "warn")

    def measure_idle_s(self) -> float:
        """Return for how many seconds no unfinished node of the attempt has shown any activity."""
        observer = self._watch()
        return 0.0 if observer is None else observer.measure_idle_s(self._run.state.list_unfinished_nodes())

    def find_own_step(self) -> float | None:
        """Return the last step of the slowest rank by the count of the job; `None` if it is unknown."""
        observer = self._watch()
        return None if observer is None else observer.find_own_step()

    @property
    def is_evidence_pending(self) -> bool:
        """Whether the policy must wait, because a stall is not confirmed or its evidence is incomplete."""
        return self._pending_evidence > 0 or self._stall.phase is not StallPhase.CONFIRMED

    def end_if_stalled(self, *, kill: bool) -> dict[str, Any]:
        """End the run if it is stalled now. No attempt follows, because the user ended the run."""
        run = self._run
        self.update_judgement()
        stalled = run.state.phase is RunPhase.STALLED and self._stall.phase is StallPhase.CONFIRMED
        if stalled:
            if kill:
                run.kill_now()
            run.limits = run.limits.with_stop_on_stall()
        return {
            "ok": True,
            "stalled": stalled,
            "phase": self._stall.phase.value if self._stall.has_all_samples else None,
        }


class IdleMonitor(ThreadOwnedAttributes):
    """Watches whether the GPUs of the current attempt do anything, if the cluster file sets `idle.after`.

    Thread: the loop.
    """

    def __init__(self, run: ControlledRun) -> None:
        self._run, self._after = run, run.spec.idle.after
        self._gpus = {host.name: list_run_gpus(host) for host in run.spec.hosts}
        self._max_gap_s = _MAX_GAP_SAMPLES * run.spec.health.sampling_interval
        self._attempt = -1
        self._nodes: dict[str, NodeActivity] = {}

    def replay_samples(self) -> None:
        """Add the samples from before the start of this controller."""
        for node in self._run.state.nodes:
            self.add_sample_lines(node, read_last_lines(self._run.folder.node(node) / run_files.SAMPLES_FILE))

    def add_sample_lines(self, node: str, lines: Sequence[bytes]) -> None:
        """Add lines of a node's samples."""
        if self._after is None:
            return
        if self._run.state.attempt != self._attempt:
            self._attempt, self._nodes = self._run.state.attempt, {}
        for sample in node_samples.parse_samples(lines, "health", "m"):
            before = self._nodes.get(node)
            if sample.get("attempt") == self._attempt and (before is None or sample["m"] > before.seen_at):
                self._nodes[node] = add_health_sample(before, sample, self._gpus.get(node), self._max_gap_s)

    def measure_idle_s(self) -> float:
        """Return for how many seconds no GPU of the attempt has worked."""
        state = self._run.state
        return measure_gpu_idle_s(self._nodes, state.nodes) if self._attempt == state.attempt else 0.0

    def update_judgement(self) -> None:
        """Record when the run becomes idle, and when one of its GPUs works again."""
        run, idle_s = self._run, self.measure_idle_s()
        if self._after is None or run.state.phase not in (RunPhase.RUNNING, RunPhase.STALLED):
            return
        is_idle = idle_s >= self._after
        # A new controller that has read only the newest samples does not know whether the run has worked in between.
        if is_idle is (run.state.idle_since is not None) or (
            not is_idle and not any(node.has_worked for node in self._nodes.values())
        ):
            return
        run.record_event(
            controller_events.IdleChanged(attempt=run.state.attempt, idle_s=round(idle_s, 1) if is_idle else 0.0)
        )
        run.control.notify_watchers()
