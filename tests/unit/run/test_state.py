"""What the journals of a run say of it, word for word, to those who read it, and who is to blame."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.render.run_list import ps_json
from clusterctl.render.status_report import RunSnapshot
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import NodePhase, RunPhase, RunState, WorkerPhase
from clusterctl.run.rules.state_updates import apply_node_event
from tests.unit.run.told import (
    BEGUN,
    NOTHING_YET,
    PREPARED,
    RUNNING,
    exited,
    node,
    shown,
    started,
    told,
    worker,
    wrote,
)

# --- what is shown of it


def test_of_a_run_of_which_nothing_is_known_nothing_is_shown() -> None:
    assert shown(RunState()) == {"run": "", **NOTHING_YET}
    (row,) = ps_json([RunSnapshot(state=RunState(), has_controller=False)])
    assert (row["nodes"], row["world_size"], row["started"]) == (0, 0, None)
    assert (RunState().causes, RunState().reason_text, RunState().ended) == ((), "", None)


def test_an_attempt_that_begins_is_shown_with_its_nodes_and_ranks() -> None:
    assert shown(BEGUN) == {
        **NOTHING_YET, "run": "r-1", "name": "r", "attempt": 0, "nodes": [node(0, "waiting"), node(1, "waiting")],
        "workers": [worker(rank) for rank in range(4)],
    }  # fmt: skip
    (row,) = ps_json([RunSnapshot(state=BEGUN, has_controller=True)])
    assert (row["nodes"], row["world_size"], row["started"]) == (2, 4, "1970-01-01T00:01:00.000Z")
    assert BEGUN.path == "/c.yaml"


def test_a_run_is_shown_with_what_its_workers_do_and_how_each_ended() -> None:
    one_stopped = exited(3, signal=15, stopped=True, earliest=1.0, latest=2.0)
    failed = exited(2, exit_code=3, earliest=1.0, latest=2.0, tail="x\nboom\n")
    state = wrote(RUNNING, "n1", failed, node_events.Stopping(0, "peer_failed", 10.0), one_stopped)

    assert shown(state) == {
        **NOTHING_YET, "run": "r-1", "name": "r", "state": "running", "attempt": 0,
        "cause": {
            "kind": "exit", "node": "n1", "rank": 2, "exit_code": 3, "signal": None, "message": "boom",
            "traceback": None, "certain": True,
        },
        "nodes": [node(0, "running"), node(1, "stopping")],
        "workers": [
            worker(0, pid=70, state="running"), worker(1, pid=71, state="running"),
            worker(2, pid=72, state="exited", exit_code=3),
            worker(3, pid=73, state="exited", signal="SIGTERM", stopped=True),
        ],
    }  # fmt: skip
    assert state.workers[2].tail == "x\nboom\n"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        pytest.param(BEGUN, ["waiting", "waiting"], id="nothing yet"),
        pytest.param(wrote(BEGUN, "n1", node_events.Prepared(0)), ["waiting", "prepared"], id="one is ready"),
        pytest.param(wrote(PREPARED, "n0", started(0)), ["running", "prepared"], id="one has a worker"),
        pytest.param(
            wrote(RUNNING, "n0", node_events.Stopping(0, "cancelled", 1.0)), ["stopping", "running"], id="one stops"
        ),
        pytest.param(
            told(RUNNING, controller_events.LinkChanged(node="n0", link="unreachable", why="no answer")),
            ["unreachable", "running"],
            id="one does not answer",
        ),
        pytest.param(
            told(
                wrote(RUNNING, "n0", node_events.Swept(0)), controller_events.LinkChanged(node="n0", link="unreachable")
            ),
            ["ended", "running"],
            id="one that had swept does not answer",
        ),
        pytest.param(
            told(wrote(RUNNING, "n0", node_events.Swept(0)), controller_events.LinkChanged(node="n0", link="lost")),
            ["lost", "running"],
            id="one that had swept is lost",
        ),
    ],
)
def test_what_a_node_is_doing_in_a_word(state: RunState, words: list[str]) -> None:
    assert [one["state"] for one in shown(state)["nodes"]] == words


def test_the_words_of_states_are_those_of_the_documents() -> None:
    assert [phase.value for phase in RunPhase] == [
        "waiting", "starting", "running", "stalled", "restarting", "stopping", "succeeded", "failed", "cancelled", "lost",
        "unreadable",
    ]  # fmt: skip
    assert [phase.value for phase in RunPhase if phase.is_final] == [
        "succeeded", "failed", "cancelled", "lost", "unreadable",
    ]  # fmt: skip
    assert [phase.value for phase in WorkerPhase] == ["pending", "starting", "running", "exited", "lost"]
    assert {phase.value for phase in NodePhase} == {
        "waiting", "prepared", "running", "stopping", "ended", "unreachable", "lost",
    }  # fmt: skip


def test_a_run_runs_once_its_last_rank_has_started_and_not_before() -> None:
    almost = wrote(wrote(PREPARED, "n0", started(0), started(1)), "n1", started(2))

    assert almost.phase is RunPhase.STARTING
    assert wrote(almost, "n1", started(3)).phase is RunPhase.RUNNING


def test_a_rank_that_has_ended_is_not_running_again_because_its_start_is_told_late() -> None:
    late = wrote(wrote(BEGUN, "n0", exited(0, exit_code=0)), "n0", started(0))

    assert (late.workers[0].phase, late.workers[0].pid) == (WorkerPhase.EXITED, None)


def test_what_nodes_say_of_ranks_that_are_not_there_is_passed_over() -> None:
    assert wrote(RUNNING, "n0", started(9), exited(9, exit_code=1)).workers == RUNNING.workers
    assert apply_node_event(RUNNING, "n9", node_events.Stamp(1, 0.0, 0.0, "b"), started(0)) is RUNNING
    assert (
        told(
            RUNNING,
            controller_events.ClockEstimated(node="n9", offset=1.0, error=0.1),
            controller_events.LinkChanged(node="n9", link="lost"),
        )
        is RUNNING
    )


@pytest.mark.parametrize(
    "event",
    [
        node_events.RunAdopted(0, 5),
        node_events.Alarm(0, "disk_full", "full"),
        node_events.OutputDropped(0, 0, 100, 0, "disk full"),
    ],
)
def test_what_changes_nothing_for_the_run_moves_the_cursor(event: node_events.Event) -> None:
    assert shown(wrote(RUNNING, "n0", event)) == shown(RUNNING)
    assert wrote(RUNNING, "n0", event).nodes["n0"].seq == RUNNING.nodes["n0"].seq + 1


def test_notes_and_steps_of_the_start_change_nothing() -> None:
    assert told(RUNNING, controller_events.Note(text="x"), controller_events.StartStepProgress(name="sync")) is RUNNING


# --- who failed first


def test_ends_are_put_in_order_by_the_clocks_of_their_nodes() -> None:
    clocks = [
        controller_events.ClockEstimated(node="n0", offset=50.0, error=0.5),
        controller_events.ClockEstimated(node="n1", offset=10.0, error=0.5),
    ]
    state = told(RUNNING, *clocks)
    # By its own clock n1 is later; by the head's its rank ended at 40 to 42, and that of n0 at 60 to 61.
    state = wrote(state, "n0", exited(0, exit_code=1, earliest=10.5, latest=10.5))
    first = wrote(state, "n1", exited(2, exit_code=1, earliest=30.5, latest=31.5))

    assert first.cause is not None
    assert (first.cause.rank, first.cause.certain) == (2, True)
    overlapping = wrote(state, "n1", exited(2, exit_code=1, earliest=30.5, latest=49.5))
    assert overlapping.cause is not None
    assert (overlapping.cause.rank, overlapping.cause.certain) == (2, False)


@pytest.mark.parametrize(
    ("latest", "certain"), [pytest.param(8.9, True, id="apart"), pytest.param(9.0, False, id="touching")]
)
def test_the_error_of_a_clock_counts_to_both_sides(latest: float, certain: bool) -> None:
    clocks = [controller_events.ClockEstimated(node=name, offset=0.0, error=0.5) for name in ("n0", "n1")]
    state = wrote(told(RUNNING, *clocks), "n0", exited(0, exit_code=1, earliest=latest, latest=latest))

    cause = wrote(state, "n1", exited(2, exit_code=1, earliest=10.0, latest=10.0)).cause

    assert cause is not None
    assert (cause.rank, cause.certain) == (0, certain)


def test_without_a_clock_nobody_can_say_which_end_came_first() -> None:
    state = wrote(RUNNING, "n0", exited(0, exit_code=1, earliest=1.0, latest=1.0))
    cause = wrote(state, "n1", exited(2, exit_code=1, earliest=900.0, latest=900.0)).cause

    assert cause is not None
    assert (cause.rank, cause.certain) == (0, False)


def test_what_a_worker_left_behind_is_what_is_told_of_its_end() -> None:
    left = {"message": "CUDA error", "traceback": "Traceback of its own"}
    killed = wrote(RUNNING, "n0", exited(0, signal=9, oom="cgroup", error=left, tail="words"))

    cause = killed.cause
    assert cause is not None
    assert (cause.kind, cause.signal, cause.message) == ("oom", "SIGKILL", "CUDA error")
    assert (cause.node, cause.exit_code, cause.traceback) == ("n0", None, "Traceback of its own")
    assert killed.workers[0].exited is not None
    assert killed.workers[0].exited.oom == "cgroup"


@pytest.mark.parametrize(
    ("how", "failed", "unseen"),
    [
        pytest.param({"exit_code": 0}, False, False, id="well"),
        pytest.param({"exit_code": 1}, True, False, id="not well"),
        pytest.param({"signal": 9}, True, False, id="by a signal"),
        pytest.param({}, True, True, id="nobody saw it"),
        pytest.param({"exit_code": 1, "stopped": True}, False, False, id="we asked for it"),
    ],
)
def test_whether_a_worker_failed_and_whether_its_end_was_seen(how: dict[str, Any], failed: bool, unseen: bool) -> None:
    ended = wrote(RUNNING, "n0", exited(0, **how)).workers[0]

    assert (ended.failed, ended.is_exit_unknown) == (failed, unseen)
    assert not RUNNING.workers[0].failed


def test_how_far_a_clock_is_ahead_is_known_by_the_last_measure_and_kept_over_attempts() -> None:
    measured = [controller_events.ClockEstimated(node="n0", offset=0.0, error=0.1, ahead=ahead) for ahead in (7.0, 5.0)]

    state = told(RUNNING, *measured)

    assert (state.clock_ahead_s("n0"), state.clock_ahead_s("n1"), state.clock_ahead_s("n9")) == (5.0, 0.0, 0.0)


def test_a_rank_that_left_early_is_found_by_the_address_of_its_node() -> None:
    gone = wrote(RUNNING, "n1", exited(2, exit_code=0, earliest=1.0, latest=1.1))
    broken = exited(0, exit_code=1, earliest=2.0, latest=2.1, tail="Connection closed by peer [10.0.0.2]:34211")
    first = wrote(gone, "n0", broken).cause

    assert first is not None
    assert (first.kind, first.rank) == ("exited_early", 2)
