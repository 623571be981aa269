"""State as a fold over journals, and the decisions made from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.field_types import StallAction
from clusterctl.config.spec import RestartSpec
from clusterctl.run.rules import controller_events, next_action, outcome
from clusterctl.run.rules.state import RunPhase, RunState, WorkerPhase
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event

NOW = 1000.0
NOTHING = next_action.RunObservations(silent_s={})


def begun(nodes: int = 2, per_node: int = 2, attempt: int = 0) -> RunState:
    layout = [
        {
            "node": f"n{i}",
            "node_rank": i,
            "address": f"10.0.0.{i}",
            "ranks": list(range(i * per_node, (i + 1) * per_node)),
        }
        for i in range(nodes)
    ]
    state = apply_controller_event(RunState(), NOW, controller_events.RunCreated(run="r-1", name="r", path="/w/c.yaml"))
    return apply_controller_event(
        state,
        NOW,
        controller_events.AttemptStarted(
            attempt=attempt, world_size=nodes * per_node, master_addr="10.0.0.0", master_port=1, nodes=layout
        ),
    )


def journal(state: RunState, node: str, *written: node_events.Event) -> RunState:
    for event in written:
        seq = state.nodes[node].seq + 1
        state = apply_node_event(state, node, node_events.Stamp(seq=seq, wall=NOW, mono=NOW, boot="b"), event)
    return state


def running(nodes: int = 2, per_node: int = 2, attempt: int = 0) -> RunState:
    state = begun(nodes, per_node, attempt)
    for name, node in state.nodes.items():
        started = [
            node_events.Started(attempt=attempt, rank=r, local_rank=i, pid=100 + r, start_time=1)
            for i, r in enumerate(node.ranks)
        ]
        state = journal(state, name, *started)
    return state


def exited(state: RunState, rank: int, code: int | None = 0, **more: object) -> RunState:
    node = state.workers[rank].node
    return journal(
        state, node, node_events.Exited(attempt=state.attempt, rank=rank, exit_code=code, earliest=1, latest=1, **more)
    )  # type: ignore[arg-type]


def swept(state: RunState, *nodes: str, remaining: list[dict[str, object]] | None = None) -> RunState:
    for node in nodes:
        state = journal(state, node, node_events.Swept(attempt=state.attempt, remaining=remaining or []))
    return state


def stopped(state: RunState) -> RunState:
    for rank, worker in state.workers.items():
        if worker.phase is WorkerPhase.RUNNING:
            state = exited(state, rank, None, signal=15, stopped=True)
    return swept(state, *state.nodes)


def test_a_run_is_running_once_every_rank_has_started() -> None:
    assert begun().phase is RunPhase.STARTING
    assert running().phase is RunPhase.RUNNING


@given(st.integers(0, 30))
def test_events_that_were_seen_before_change_nothing(upto: int) -> None:
    state = running()

    again = apply_node_event(
        state,
        "n0",
        node_events.Stamp(seq=min(upto, state.nodes["n0"].seq), wall=0, mono=0, boot="b"),
        node_events.Swept(attempt=0),
    )

    assert again is state


def test_events_of_an_earlier_attempt_only_move_the_cursor() -> None:
    state = running(attempt=1)

    later = journal(state, "n0", node_events.Exited(attempt=0, rank=0, exit_code=3))

    assert later.workers == state.workers
    assert later.nodes["n0"].seq == state.nodes["n0"].seq + 1


def test_a_rank_that_we_stopped_did_not_fail() -> None:
    assert not exited(running(), 0, None, signal=15, stopped=True).workers[0].failed


DONE = swept(exited(exited(exited(exited(running(), 0), 1), 2), 3), "n0", "n1")
ONE_FAILED = exited(running(), 2, 3, tail="boom")


@pytest.mark.parametrize(
    ("state", "limits", "sight", "expected"),
    [
        pytest.param(running(), next_action.RunLimits(), NOTHING, None, id="nothing to do while all goes well"),
        pytest.param(
            ONE_FAILED,
            next_action.RunLimits(),
            NOTHING,
            next_action.EndAttempt(reason=StopReason.PEER_FAILED),
            id="one fails, all stop",
        ),
        pytest.param(
            DONE,
            next_action.RunLimits(),
            NOTHING,
            next_action.Finish(phase=RunPhase.SUCCEEDED, exit_code=0),
            id="all done and swept",
        ),
        pytest.param(
            swept(DONE, "n0"),
            next_action.RunLimits(),
            NOTHING,
            next_action.Finish(phase=RunPhase.SUCCEEDED, exit_code=0),
            id="swept twice",
        ),
        pytest.param(
            exited(running(), 0), next_action.RunLimits(), NOTHING, None, id="one ends well, the others work on"
        ),
        pytest.param(
            exited(running(), 0),
            next_action.RunLimits(finish_grace=60),
            replace(NOTHING, idle_s=61.0),
            next_action.EndAttempt(
                reason=StopReason.PEER_FAILED, message="a rank ended early and the other ranks make no progress"
            ),
            id="one ends well, the others stand still",
        ),
        pytest.param(
            running(),
            next_action.RunLimits(finish_grace=60),
            replace(NOTHING, idle_s=1e6),
            None,
            id="all are there and quiet: nobody is left alone",
        ),
        pytest.param(
            running(),
            next_action.RunLimits(),
            replace(NOTHING, cancelled=True),
            next_action.EndAttempt(reason=StopReason.CANCELLED),
            id="cancelled",
        ),
        pytest.param(
            running(),
            next_action.RunLimits(),
            replace(NOTHING, silent_s={"n1": 119.0}),
            None,
            id="silent, but not for long enough",
        ),
        pytest.param(
            running(),
            next_action.RunLimits(),
            replace(NOTHING, silent_s={"n1": 120.0}),
            next_action.GiveUpNode(node="n1", why="no answer for 120 s"),
            id="silent for too long while another answers",
        ),
        pytest.param(
            running(),
            next_action.RunLimits(),
            replace(NOTHING, silent_s={"n0": 999.0, "n1": 999.0}),
            None,
            id="all silent: it is the head's own link",
        ),
    ],
)
def test_decide(
    state: RunState,
    limits: next_action.RunLimits,
    sight: next_action.RunObservations,
    expected: next_action.Action | None,
) -> None:
    assert next_action.decide_action(state, limits, sight, NOW) == expected


def test_the_time_limit_counts_from_the_start_of_the_run() -> None:
    limits = next_action.RunLimits(max_duration=60)

    assert next_action.decide_action(running(), limits, NOTHING, NOW + 59.9) is None
    end = next_action.decide_action(running(), limits, NOTHING, NOW + 60)

    assert isinstance(end, next_action.EndAttempt)
    assert end.reason is StopReason.TIME_LIMIT


def test_idle_gpus_end_the_attempt_only_if_the_user_wants_it_and_no_other_attempt_follows() -> None:
    limits = next_action.RunLimits(max_gpu_idle_s=1800, restart=RestartSpec(max_restarts=3))
    idle, busy = replace(NOTHING, gpu_idle_s=1800.0), replace(NOTHING, gpu_idle_s=1799.0)

    assert next_action.decide_action(running(), next_action.RunLimits(), idle, NOW) is None
    assert next_action.decide_action(running(), limits, busy, NOW) is None
    assert next_action.decide_action(running(), limits, idle, NOW) == next_action.EndAttempt(
        reason=StopReason.IDLE, message="no GPU has done anything for 30 min (idle.after 30 min)"
    )
    assert next_action.decide_action(ended(running(), StopReason.IDLE), limits, idle, NOW) == next_action.Finish(
        phase=RunPhase.FAILED, exit_code=107
    )


def ended(state: RunState, reason: StopReason) -> RunState:
    return stopped(
        apply_controller_event(
            state, NOW, controller_events.AttemptEndDecided(attempt=state.attempt, reason=reason.value)
        )
    )


def test_a_lost_node_ends_the_attempt_and_is_named() -> None:
    assert next_action.decide_action(
        lost(running(), "n1"), next_action.RunLimits(), NOTHING, NOW
    ) == next_action.EndAttempt(reason=StopReason.NODE_LOST, message="n1 is lost")


def test_a_stranger_at_a_port_of_the_workers_ends_the_attempt_and_is_named() -> None:
    state = journal(
        running(), "n1", node_events.Alarm(attempt=0, code=node_events.PORT_TAKEN, message="pid 7 is on 29500")
    )

    assert next_action.decide_action(state, next_action.RunLimits(), NOTHING, NOW) == next_action.EndAttempt(
        reason=StopReason.PORT_TAKEN, message="n1: pid 7 is on 29500"
    )


def test_a_node_that_stopped_for_want_of_a_controller_ends_the_attempt_and_is_named() -> None:
    state = journal(running(), "n1", node_events.Stopping(attempt=0, reason=StopReason.FENCE.value, grace=30.0))

    assert next_action.decide_action(state, next_action.RunLimits(), NOTHING, NOW) == next_action.EndAttempt(
        reason=StopReason.FENCE, message="n1 had no contact with a controller and stopped its workers"
    )


@pytest.mark.parametrize("reason", [StopReason.STALLED, StopReason.TIME_LIMIT, StopReason.IDLE, StopReason.UNHEALTHY])
def test_where_no_rank_failed_the_rule_that_ended_the_run_is_its_cause(reason: StopReason) -> None:
    decided = controller_events.AttemptEndDecided(attempt=0, reason=reason.value, message="why")

    by_rule = outcome.find_final_cause(stopped(apply_controller_event(running(), NOW, decided)))
    by_rank = outcome.find_final_cause(apply_controller_event(exited(running(), 1, 3), NOW, decided))

    assert by_rule is not None
    assert (by_rule.kind, by_rule.message, by_rule.rank) == (reason.value, "why", None)
    assert by_rank is not None
    assert (by_rank.kind, by_rank.rank) == ("exit", 1)


@pytest.mark.parametrize(
    ("reason", "phase", "code"),
    [
        pytest.param(StopReason.PEER_FAILED, RunPhase.FAILED, 100, id="a worker failed"),
        pytest.param(StopReason.CANCELLED, RunPhase.CANCELLED, 103, id="a person ended it"),
        pytest.param(StopReason.STALLED, RunPhase.FAILED, 104, id="stalled"),
        pytest.param(StopReason.TIME_LIMIT, RunPhase.FAILED, 106, id="time limit"),
        pytest.param(StopReason.IDLE, RunPhase.FAILED, 107, id="idle GPUs"),
        pytest.param(StopReason.UNHEALTHY, RunPhase.FAILED, 5, id="a sick node"),
        pytest.param(StopReason.NODE_LOST, RunPhase.LOST, 105, id="node lost"),
    ],
)
def test_the_end_of_a_run_by_its_reason(reason: StopReason, phase: RunPhase, code: int) -> None:
    assert next_action.decide_action(
        ended(ONE_FAILED, reason), next_action.RunLimits(), NOTHING, NOW
    ) == next_action.Finish(phase=phase, exit_code=code)


def heeding(state: RunState) -> RunState:
    """All ranks save and exit with 0 because they were told to stop."""
    for rank in state.workers:
        state = exited(state, rank, 0, stopped=True)
    return swept(state, *state.nodes)


@pytest.mark.parametrize("reason", [StopReason.PEER_FAILED, StopReason.FENCE])
def test_ranks_that_exit_with_0_because_they_were_stopped_have_not_succeeded(reason: StopReason) -> None:
    state = heeding(
        apply_controller_event(running(), NOW, controller_events.AttemptEndDecided(attempt=0, reason=reason.value))
    )

    assert next_action.decide_action(state, next_action.RunLimits(), NOTHING, NOW) == next_action.Finish(
        phase=RunPhase.FAILED, exit_code=100
    )
    again = next_action.decide_action(state, next_action.RunLimits(restart=RestartSpec(max_restarts=1)), NOTHING, NOW)
    assert isinstance(again, next_action.Restart)


def test_an_unknown_exit_makes_the_run_lost() -> None:
    state = swept(exited(ended(running(1, 1), StopReason.PEER_FAILED), 0, None), "n0")
    unseen = apply_controller_event(
        exited(running(1, 1), 0, None), NOW, controller_events.AttemptEndDecided(attempt=0, reason="peer_failed")
    )

    finish = next_action.decide_action(swept(unseen, "n0"), next_action.RunLimits(), NOTHING, NOW)

    assert state.attempt == 0
    assert finish == next_action.Finish(phase=RunPhase.LOST, exit_code=105)


def test_nothing_new_starts_before_every_node_has_swept() -> None:
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=1))
    half = apply_controller_event(ONE_FAILED, NOW, controller_events.AttemptEndDecided(attempt=0, reason="peer_failed"))

    assert next_action.decide_action(swept(half, "n0"), limits, NOTHING, NOW) is None


@pytest.mark.parametrize(
    ("rules", "sight", "restarts"),
    [
        pytest.param(RestartSpec(max_restarts=1), NOTHING, True, id="budget left"),
        pytest.param(RestartSpec(), NOTHING, False, id="no budget"),
        pytest.param(RestartSpec(max_restarts=1, on=("stall",)), NOTHING, False, id="not for a crash"),
        pytest.param(RestartSpec(max_restarts=1, never_codes=(3,)), NOTHING, False, id="never for this code"),
        pytest.param(
            RestartSpec(max_restarts=9), replace(NOTHING, repeated_failures=2), False, id="attempts fail alike"
        ),
    ],
)
def test_a_crash_restarts(rules: RestartSpec, sight: next_action.RunObservations, restarts: bool) -> None:
    action = next_action.decide_action(
        ended(ONE_FAILED, StopReason.PEER_FAILED), next_action.RunLimits(restart=rules), sight, NOW
    )

    assert isinstance(action, next_action.Restart) is restarts


@pytest.mark.parametrize(("code", "spared"), [(2, True), (3, False)])
def test_who_ended_alike_by_a_mistake_of_usage_is_told_what_spares_the_restarts(code: int, spared: bool) -> None:
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=9))
    state = ended(exited(running(), 2, code), StopReason.PEER_FAILED)

    finish = next_action.decide_action(state, limits, replace(NOTHING, repeated_failures=2), NOW)

    assert isinstance(finish, next_action.Finish)
    assert finish.why_no_restart.startswith("3 attempts failed alike")
    assert ("`restart.never_codes: [2]`" in finish.why_no_restart) is spared


@given(st.integers(0, 6))
def test_the_pause_doubles_up_to_its_limit(attempt: int) -> None:
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=99, backoff=10, backoff_max=60))
    state = ended(exited(running(attempt=attempt), 2, 3), StopReason.PEER_FAILED)

    action = next_action.decide_action(state, limits, NOTHING, NOW)

    assert isinstance(action, next_action.Restart)
    assert action.at == NOW + min(10 * 2**attempt, 60)


def lost(state: RunState, node: str) -> RunState:
    return apply_controller_event(state, NOW, controller_events.LinkChanged(node=node, link="lost", why="gone"))


def test_a_lost_node_without_a_fence_ends_the_run_and_is_not_replaced() -> None:
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=1))
    state = swept(
        apply_controller_event(
            lost(running(), "n1"), NOW, controller_events.AttemptEndDecided(attempt=0, reason="node_lost")
        ),
        "n0",
    )

    finish = next_action.decide_action(state, limits, replace(NOTHING, silent_s={"n1": 130.0}, spare_count=1), NOW)

    assert isinstance(finish, next_action.Finish)
    assert (finish.exit_code, {r["node"] for r in finish.remaining}) == (105, {"n1"})


@pytest.mark.parametrize(
    ("silent", "acts"), [pytest.param(39.9, False, id="before"), pytest.param(40.0, True, id="after")]
)
def test_a_fenced_node_is_replaced_only_after_its_fence(silent: float, acts: bool) -> None:
    limits = next_action.RunLimits(grace=10, stop_after=20, restart=RestartSpec(max_restarts=1), node_lost_after=5)
    state = swept(
        apply_controller_event(
            lost(running(), "n1"), NOW, controller_events.AttemptEndDecided(attempt=0, reason="node_lost")
        ),
        "n0",
    )

    seen = replace(NOTHING, silent_s={"n1": silent + 16.0}, unreachable_s={"n1": silent}, spare_count=1)
    action = next_action.decide_action(state, limits, seen, NOW)

    assert (isinstance(action, next_action.Restart) and action.excluded == ("n1",)) is acts


def test_a_stall_is_only_reported_unless_asked_otherwise() -> None:
    state = apply_controller_event(
        running(), NOW, controller_events.StallChanged(attempt=0, phase="confirmed", since_s=70, limit_s=60)
    )

    assert state.phase is RunPhase.STALLED
    assert next_action.decide_action(state, next_action.RunLimits(), NOTHING, NOW) is None
    stopping = next_action.RunLimits(stall_action=StallAction.STOP)
    assert next_action.decide_action(state, stopping, NOTHING, NOW) == next_action.EndAttempt(
        reason=StopReason.STALLED, message="no progress for 70 s (limit 60 s)"
    )
    gathering = replace(NOTHING, is_evidence_pending=True)
    assert next_action.decide_action(state, stopping, gathering, NOW) is None
    assert next_action.decide_action(state, next_action.RunLimits().with_stop_on_stall(), NOTHING, NOW) is not None


def test_the_reason_that_is_kept_tells_for_how_long_nothing_had_moved_when_the_run_was_ended() -> None:
    state = apply_controller_event(
        running(), NOW, controller_events.StallChanged(attempt=0, phase="confirmed", since_s=38, limit_s=20)
    )
    ended = next_action.decide_action(state, next_action.RunLimits().with_stop_on_stall(), NOTHING, NOW + 29)

    assert isinstance(ended, next_action.EndAttempt)
    assert ended.message == "no progress for 67 s (limit 20 s)"


def test_nodes_that_heard_no_controller_are_what_ended_an_attempt() -> None:
    heard_none = controller_events.AttemptEndDecided(
        attempt=0, reason="fence", message="n1 had no contact with a controller and stopped its workers"
    )
    cause = outcome.find_final_cause(apply_controller_event(running(), NOW, heard_none))

    assert cause is not None
    assert (cause.kind, cause.message) == ("fence", "n1 had no contact with a controller and stopped its workers")


def test_progress_brings_a_stalled_run_back() -> None:
    state = apply_controller_event(running(), NOW, controller_events.StallChanged(attempt=0, phase="confirmed"))

    assert (
        apply_controller_event(state, NOW, controller_events.StallChanged(attempt=0, phase="none")).phase
        is RunPhase.RUNNING
    )
