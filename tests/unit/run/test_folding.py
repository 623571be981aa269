"""What folding the journals of a run costs, and what is to blame whatever the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState
from clusterctl.run.rules.state_updates import StateBuilder, apply_controller_event, apply_node_event
from tests.work import calls, work

TAIL = (
    'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nImportError: no module {}\n' + "x\n" * 200
)


def begun(ranks: int) -> RunState:
    layout = [{"node": f"n{i}", "node_rank": i, "ranks": [i]} for i in range(ranks)]
    attempt = controller_events.AttemptStarted(
        attempt=0, world_size=ranks, master_addr=None, master_port=None, nodes=layout
    )
    state = apply_controller_event(RunState(), 1.0, attempt)
    for rank in range(ranks):
        state = apply_controller_event(
            state, 1.0, controller_events.ClockEstimated(node=f"n{rank}", offset=0.0, error=0.0)
        )
    return state


def exited(state: RunState, rank: int, at: float, **how: object) -> RunState:
    event = node_events.Exited(attempt=0, rank=rank, earliest=at, latest=at, **how)  # type: ignore[arg-type]
    return apply_node_event(state, f"n{rank}", node_events.Stamp(state.nodes[f"n{rank}"].seq + 1, at, at, "b"), event)


def fold_failures(ranks: int) -> None:
    state = begun(ranks)
    for rank in range(ranks):
        state = exited(state, rank, 2.0 + rank, exit_code=1, tail=TAIL.format(rank))
    assert state.cause is not None
    assert (state.cause.rank, len(state.causes)) == (0, ranks)


def test_the_work_for_failures_grows_as_their_number() -> None:
    assert work(lambda: fold_failures(400), 2) < 8 * work(lambda: fold_failures(100), 2)


def test_what_ends_say_is_read_once_and_not_again_for_each_that_follows() -> None:
    assert calls(lambda: fold_failures(400)) < 4.5 * calls(lambda: fold_failures(100))


LOST = controller_events.LinkChanged(node="n1", link="lost", why="no answer for 120 s")


@pytest.mark.parametrize("lost_first", [True, False], ids=["the node is lost first", "the end is told first"])
def test_an_end_that_nobody_saw_is_the_fault_of_the_node_that_went_down(lost_first: bool) -> None:
    state = begun(2)
    for step in (0, 1) if lost_first else (1, 0):
        state = apply_controller_event(state, 3.0, LOST) if step == 0 else exited(state, 1, 2.0)

    assert state.cause is not None
    assert (state.cause.kind, state.cause.node, state.cause.rank) == ("node_lost", "n1", 1)


@pytest.mark.parametrize("lost_first", [True, False])
def test_a_rank_that_failed_goes_before_a_node_that_was_lost(lost_first: bool) -> None:
    state = begun(2)
    for step in (0, 1) if lost_first else (1, 0):
        state = apply_controller_event(state, 3.0, LOST) if step == 0 else exited(state, 0, 2.0, exit_code=3)

    assert state.cause is not None
    assert (state.cause.kind, state.cause.rank) == ("exit", 0)


def test_ranks_that_we_stopped_are_to_blame_for_nothing() -> None:
    decided = controller_events.AttemptEndDecided(attempt=0, reason=StopReason.PEER_FAILED.value)
    state = exited(apply_controller_event(begun(2), 1.0, decided), 0, 2.0, signal=15, stopped=True)

    assert state.causes == ()
    assert [c.kind for c in exited(state, 1, 1.5, exit_code=0).causes] == ["exited_early"]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(
                [
                    lambda rank: node_events.Prepared(0, [1]),
                    lambda rank: node_events.Started(0, rank, 0, 7, 8),
                    lambda rank: node_events.Exited(0, rank, 1, tail="t"),
                    lambda rank: node_events.Stopping(0, "cancelled", 1.0, []),
                    lambda rank: node_events.Swept(0, 0, []),
                    lambda rank: node_events.Started(1, rank, 0, 7, 8),
                ]
            ),
        ),
        max_size=20,
    )
)
def test_many_events_lead_where_they_lead_one_by_one_and_change_no_state_that_was_there(
    told: list[tuple[int, Callable[[int], node_events.Event]]],
) -> None:
    first = begun(2)
    before = repr(first)
    one_by_one, together = first, StateBuilder(first)
    for seq, (rank, make) in enumerate(told):
        stamp, event = node_events.Stamp(seq, 0.0, 0.0, "b"), make(rank)
        one_by_one = apply_node_event(one_by_one, f"n{rank}", stamp, event)
        together.add_node_event(f"n{rank}", stamp, event)
        assert repr(together.state.phase) == repr(one_by_one.phase)
    assert together.build() == one_by_one
    assert repr(first) == before


@given(
    st.lists(
        st.sampled_from(
            [
                controller_events.LinkChanged(node="n0", link="unreachable"),
                controller_events.LinkChanged(node="n1", link="lost", why="no answer"),
                controller_events.ClockEstimated(node="n1", offset=1.0, error=0.1),
                controller_events.AttemptEndDecided(attempt=0, reason="cancelled"),
                controller_events.AttemptStarted(
                    attempt=1,
                    world_size=1,
                    master_addr=None,
                    master_port=None,
                    nodes=[{"node": "n1", "node_rank": 0, "ranks": [0]}],
                ),
                node_events.Started(0, 1, 0, 7, 8),
                node_events.Started(1, 0, 0, 7, 8),
                node_events.Exited(1, 0, 1, tail="t"),
            ]
        ),
        max_size=20,
    )
)
def test_events_of_the_controller_among_them_lead_there_too(
    told: list[Any],
) -> None:
    first = begun(2)
    before = repr(first)
    one_by_one, together = first, StateBuilder(first)
    for seq, event in enumerate(told):
        if isinstance(event, (node_events.Started, node_events.Exited)):
            stamp = node_events.Stamp(seq, 0.0, 0.0, "b")
            one_by_one = apply_node_event(one_by_one, "n1", stamp, event)
            together.add_node_event("n1", stamp, event)
        else:
            one_by_one = apply_controller_event(one_by_one, float(seq), event)
            together.add_controller_event(float(seq), event)
        assert together.build() == one_by_one
    assert repr(first) == before


def test_what_a_fold_has_taken_in_counts_before_the_controllers_next_word_too() -> None:
    stamp = node_events.Stamp(3, 2.0, 2.0, "b")
    started = node_events.Started(attempt=0, rank=1, local_rank=0, pid=7, start_time=9)
    again = controller_events.AttemptStarted(
        attempt=1,
        world_size=1,
        master_addr=None,
        master_port=None,
        nodes=[{"node": "n1", "node_rank": 0, "ranks": [0]}],
    )
    folding = StateBuilder(begun(2))
    folding.add_node_event("n1", stamp, started)
    folding.add_node_event("n1", stamp, node_events.Stopping(attempt=0, reason="cancelled", grace=1.0))
    folding.add_controller_event(3.0, again)

    assert folding.build() == apply_controller_event(apply_node_event(begun(2), "n1", stamp, started), 3.0, again)
    assert folding.build().nodes["n1"].seq == 3
