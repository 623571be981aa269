"""The watch over a run that may have stalled: what the rule says, evidence before anybody acts, an end on request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import run_files
from clusterctl.run.nodes.evidence import Gatherer
from clusterctl.run.record.sample_files import read_last_lines
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.stall_detection import StallJudgement, StallObserver, StallPhase
from clusterctl.run.rules.state import RunPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.run.controller.run import ControlledRun


class StallGuard:
    """Watches the attempt that there is; each is watched anew."""

    def __init__(self, run: ControlledRun) -> None:
        self._run = run
        self._observer: StallObserver | None = None
        self._attempt = -1
        self._gatherer = Gatherer(run.folder, self._tell_why)
        self._stall = StallJudgement(is_known=False)

    def _watch(self) -> StallObserver | None:
        state = self._run.state
        if state.attempt != self._attempt:
            self._attempt = state.attempt
            self._observer = StallObserver(state.attempt, state.workers, self._run.spec.stall, time.monotonic())
        return self._observer

    def replay(self) -> None:
        """Tell the rule what it knew before: how long steps take, and when the last one was."""
        observer = self._watch()
        if observer is not None:
            samples = {
                n: read_last_lines(self._run.folder.node(n) / run_files.SAMPLES_FILE) for n in self._run.state.nodes
            }
            observer.replay(samples, time.monotonic())

    def feed(self, node: str, lines: Sequence[bytes]) -> None:
        """Take in lines of a node's samples."""
        observer = self._watch()
        if observer is not None:
            observer.add_lines(node, lines, time.monotonic())

    def judge(self) -> None:
        """Record what the rule says when it says something new; keep evidence before anybody acts."""
        run, observer = self._run, self._watch()
        if observer is None or run.state.phase not in (RunPhase.RUNNING, RunPhase.STALLED):
            return
        self._stall = stall = observer.judge(time.monotonic())
        for text in observer.list_new_warnings(stall, time.monotonic()):
            run.note(text)
        shown = "none" if run.state.stall is None else run.state.stall.phase
        if not stall.is_known or stall.phase.value == shown:
            return
        evidence = (
            None
            if stall.phase.value == "none"
            else self._gatherer.begin(run.sessions(), confirmed=stall.phase is StallPhase.CONFIRMED)
        )
        run.record(
            controller_events.StallChanged(
                attempt=run.state.attempt,
                phase=stall.phase.value,
                since_s=stall.since_s,
                limit_s=stall.limit_s,
                reason=stall.reason,
                evidence=evidence,
            )
        )
        run.control.wake()

    def _tell_why(self) -> None:
        """Say what the evidence of a stall tells, and keep it. In a thread; the state is that of the files."""
        from clusterctl.run.record import saved_verdict
        from clusterctl.run.record.state_reader import load_state
        from clusterctl.why.verdict_text import brief_lines

        run = self._run
        told = saved_verdict.judge_saved_run(run.folder, load_state(run.folder))
        saved_verdict.save_verdict(run.folder, told)
        for number, line in enumerate(brief_lines(told, run.folder.run)):
            run.post(controller_events.Note(text=line, level="info" if number else "warn"))

    def idle(self) -> float:
        """Return for how many seconds no unfinished node of the attempt has shown any activity."""
        observer = self._watch()
        return 0.0 if observer is None else observer.measure_idle_s(self._run.state.list_unfinished_nodes())

    @property
    def gathering(self) -> bool:
        """A stall must not be acted upon yet: it is not confirmed, or its evidence is not whole."""
        return self._gatherer.busy or self._stall.phase is not StallPhase.CONFIRMED

    def end_if_stalled(self, *, kill: bool) -> dict[str, Any]:
        """End the run if it is stalled at this very moment; no attempt follows, as a person wants it gone."""
        run = self._run
        self.judge()
        stalled = run.state.phase is RunPhase.STALLED and self._stall.phase is StallPhase.CONFIRMED
        if stalled:
            if kill:
                run.end_at_once()
            run.limits = run.limits.stopping_stalled()
        return {"ok": True, "stalled": stalled, "phase": self._stall.phase.value if self._stall.is_known else None}
