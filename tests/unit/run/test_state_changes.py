"""What becomes of a run when nodes are lost, when it stalls, when it ends, and when another attempt begins."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.run.rules import controller_events, outcome
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, cause_to_json
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event
from tests.unit.run.told import (
    BEGUN,
    LAYOUT,
    NOTHING_YET,
    RUNNING,
    attempt,
    attempts_of,
    exited,
    node,
    shown,
    started,
    told,
    worker,
    wrote,
)

# --- lost nodes


def test_with_a_lost_node_its_ranks_that_had_not_ended_are_lost_and_the_lowest_is_named() -> None:
    ended = wrote(RUNNING, "n1", exited(2, exit_code=0))
    state = told(ended, controller_events.LinkChanged(node="n1", link="lost", why="no answer for 61 s"))

    assert [w.phase.value for w in state.workers.values()] == ["running", "running", "exited", "lost"]
    assert shown(state)["cause"] == {
        "kind": "node_lost", "node": "n1", "rank": 3, "exit_code": None, "signal": None,
        "message": "node lost: no answer for 61 s", "traceback": None, "certain": True,
    }  # fmt: skip
    assert state.list_unfinished_nodes() == ["n0", "n1"]
    assert outcome.list_remaining_processes(state) == (
        {"node": "n1", "pid": 73, "start_time": 1003, "command": None, "why": "node lost"},
    )


def test_the_first_of_two_lost_nodes_is_to_blame() -> None:
    state = told(
        RUNNING,
        controller_events.LinkChanged(node="n1", link="lost"),
        controller_events.LinkChanged(node="n0", link="lost", why="gone"),
    )

    assert state.cause is not None
    assert (state.cause.node, state.cause.rank, state.cause.message) == ("n1", 2, "node lost: no answer")


def test_a_node_that_is_lost_after_all_its_ranks_have_ended_is_not_to_blame() -> None:
    ended = wrote(RUNNING, "n1", exited(2, exit_code=0), exited(3, exit_code=0))
    state = told(ended, controller_events.LinkChanged(node="n1", link="lost"))

    assert state.cause is None
    assert state.list_unfinished_nodes() == ["n0"]


def test_a_node_that_only_does_not_answer_keeps_its_ranks_and_says_why() -> None:
    state = told(RUNNING, controller_events.LinkChanged(node="n1", link="unreachable", why="no answer"))

    assert [w.phase.value for w in state.workers.values()] == ["running"] * 4
    assert (state.cause, state.nodes["n1"].link_why) == (None, "no answer")
    again = told(state, controller_events.LinkChanged(node="n1", link="connected"))
    assert (again.nodes["n1"].link, again.nodes["n1"].link_why, again.nodes["n1"].swept) == ("connected", "", False)


# --- a start that failed, an end, a stall


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param({"message": "no route", "node": "n1"}, ("n1", "no route"), id="of a node"),
        pytest.param({"message": "no hosts"}, (None, "no hosts"), id="of all"),
        pytest.param({}, (None, ""), id="without a word"),
    ],
)
def test_a_start_that_failed_is_its_own_cause(error: dict[str, Any], said: tuple[str | None, str]) -> None:
    state = told(BEGUN, controller_events.StartFailed(error=error))

    assert state.error == error
    assert shown(state)["cause"] == {
        "kind": "start_failed", "node": said[0], "rank": None, "exit_code": None, "signal": None, "message": said[1],
        "traceback": None, "certain": True,
    }  # fmt: skip


def test_an_end_is_shown_with_its_code_its_time_and_what_may_be_left() -> None:
    left = {"node": "n1", "pid": 7, "start_time": 1, "command": "x", "why": "state D"}
    state = told(RUNNING, controller_events.RunEnded(state="cancelled", exit_code=103, remaining=[left]), at=500.0)

    assert (state.is_over, state.ended, state.created, RUNNING.ended) == (True, 500.0, 60.0, None)
    assert {key: shown(state)[key] for key in ("state", "exit_code", "remaining")} == {
        "state": "cancelled",
        "exit_code": 103,
        "remaining": [left],
    }


def test_a_run_whose_rest_is_ended_later_has_ended_when_it_did() -> None:
    left = [outcome.build_remaining_process("a", None, outcome.NODE_LOST)]
    ended = apply_controller_event(
        RunState(), 5.0, controller_events.RunEnded(state="cancelled", exit_code=103, remaining=left)
    )

    later = apply_controller_event(ended, 900.0, controller_events.RunEnded(state="cancelled", exit_code=103))

    assert (later.ended, later.remaining) == (5.0, ())


@pytest.mark.parametrize(
    ("phase", "left"), [(RunPhase.STOPPING, [outcome.NODE_LOST]), (RunPhase.RESTARTING, [])], ids=["ends", "restarts"]
)
def test_nothing_is_left_on_a_lost_node_once_another_attempt_may_follow(phase: RunPhase, left: list[str]) -> None:
    node = NodeState(node="a", node_rank=0, link="lost")

    found = outcome.list_remaining_processes(RunState(phase=phase, nodes={"a": node}))

    assert [entry["why"] for entry in found] == left


@pytest.mark.parametrize(
    ("state", "why", "changes"),
    [
        pytest.param("cancelled", outcome.NODE_LOST, True, id="a person ended it, a node was lost"),
        pytest.param("failed", outcome.NODE_LOST, True, id="a rule ended it, a node was lost"),
        pytest.param("lost", outcome.NODE_LOST, False, id="the code says that a node was lost"),
        pytest.param("lost", outcome.OVERDUE, True, id="another node may have something"),
        pytest.param("cancelled", None, False, id="nothing is left"),
    ],
)
def test_the_exit_code_says_that_something_may_still_run(state: str, why: str | None, changes: bool) -> None:
    left = [outcome.build_remaining_process("a", None, why)] if why else []
    ended = apply_controller_event(
        RunState(), 5.0, controller_events.RunEnded(state=state, exit_code=100, remaining=left)
    )

    assert outcome.is_teardown_incomplete(ended) is changes


def test_the_first_decision_to_end_an_attempt_stands_and_one_about_another_attempt_is_none() -> None:
    of_another = told(RUNNING, controller_events.AttemptEndDecided(attempt=1, reason="cancelled"))
    assert of_another is RUNNING

    state = told(RUNNING, controller_events.AttemptEndDecided(attempt=0, reason="time_limit", message="over"))
    later = told(state, controller_events.AttemptEndDecided(attempt=0, reason="cancelled", message="Ctrl-C"))

    assert (state.phase, state.reason, state.reason_text) == (RunPhase.STOPPING, "time_limit", "over")
    assert later is state
    assert shown(state)["cause"] == {
        "kind": "time_limit", "node": None, "rank": None, "exit_code": None, "signal": None, "message": "over",
        "traceback": None, "certain": True,
    }  # fmt: skip


def stall(phase: str, **more: Any) -> controller_events.StallChanged:
    return controller_events.StallChanged(attempt=0, phase=phase, since_s=70.0, limit_s=60.0, reason="no step", **more)


@pytest.mark.parametrize(
    ("before", "phase", "after"),
    [
        pytest.param(RUNNING, "suspected", RunPhase.RUNNING, id="suspected"),
        pytest.param(RUNNING, "confirmed", RunPhase.STALLED, id="confirmed"),
        pytest.param(told(RUNNING, stall("confirmed")), "suspected", RunPhase.RUNNING, id="no longer sure"),
        pytest.param(told(RUNNING, stall("confirmed")), "none", RunPhase.RUNNING, id="over"),
        pytest.param(BEGUN, "confirmed", RunPhase.STARTING, id="while it starts"),
        pytest.param(BEGUN, "none", RunPhase.STARTING, id="none while it starts"),
        pytest.param(
            told(RUNNING, controller_events.AttemptEndDecided(attempt=0, reason="stalled")),
            "none",
            RunPhase.STOPPING,
            id="while it stops",
        ),
    ],
)
def test_what_a_stall_makes_of_a_run(before: RunState, phase: str, after: RunPhase) -> None:
    state = told(before, stall(phase), at=130.0)

    assert state.phase is after
    expected = None if phase == "none" else {"since_s": 70.0, "limit_s": 60.0, "phase": phase, "verdict": None}
    assert shown(state)["stall"] == expected
    if state.stall is not None:
        assert (state.stall.reason, state.stall.at) == ("no step", 130.0)


def test_a_stall_of_an_attempt_that_is_over_is_none() -> None:
    assert told(RUNNING, controller_events.StallChanged(attempt=1, phase="confirmed")) is RUNNING


@pytest.mark.parametrize(
    ("phase", "then"),
    [
        pytest.param("confirmed", RunPhase.STALLED, id="sure"),
        pytest.param("suspected", RunPhase.RUNNING, id="not sure"),
    ],
)
def test_a_run_that_stalls_at_its_start_is_stalled_once_all_ranks_are_there(phase: str, then: RunPhase) -> None:
    state = told(wrote(BEGUN, "n0", started(0), started(1)), stall(phase))

    assert wrote(state, "n1", started(2), started(3)).phase is then


def test_trouble_is_known_until_it_is_over_by_node_gpu_and_kind() -> None:
    def trouble(node: str, gpu: int | None, key: str, status: str = "WARN") -> controller_events.HealthChanged:
        return controller_events.HealthChanged(
            node=node, gpu=gpu, check="c", key=key, status=status, message=f"{node} {gpu} {key}"
        )

    known = [trouble("n0", 1, "a"), trouble("n0", 2, "a"), trouble("n0", 1, "b"), trouble("n1", 1, "a")]
    state = told(RUNNING, *known)
    assert [one["message"] for one in shown(state)["health"]] == ["n0 1 a", "n0 2 a", "n0 1 b", "n1 1 a"]

    state = told(state, trouble("n0", 1, "a", "PASS"), trouble("n0", 2, "a", "FAIL"))
    assert [(one["message"], one["status"]) for one in shown(state)["health"]] == [
        ("n0 1 b", "WARN"),
        ("n1 1 a", "WARN"),
        ("n0 2 a", "FAIL"),
    ]


# --- another attempt

NO_CAUSE = dict.fromkeys(("node", "rank", "exit_code", "signal", "traceback")) | {"certain": False}
SPARE = {"node": "s", "node_rank": 1, "address": None, "ranks": [2, 3]}


def failed_and_waiting() -> RunState:
    state = told(
        RUNNING,
        controller_events.ClockEstimated(node="n0", offset=5.0, error=0.1),
        controller_events.LinkChanged(node="n0", link="connected"),
    )
    state = wrote(
        state, "n0", exited(0, exit_code=1), node_events.Stopping(0, "peer_failed", 1.0), node_events.Swept(0)
    )
    alarm = node_events.Alarm(0, node_events.GPU_MEMORY, "3 GiB still in use")
    state = wrote(state, "n1", alarm, node_events.Swept(0, remaining=[{"pid": 7, "why": "state D"}]))
    return told(
        state,
        stall("suspected"),
        controller_events.AttemptEndDecided(attempt=0, reason="peer_failed", message="why"),
        controller_events.LinkChanged(node="n1", link="lost", why="gone"),
        controller_events.RestartPlanned(
            attempt=1, why="crash", at=140.0, nodes=["n0", "s"], ended="exit 1", newest_checkpoint="step-3"
        ),
    )


def test_a_run_that_waits_for_its_next_attempt_says_when_with_whom_and_why() -> None:
    state = failed_and_waiting()

    assert (state.phase, state.restart_at, state.next_nodes) == (RunPhase.RESTARTING, 140.0, ("n0", "s"))
    assert (state.restart_why, state.failure_signatures) == ("crash", (("exit 1", "step-3"),))
    again = told(state, controller_events.RestartPlanned(attempt=2, why="stall", at=150.0, ended="stalled"))
    assert again.failure_signatures == (("exit 1", "step-3"), ("stalled", None))
    assert (again.next_nodes, again.restart_why) == ((), "stall")
    assert (state.nodes["n1"].gpu_memory_held, state.remaining) == ("3 GiB still in use", ())
    assert state.nodes["n1"].remaining == ({"node": "n1", "pid": 7, "why": "state D"},)


def test_another_attempt_begins_with_a_clean_slate() -> None:
    state = told(failed_and_waiting(), attempt(1, [LAYOUT[0], SPARE], newest_checkpoint="step-4"), at=141.0)

    assert shown(state) == {
        **NOTHING_YET, "run": "r-1", "name": "r", "attempt": 1,
        "nodes": [node(0, "waiting"), {"node": "s", "node_rank": 1, "address": None, "python": None, "image": None, "role": None, "state": "waiting"}],
        "workers": [worker(0), worker(1), worker(2, node="s"), worker(3, node="s")],
    }  # fmt: skip
    assert (state.restart_at, state.restart_why, state.next_nodes) == (None, "", ())
    assert (state.reason, state.reason_text, state.external_cause) == (None, "", None)
    assert (state.newest_checkpoint, state.running_since, state.restarts) == ("step-4", 141.0, (141.0,))
    assert (state.created, state.master_addr, state.master_port) == (60.0, "10.0.0.1", 29500)


def test_every_attempt_keeps_why_it_ended_when_another_follows() -> None:
    why = cause_to_json(Cause(kind="signal", node="n1", rank=3, signal="SIGKILL", message="killed by SIGKILL"))
    over = told(
        RUNNING, controller_events.RestartPlanned(attempt=1, why="crash", at=140.0, cause=why, step=412), at=130.0
    )
    again = told(over, attempt(1, resume_from="ckpt/step-400"), at=141.0)

    cause = {**NO_CAUSE, "kind": "signal", "node": "n1", "rank": 3, "signal": "SIGKILL", "message": "killed by SIGKILL"}
    first = {
        "attempt": 0, "started": "1970-01-01T00:01:40.000Z", "ended": "1970-01-01T00:02:10.000Z", "cause": cause,
        "step": 412, "resume_from": None,
    }  # fmt: skip
    second = {
        "attempt": 1, "started": "1970-01-01T00:02:21.000Z", "ended": None, "cause": None, "step": None,
        "resume_from": "ckpt/step-400",
    }  # fmt: skip
    assert attempts_of(over) == [first]
    assert attempts_of(again) == [first, second]


def test_an_attempt_whose_end_an_older_controller_wrote_down_has_no_cause() -> None:
    state = told(RUNNING, controller_events.RestartPlanned(attempt=1, why="crash", at=140.0))

    assert [one["cause"] for one in attempts_of(state)] == [None]


def test_what_stays_of_a_node_between_attempts_is_its_connection_its_clock_and_the_cursor() -> None:
    before = failed_and_waiting()
    state = told(before, attempt(1, [LAYOUT[0], SPARE]))

    assert {
        name: (one.link, one.clock, one.seq, one.swept, one.gpu_memory_held, one.stop_reason, one.boot)
        for name, one in state.nodes.items()
    } == {
        "n0": ("connected", (5.0, 0.1), before.nodes["n0"].seq, False, None, None, ""),
        "s": ("", None, 0, False, None, None, ""),
    }
    assert state.retired == {"n1": before.nodes["n1"]}
    assert before.nodes["n0"].boot == "boot of n0"


def test_the_first_attempt_is_no_restart() -> None:
    assert (BEGUN.restarts, BEGUN.running_since, BEGUN.newest_checkpoint) == ((), 100.0, None)
    assert [BEGUN.nodes[name].finished for name in ("n0", "n1")] == [False, False]


def test_a_retired_node_that_takes_part_again_goes_on_from_its_cursor() -> None:
    away = told(failed_and_waiting(), attempt(1, [LAYOUT[0], SPARE]))
    back = told(away, attempt(2))

    assert list(back.retired) == ["s"]
    assert (back.nodes["n1"].seq, back.nodes["n1"].link) == (away.retired["n1"].seq, "lost")


def test_a_node_has_finished_once_it_says_so_whatever_the_attempt() -> None:
    state = wrote(RUNNING, "n0", node_events.Finished("succeeded", 0))

    assert [one.finished for one in state.nodes.values()] == [True, False]


def test_events_are_taken_once() -> None:
    state = wrote(RUNNING, "n0", node_events.Swept(0))
    seen = state.nodes["n0"].seq

    assert (
        apply_node_event(state, "n0", node_events.Stamp(seen, 0.0, 0.0, "b"), node_events.Finished("failed", 100))
        is state
    )
    away = told(state, attempt(1, [SPARE, {**LAYOUT[1], "node_rank": 0, "ranks": [0, 1]}]))
    assert (
        apply_node_event(away, "n0", node_events.Stamp(seen, 0.0, 0.0, "b"), node_events.Finished("failed", 100))
        is away
    )
