"""What follows from lost, rebooted and silent nodes, and from ranks that ended well too early: the deciding part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.spec import RestartSpec
from clusterctl.errors import ExitCode
from clusterctl.run.rules import controller_events, next_action, outcome
from clusterctl.run.rules.state import NodePhase, RunPhase, RunState
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event

NOW = 1000.0
LIMITS = next_action.RunLimits(node_lost_after=60.0, finish_grace=5.0)


def running() -> RunState:
    layout = [{"node": f"n{i}", "node_rank": i, "ranks": [i]} for i in (0, 1)]
    attempt = controller_events.AttemptStarted(
        attempt=0, world_size=2, master_addr=None, master_port=None, nodes=layout
    )
    state = apply_controller_event(
        apply_controller_event(RunState(), NOW, controller_events.RunCreated(run="r-1", name="r", path="/c.yaml")),
        NOW,
        attempt,
    )
    for rank in (0, 1):
        state = journal(state, rank, node_events.Started(attempt=0, rank=rank, local_rank=0, pid=7, start_time=1))
    return state


def journal(state: RunState, rank: int, event: node_events.Event) -> RunState:
    node = f"n{rank}"
    stamp = node_events.Stamp(seq=state.nodes[node].seq + 1, wall=NOW, mono=NOW, boot="b")
    return apply_node_event(state, node, stamp, event)


def exited(state: RunState, rank: int, code: int | None = 0, *, stopped: bool = False) -> RunState:
    event = node_events.Exited(attempt=0, rank=rank, exit_code=code, earliest=1, latest=1, stopped=stopped)
    return journal(state, rank, event)


DECIDED = controller_events.AttemptEndDecided(
    attempt=0, reason=StopReason.PEER_FAILED.value, message="others stand still"
)


def test_a_rank_that_ended_well_too_early_is_the_cause_whatever_journal_is_read_first() -> None:
    as_it_happened = exited(apply_controller_event(exited(running(), 1), NOW, DECIDED), 0, None, stopped=True)
    heads_first = exited(exited(apply_controller_event(running(), NOW, DECIDED), 1), 0, None, stopped=True)

    for state in (as_it_happened, heads_first):
        assert state.cause is not None
        assert (state.cause.kind, state.cause.rank) == ("exited_early", 1)


def test_a_rank_that_failed_is_the_cause_although_another_ended_well_before() -> None:
    state = exited(apply_controller_event(exited(running(), 1), NOW, DECIDED), 0, 3)

    assert state.cause is not None
    assert (state.cause.kind, state.cause.rank) == ("exit", 0)


def test_a_rank_that_ends_well_is_no_fault_while_others_are_at_work() -> None:
    state = exited(running(), 1)

    assert next_action.decide_action(state, LIMITS, next_action.RunObservations(silent_s={}, idle_s=4.9), NOW) is None
    assert isinstance(
        next_action.decide_action(state, LIMITS, next_action.RunObservations(silent_s={}, idle_s=5.0), NOW),
        next_action.EndAttempt,
    )


def test_a_rebooted_node_is_lost_and_nothing_can_be_left_on_it() -> None:
    link = controller_events.LinkChanged(node="n1", link="lost", why="it was rebooted", rebooted=True)
    state = exited(apply_controller_event(running(), NOW, link), 1, None)

    assert state.cause is not None
    assert (state.cause.kind, state.cause.node, state.cause.message) == (
        "node_lost",
        "n1",
        "node lost: it was rebooted",
    )
    assert state.find_node_phase("n1") is NodePhase.LOST
    state = journal(
        apply_controller_event(state, NOW, replace(DECIDED, reason="node_lost")), 0, node_events.Swept(attempt=0)
    )
    end = next_action.decide_action(state, LIMITS, next_action.RunObservations(silent_s={}), NOW)
    assert end == next_action.Finish(phase=RunPhase.LOST, exit_code=int(ExitCode.LOST), remaining=())


@pytest.mark.parametrize(
    ("cancelled", "given_up"),
    [
        pytest.param(False, False, id="nobody asked: it is our own link, and it waits"),
        pytest.param(True, True, id="a person wants the end"),
    ],
)
def test_when_all_nodes_are_silent_they_are_given_up_only_if_a_person_wants_the_end(
    cancelled: bool, given_up: bool
) -> None:
    sight = next_action.RunObservations(silent_s={"n0": 61.0, "n1": 61.0}, cancelled=cancelled)

    assert isinstance(next_action.decide_action(running(), LIMITS, sight, NOW), next_action.GiveUpNode) is given_up


def test_a_fence_counts_from_what_was_sent_last_and_not_from_what_was_heard_last() -> None:
    limits = replace(LIMITS, stop_after=5.0, grace=1.0)
    state = apply_controller_event(
        running(), NOW, controller_events.LinkChanged(node="n1", link="lost", why="no answer")
    )
    state = journal(
        apply_controller_event(state, NOW, replace(DECIDED, reason="node_lost")), 0, node_events.Swept(attempt=0)
    )

    heard = next_action.RunObservations(silent_s={"n1": 100.0}, unreachable_s={"n1": 15.9})
    assert next_action.decide_action(state, limits, heard, NOW) is None
    assert isinstance(
        next_action.decide_action(state, limits, replace(heard, unreachable_s={"n1": 16.0}), NOW), next_action.Finish
    )


def stopping(node: str = "n1") -> RunState:
    """Two nodes that were told to stop, of which `node` never says that it has."""
    other = {"n0": 1, "n1": 0}[node]
    state = apply_controller_event(running(), NOW, replace(DECIDED, reason="cancelled"))
    return journal(exited(state, other, None, stopped=True), other, node_events.Swept(attempt=0))


MARGIN = next_action.STOP_MARGIN_S
WHY = "its node has not reported its end"


@pytest.mark.parametrize(
    ("sight", "ends"),
    [
        pytest.param(
            next_action.RunObservations(silent_s={}, stopping_s={"n1": 1.0 + MARGIN - 0.1}), False, id="it still may"
        ),
        pytest.param(
            next_action.RunObservations(silent_s={}, stopping_s={"n1": 1.0 + MARGIN}),
            True,
            id="grace and margin are over",
        ),
        pytest.param(
            next_action.RunObservations(silent_s={}, stopping_s={"n0": 1e6}), False, id="another one was told long ago"
        ),
        pytest.param(
            next_action.RunObservations(silent_s={}, kill_wait_s=MARGIN - 0.1), False, id="killed, and it still may"
        ),
        pytest.param(
            next_action.RunObservations(silent_s={}, kill_wait_s=MARGIN), True, id="killed, whenever it was told"
        ),
    ],
)
def test_a_node_that_answers_and_never_says_that_all_has_ended_is_named_and_not_waited_for(
    sight: next_action.RunObservations, ends: bool
) -> None:
    limits = replace(LIMITS, grace=1.0)

    finish = next_action.decide_action(stopping(), limits, sight, NOW)

    entry = {"node": "n1", "pid": 7, "start_time": 1, "command": None, "why": WHY}
    wanted = next_action.Finish(phase=RunPhase.CANCELLED, exit_code=int(ExitCode.CANCELLED), remaining=(entry,))
    assert finish == (wanted if ends else None)


def test_what_a_node_was_told_of_an_earlier_attempt_ends_no_later_one() -> None:
    state = journal(exited(running(), 0), 0, node_events.Swept(attempt=0))

    assert (
        next_action.decide_action(state, LIMITS, next_action.RunObservations(silent_s={}, stopping_s={"n1": 1e6}), NOW)
        is None
    )


def test_a_node_none_of_whose_workers_is_known_is_named_too() -> None:
    state = journal(exited(stopping(), 1, None, stopped=True), 1, node_events.RunAdopted(0, 5))

    finish = next_action.decide_action(state, LIMITS, next_action.RunObservations(silent_s={}, kill_wait_s=MARGIN), NOW)

    assert isinstance(finish, next_action.Finish)
    assert [(entry["node"], entry["pid"], entry["why"]) for entry in finish.remaining] == [("n1", None, WHY)]


def test_no_attempt_follows_where_a_node_does_not_say_that_all_has_ended() -> None:
    failed = apply_controller_event(exited(running(), 0, 3), NOW, DECIDED)
    state = journal(failed, 0, node_events.Swept(attempt=0))
    limits = replace(LIMITS, restart=RestartSpec(max_restarts=1), stop_after=5.0)

    finish = next_action.decide_action(
        state, limits, next_action.RunObservations(silent_s={}, stopping_s={"n1": 1e6}, spare_count=1), NOW
    )

    assert isinstance(finish, next_action.Finish)
    assert finish.why_no_restart == "n1 has not reported that all processes have ended"


@pytest.mark.parametrize(
    ("killed", "given_up"), [pytest.param(MARGIN - 0.1, False, id="not yet"), pytest.param(MARGIN, True, id="now")]
)
def test_a_person_who_wants_the_end_at_once_does_not_wait_for_nodes_that_are_silent(
    killed: float, given_up: bool
) -> None:
    sight = next_action.RunObservations(silent_s={"n1": 20.0}, kill_wait_s=killed, cancelled=True)

    action = next_action.decide_action(stopping(), LIMITS, sight, NOW)

    assert isinstance(action, next_action.GiveUpNode) is given_up


def test_nobody_waits_for_the_fence_of_a_lost_node_after_which_nothing_is_to_begin() -> None:
    limits = replace(LIMITS, stop_after=600.0)
    state = apply_controller_event(
        stopping(), NOW, controller_events.LinkChanged(node="n1", link="lost", why="no answer")
    )
    sight = next_action.RunObservations(silent_s={"n1": 60.0}, unreachable_s={"n1": 1.0})

    assert next_action.decide_action(state, limits, sight, NOW) is None
    finish = next_action.decide_action(state, limits, replace(sight, cancelled=True), NOW)
    assert isinstance(finish, next_action.Finish)
    assert [entry["why"] for entry in finish.remaining] == ["node lost"]


def test_a_lost_node_none_of_whose_workers_is_known_is_named_as_one_of_which_nobody_knows() -> None:
    layout = [{"node": "n0", "node_rank": 0, "ranks": [0]}]
    begun = controller_events.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=layout)
    state = apply_controller_event(RunState(), NOW, begun)
    state = apply_controller_event(state, NOW, controller_events.LinkChanged(node="n0", link="lost", why="no answer"))

    assert [(left["node"], left["pid"], left["why"]) for left in outcome.list_remaining_processes(state)] == [
        ("n0", None, "node lost")
    ]
    rebooted = apply_controller_event(
        state, NOW, controller_events.LinkChanged(node="n0", link="lost", why="it was rebooted", rebooted=True)
    )
    assert outcome.list_remaining_processes(rebooted) == ()


def test_a_person_who_ends_a_run_between_two_attempts_is_told_what_could_not_be_ended_before() -> None:
    state = journal(running(), 0, node_events.Swept(attempt=0, remaining=[{"pid": 7, "why": "state D"}]))

    end = next_action.finish_cancelled(state)

    assert (end.phase, end.exit_code) == (RunPhase.CANCELLED, 103)
    assert end.remaining == ({"node": "n0", "pid": 7, "why": "state D"},)
