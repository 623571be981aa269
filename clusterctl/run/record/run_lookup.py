"""The runs that this head knows, and which of them a person means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.run.record import state_reader
from clusterctl.run.record.rundir import RunDir, find_runs_root
from clusterctl.run.record.state_reader import load_controller_state, load_state
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.suggestion import file_hint, similar

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_NAMES = 8
"""Runs that are named where several could be meant: the newest."""


def list_runs(root: Path | None = None) -> list[RunDir]:
    """Return every run of this head, newest last."""
    base = root or find_runs_root()
    found = [p for p in base.iterdir() if (p / "events.jsonl").exists()] if base.is_dir() else []
    return [RunDir(p) for p in sorted(found, key=lambda p: (p.stat().st_ctime_ns, p.name))]


def find_run(reference: str | None, root: Path | None = None) -> RunDir:
    """Return the run that a person means.

    Args:
        reference: An id or its unique beginning, a name, or a cluster file; `None` for the only active run, or the
            newest.
        root: Where runs lie; the user's own by default.

    Raises:
        NotFoundError: There is none.
        RefusedError: Several could be meant.
    """
    runs = list_runs(root)
    if reference is None and len(runs) == 1:
        # There is nothing to choose, so nothing to read.
        return runs[0]
    if reference is None:
        active = [r for r in runs if not _load_controller_state(r).over]
        candidates = active or runs[-1:]
        what = "no run yet"
    else:
        candidates = [r for r in runs if r.run == reference] or _match_name_or_file(runs, reference)
        candidates = candidates or _match_prefix(runs, reference)
        what = f"no run `{reference}`"
    if not candidates:
        hint = _describe_near_match(runs, reference) or "`clusterctl ps -a` lists all runs of this head"
        raise NotFoundError(what, hint=hint)
    if len(candidates) > 1:
        names = ", ".join(r.run for r in candidates[-_MAX_NAMES:])
        names += f" and {len(candidates) - _MAX_NAMES} more" if len(candidates) > _MAX_NAMES else ""
        raise RefusedError(f"several runs could be meant: {names}", hint="name one of them")
    return candidates[0]


def _match_name_or_file(runs: list[RunDir], reference: str) -> list[RunDir]:
    path = Path(reference)
    real_path = os.path.realpath(path) if path.is_file() else None
    states = [(r, _load_controller_state(r)) for r in runs]
    matching = [
        (r, s) for r, s in states if s.name == reference or (real_path and os.path.realpath(s.path) == real_path)
    ]
    return [r for r, s in matching if not s.over] or [r for r, _ in matching[-1:]]


def _describe_near_match(runs: list[RunDir], reference: str | None) -> str | None:
    """Return which run, or which cluster file, somebody may have meant who wrote something else."""
    if reference is None:
        return None
    if os.sep in reference or reference.endswith((".yaml", ".yml")):
        return file_hint(reference)
    known = [run.run for run in reversed(runs)]
    known += dict.fromkeys(name.rpartition("-")[0] for name in known)
    close = similar(reference, known, 0.7)
    return f"did you mean `{close}`?" if close else None


def _match_prefix(runs: list[RunDir], reference: str) -> list[RunDir]:
    matching = [r for r in runs if r.run.startswith(reference)] if reference else []
    active = [r for r in matching if not _load_controller_state(r).over] if len(matching) > 1 else []
    return active if len(active) == 1 else matching


def _load_controller_state(run: RunDir) -> RunState:
    """Return as much of a run's state as tells whether it is meant: its nodes' journals say nothing of that."""
    known = state_reader.read_summary(run.summary, run.events)
    return _load_or_unreadable(run, load_controller_state) if known is None else known.state


def is_over(run: RunDir) -> bool:
    """Return whether a run has ended, or never began: the controller's journal alone tells."""
    return _apply_dead_start(_load_controller_state(run), attended=run.is_attended).over


def load_visible_state(run: RunDir, load: Callable[[RunDir], RunState] = load_state) -> tuple[RunState, bool]:
    """Return the state of a run and whether it is attended.

    A start whose controller died before any attempt began left nothing to adopt: it has failed.

    Args:
        run: Which.
        load: Reads the state, for somebody who wants more of the same files.
    """
    attended = run.is_attended
    return _apply_dead_start(_load_or_unreadable(run, load), attended=attended), attended


def load_summary_or_state(run: RunDir) -> RunState:
    """Return the state of a run; of one that has ended no more than lists need."""
    known = state_reader.read_summary(run.summary, run.events)
    return _load_or_unreadable(run) if known is None else known.state


def _load_or_unreadable(run: RunDir, load: Callable[[RunDir], RunState] = load_state) -> RunState:
    """Return the state of a run; of one whose files say nothing, just that."""
    try:
        state = load(run)
    except OSError as error:
        return RunState(
            run=run.run, phase=RunPhase.UNREADABLE, unreadable_lines=(f"{run.events.name}: {error.strerror}",)
        )
    if state.created is None and state.unreadable_lines:
        return replace(state, run=run.run, phase=RunPhase.UNREADABLE)
    return state


def _apply_dead_start(state: RunState, *, attended: bool) -> RunState:
    if not attended and not state.over and state.attempt < 0 and state.created is not None:
        return replace(state, phase=RunPhase.FAILED, exit_code=100)
    return state
