"""Of which standstill the evidence is on which the verdict rests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.verdicts import open_bundle
from clusterctl.run.record import saved_verdict, state_reader
from clusterctl.run.rules import controller_events, failure_causes
from clusterctl.run.rules.state import RunState, WorkerState
from clusterctl.run.rules.state_updates import apply_controller_event
from tests.unit.why.test_bundles import BUNDLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.run.record.rundir import RunDir

OVER = 5000.0


@pytest.fixture
def hung() -> Iterator[tuple[RunDir, RunState]]:
    """A run that hangs in its second look."""
    with open_bundle(BUNDLES / "sleep-2.tar.gz") as run:
        yield run, state_reader.load_state_and_attendance(run)[0]


def went_on(state: RunState, *, lost_after: float) -> RunState:
    """The same run, which went on, and whose ranks lost their peers some time after that."""
    state = apply_controller_event(state, OVER, controller_events.StallChanged(attempt=state.attempt, phase="none"))
    at = OVER + lost_after
    cause = failure_causes.Cause(kind="exit", exit_code=1, message="Connection closed by peer", secondary=True)
    told = failure_causes.ExitAnalysis(cause=cause, earliest=at, latest=at)

    def lost(worker: WorkerState) -> WorkerState:
        return replace(worker, exit_analysis=told)

    return replace(state, workers={rank: lost(worker) for rank, worker in state.workers.items()})


def test_a_run_that_hangs_is_judged_by_what_was_seen_in_this_standstill(hung: tuple[RunDir, RunState]) -> None:
    run, state = hung
    name, looks = saved_verdict.read_stall_evidence(run, state)

    assert (name, sorted(looks)) == ("stall-2", ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("lost_after", "name"),
    [pytest.param(2.0, "stall-2", id="at once: they gave up"), pytest.param(3600.0, None, id="an hour later")],
)
def test_what_was_seen_before_a_run_went_on_counts_only_where_its_ranks_give_up_then(
    hung: tuple[RunDir, RunState], lost_after: float, name: str | None
) -> None:
    run, state = hung

    assert saved_verdict.read_stall_evidence(run, went_on(state, lost_after=lost_after))[0] == name


def test_of_a_run_that_goes_on_nothing_that_was_seen_counts(hung: tuple[RunDir, RunState]) -> None:
    run, state = hung
    state = apply_controller_event(state, OVER, controller_events.StallChanged(attempt=state.attempt, phase="none"))

    assert saved_verdict.read_stall_evidence(run, replace(state, workers={}))[0] is None
