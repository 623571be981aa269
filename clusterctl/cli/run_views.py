"""Loads the state and activity of runs for `ps` and other commands, only from files on this head."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.record_types import ActivitySample
from clusterctl.logs.safe_text import clean_block
from clusterctl.render.run_messages import UnattendedRun, predict_unattended
from clusterctl.render.status_report import RunSnapshot, WorkerActivity, activity_from_sample
from clusterctl.run.record import sample_files, state_reader
from clusterctl.run.record.rundir import RunDir, read_saved_verdict
from clusterctl.run.record.sample_files import PROGRESS_FIELDS
from clusterctl.run.rules.self_stop_time import compute_fence_s
from clusterctl.run.rules.state import RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Console


def warn_of_unreadable_lines(state: RunState, console: Console) -> None:
    """Print a warning about each file with an unreadable line among the files of a run."""
    for line in state.unreadable_lines:
        console.write_stderr(f"warning: {state.run}: {line}; this line is left out")


def load_view_without_output(run: RunDir) -> RunSnapshot:
    """Load a run without its origin, and without the output times and positions of the ranks."""
    state, has_controller = state_reader.load_state_and_attendance(run)
    seen = make_sampled_activity(state, sample_files.read_latest_activities(run, state, PROGRESS_FIELDS), time.time())
    return RunSnapshot(
        state=update_stall_age(state),
        has_controller=has_controller,
        activity=seen,
        verdict=read_stall_verdict(run, state),
        unattended_run=predict_unattended_run(run, state, has_controller=has_controller),
    )


def load_run_list_view(run: RunDir) -> RunSnapshot:
    """Load a run for a list of runs. If the run has ended, read only its summary."""
    end = state_reader.read_summary(run.summary, run.events)
    if end is None:
        return load_view_without_output(run)
    return RunSnapshot(state=end.state, has_controller=run.is_attended, activity={0: WorkerActivity(step=end.step)})


def predict_unattended_run(run: RunDir, state: RunState, *, has_controller: bool = False) -> UnattendedRun:
    """Predict what nodes do with a run without a controller, from its spec and the controller's last write time."""
    if has_controller or state.is_over:
        return UnattendedRun()
    # An unreadable spec gives no prediction. Two values suffice, so the spec is read without importing pydantic.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        stored = json.loads(run.spec.read_text())
        stop_after = (stored["on_controller_loss"] or {}).get("stop_after")
        fence_s, last = compute_fence_s(stop_after, stored["job"]["grace"]), run.find_last_write_time()
        return predict_unattended(state.phase, time.time() - (last or 0.0), stop_after, fence_s)
    return UnattendedRun()


def read_stall_verdict(run: RunDir, state: RunState) -> dict[str, Any] | None:
    """Return the stored verdict about the current stall; `None` if no stall is confirmed."""
    if state.stall is None or state.stall.phase != "confirmed":
        return None
    return read_saved_verdict(run)


def update_stall_age(state: RunState) -> RunState:
    """Return the state with the present duration of its stall; the journal has only the duration at the last change."""
    if state.stall is None or state.reason is not None or state.is_over:
        return state
    grown = state.stall.at_time(time.time())
    return replace(state, stall=replace(grown, since_s=round(grown.since_s, 1)))


def make_sampled_activity(
    state: RunState, newest_samples: Mapping[str, ActivitySample], now: float
) -> dict[int, WorkerActivity]:
    """Return the activity of the ranks, from the newest sample of each node; `now` is the head's wall clock."""
    found: dict[int, WorkerActivity] = {}
    for sample in newest_samples.values():
        if sample.get("attempt") == state.attempt:
            found |= activity_from_sample(sample, max(0.0, now - float(sample.get("t") or now)))
    return found


def read_last_output_lines(path: Path, max_bytes: int) -> list[str]:
    """Return the last lines of a rank's output, without control characters; no lines if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            return clean_block(file.read())
    except OSError:
        return []
