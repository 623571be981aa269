"""For whom all others wait since long is said in the live view, once, though nobody calls the run stalled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterctl.cli.follow.event_messages import StragglerMonitor
from clusterctl.cli.verdicts import open_bundle
from clusterctl.run.record.state_reader import load_state_and_attendance
from clusterctl.run.rules.state import RunPhase

KINDS = Path(__file__).parents[1] / "why" / "kinds"
WAITS = KINDS.with_name("bundles") / "saves-0.tar.gz"


def test_whom_the_others_wait_for_is_said_once() -> None:
    with open_bundle(WAITS) as run:
        state, _ = load_state_and_attendance(run)
        waited = StragglerMonitor(run)
        first, *others = waited.describe_new_stragglers(state, 100.0)

        assert first.startswith("slow: rank 0 on ")
        assert ", for which the others wait: it writes " in first
        assert others == [f"hint: `clusterctl stacks {state.run}` shows where every rank is"]
        assert waited.describe_new_stragglers(state, 200.0) == []


def test_it_is_looked_for_every_ten_seconds_at_most_and_only_while_the_run_is_said_to_be_well() -> None:
    with open_bundle(WAITS) as run:
        state, _ = load_state_and_attendance(run)
        waited = StragglerMonitor(run)

        assert waited.describe_new_stragglers(replace(state, phase=RunPhase.STALLED), 95.0) == []
        assert waited.describe_new_stragglers(replace(state, attempt=state.attempt + 1), 100.0) == []
        assert waited.describe_new_stragglers(state, 109.0) == []
        assert waited.describe_new_stragglers(state, 110.0) != []


def test_where_the_first_node_has_told_nothing_there_is_nothing_to_say(tmp_path: Path) -> None:
    with open_bundle(WAITS) as run:
        state, _ = load_state_and_attendance(run)
        elsewhere = replace(run, path=tmp_path)

        assert StragglerMonitor(elsewhere).describe_new_stragglers(state, 100.0) == []
