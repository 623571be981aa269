"""Who takes part in another attempt, and when attempts count as alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol import events as node_events
from clusterctl.config.spec import ClusterSpec, HostSpec, RestartSpec, Role
from clusterctl.run.rules import controller_events, next_action
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunState, WorkerPhase, WorkerState
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event

TRACE = 'Traceback (most recent call last):\n  File "train.py", line {}, in <module>\nValueError: loss is {}'


def failed(
    message: str = "", traceback: str | None = None, *, kind: str = "exit", code: int = 1, signal: str | None = None
) -> RunState:
    cause = Cause(kind=kind, exit_code=code, signal=signal, message=message, traceback=traceback)
    return RunState(attempt=0, external_cause=cause, running_since=0.0)


def words(state: RunState, *, checkpoints: bool = True, now: float = 10.0) -> str:
    return next_action.build_failure_signature(state, checkpoints=checkpoints, now=now)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        pytest.param(failed("out of luck"), failed("out of luck"), True, id="the same last line"),
        pytest.param(failed("step 17 at 0x7f3a"), failed("step 18 at 0x88ff"), True, id="numbers differ"),
        pytest.param(failed("no file"), failed("no memory"), False, id="words differ"),
        pytest.param(
            failed("", TRACE.format(3, 1.5)),
            failed("", TRACE.format(3, "nan")),
            True,
            id="the same place, other values",
        ),
        pytest.param(failed("", TRACE.format(3, 1)), failed("", TRACE.format(4, 1)), False, id="another place"),
        pytest.param(
            failed("", TRACE.format(3, "at: 1")), failed("", TRACE.format(3, "was: 1")), True, id="a colon in its words"
        ),
        pytest.param(
            failed("", TRACE.format(3, 1)),
            failed("", TRACE.format(3, 1).replace("ValueError", "KeyError")),
            False,
            id="the same place, another exception",
        ),
        pytest.param(
            failed("", TRACE.format(3, 1)),
            failed("", "\n".join(f"[rank{r}]: {line}" for r, line in enumerate(TRACE.format(3, 1).splitlines()))),
            False,
            id="a rank before the exception",
        ),
        pytest.param(
            failed("", TRACE.format(3, 1).replace("  File", "[rank0]:   File")),
            failed("", TRACE.format(3, 1).replace("  File", "[rank1]:   File")),
            True,
            id="another rank before the place",
        ),
        pytest.param(failed("", "\n"), failed("", "\n\n"), True, id="nothing in the traceback"),
        pytest.param(failed("x", code=1), failed("x", code=2), False, id="another exit code"),
        pytest.param(failed("x", kind="oom"), failed("x"), False, id="another kind of end"),
        pytest.param(failed("x", signal="SIGBUS"), failed("x", signal="SIGSEGV"), False, id="another signal"),
    ],
)
def test_what_counts_as_the_same_end(one: RunState, other: RunState, alike: bool) -> None:
    assert (words(one) == words(other)) is alike


def test_without_a_checkpoint_pattern_a_long_attempt_is_like_no_other() -> None:
    one, other = failed("boom"), replace(failed("boom"), attempt=1)
    late = next_action.LONG_ATTEMPT_S

    assert words(one, checkpoints=False, now=late) != words(other, checkpoints=False, now=late)
    assert words(one, now=late) == words(other, now=late)


def test_an_end_is_written_down_in_words_that_people_can_read() -> None:
    assert words(failed("step 17 at 0x7f")) == "exit 1 None step # at #"
    assert words(failed("", TRACE.format(3, 1.5))) == 'exit 1 None File "train.py", line 3, in <module>\nValueError'
    assert words(failed("", "\n", signal="SIGBUS")) == "exit 1 SIGBUS "


@pytest.mark.parametrize(
    ("seconds", "alone"), [pytest.param(599.9, False, id="short"), pytest.param(600.0, True, id="ten minutes")]
)
def test_an_attempt_is_long_after_ten_minutes_whenever_it_began(seconds: float, alone: bool) -> None:
    state = replace(failed("boom"), running_since=5000.0)

    said = words(state, checkpoints=False, now=5000.0 + seconds)

    assert (said != words(state)) is alone
    if alone:
        assert said == "attempt 0 went on for 600 s"


def test_an_attempt_that_never_began_was_not_long() -> None:
    never = replace(failed("boom"), running_since=None)

    assert words(never, checkpoints=False, now=1e9) == words(failed("boom"))


@given(st.lists(st.sampled_from("ab"), max_size=6), st.sampled_from("ab"))
def test_only_the_unbroken_row_before_an_attempt_counts(past: list[str], now: str) -> None:
    state = RunState(failure_signatures=tuple((ending, None) for ending in past))
    row = "".join(past)

    assert next_action.count_repeated_failures(state, now) == len(row) - len(row.rstrip(now))


def test_attempts_that_ended_without_a_cause_are_alike_if_they_were_ended_for_the_same_reason() -> None:
    stalled = RunState(attempt=0, reason="stalled", running_since=0.0)

    assert words(stalled) == words(replace(stalled, attempt=1))
    assert words(stalled) != words(replace(stalled, reason="time_limit"))
    assert words(replace(stalled, reason=None)) == ""
    assert (
        next_action.count_repeated_failures(
            replace(stalled, failure_signatures=((words(stalled), None),)), words(stalled)
        )
        == 1
    )


def test_attempts_that_ended_with_a_lost_node_are_alike_if_it_is_the_same_node() -> None:
    ends = [
        words(RunState(attempt=0, external_cause=Cause(kind="node_lost", node=node, message=message)))
        for node, message in (("a", "no answer for 61 s"), ("a", "no answer for 75 s"), ("b", "no answer for 61 s"))
    ]

    assert ends[0] == ends[1] != ends[2]


def test_a_newer_checkpoint_between_two_attempts_breaks_the_row() -> None:
    state = RunState(failure_signatures=(("boom", None), ("boom", "step-1")), newest_checkpoint="step-2")

    assert next_action.count_repeated_failures(state, "boom") == 0


def state_of(*names: str) -> RunState:
    nodes = [{"node": name, "node_rank": i, "ranks": [i]} for i, name in enumerate(names)]
    begun = controller_events.AttemptStarted(
        attempt=0, world_size=len(names), master_addr=None, master_port=None, nodes=nodes
    )
    return apply_controller_event(RunState(), 0.0, begun)


def test_free_spares_are_those_that_can_be_used_and_have_not_taken_part_in_their_order() -> None:
    hosts = [HostSpec(name=name, host=name, role=Role.SPARE) for name in ("s0", "s1", "s2", "s3", "s4")]
    spec = ClusterSpec(name="r", path="/c.yaml", hosts=(HostSpec(name="a", host="a"), *hosts), job=None)
    begun = state_of("a", "s0")
    state = replace(begun, retired={"s1": replace(begun.nodes["a"], node="s1")})

    free = next_action.list_free_spares(spec, state, {"a", "s0", "s1", "s3", "s4"})

    assert [host.name for host in free] == ["s3", "s4"]


def test_spares_take_over_the_node_ranks_of_those_they_replace() -> None:
    spares = [HostSpec(name=f"s{i}", host=f"s{i}", address=f"s{i}", role=Role.SPARE) for i in range(2)]

    nodes, said = next_action.choose_next_nodes(state_of("a", "b", "c"), {"b": "lost", "a": "dirty"}, spares)

    assert nodes == ["s0", "s1", "c"]
    assert said == ["s0 takes the place of a, which is dirty", "s1 takes the place of b, which is lost"]
    assert next_action.choose_next_nodes(state_of("a", "b", "c", "d"), {"c": "lost"}, spares)[0] == [
        "a",
        "b",
        "s0",
        "d",
    ]


def test_a_node_that_was_replaced_is_retired_and_its_cursor_goes_on() -> None:
    old = state_of("a", "b")
    nodes = [{"node": name, "node_rank": i, "ranks": [i]} for i, name in enumerate(("a", "s"))]

    new = apply_controller_event(
        old,
        1.0,
        controller_events.AttemptStarted(attempt=1, world_size=2, master_addr=None, master_port=None, nodes=nodes),
    )

    assert list(new.nodes) == ["a", "s"]
    assert list(new.retired) == ["b"]
    assert new.placements == ((0, "a", (0,)), (0, "b", (1,)), (1, "a", (0,)), (1, "s", (1,)))

    later = new
    for seq, event in enumerate(
        (node_events.Swept(attempt=0, remaining=[{"pid": 7}]), node_events.Finished("failed", 100)), 1
    ):
        later = apply_node_event(later, "b", node_events.Stamp(seq=seq, wall=1.0, mono=1.0, boot="b"), event)
    seen = later.retired["b"]
    assert (seen.seq, seen.swept, seen.finished) == (2, True, True)
    assert seen.remaining == ({"node": "b", "pid": 7},)
    assert later.nodes == new.nodes
    again = node_events.Stamp(seq=2, wall=2.0, mono=2.0, boot="b")
    assert apply_node_event(later, "b", again, node_events.Swept(attempt=0)) is later


def test_nodes_that_were_replaced_or_only_prepared_are_known_to_hold_something_of_the_run() -> None:
    old = apply_controller_event(state_of("a", "b"), 1.0, controller_events.TouchedNodes(nodes=["a", "c"]))
    nodes = [{"node": name, "node_rank": i, "ranks": [i]} for i, name in enumerate(("a", "s"))]

    new = apply_controller_event(
        old,
        2.0,
        controller_events.AttemptStarted(attempt=1, world_size=2, master_addr=None, master_port=None, nodes=nodes),
    )

    assert new.touched_nodes == ("a", "b", "c", "s")


FAILED = RunState(
    attempt=0,
    phase=state_of("a").phase,
    reason="peer_failed",
    external_cause=Cause(kind="exit", exit_code=3),
    nodes={"a": NodeState(node="a", node_rank=0, ranks=(0,), swept=True)},
    workers={0: WorkerState(rank=0, local_rank=0, node="a", phase=WorkerPhase.EXITED, exit_code=3)},
)
DIRTY = replace(FAILED, nodes={"a": replace(FAILED.nodes["a"], remaining=({"node": "a", "pid": 7},))})


@pytest.mark.parametrize(
    ("state", "rules", "spares", "why"),
    [
        pytest.param(FAILED, RestartSpec(), 0, "", id="nobody asked for restarts"),
        pytest.param(FAILED, RestartSpec(max_restarts=1), 0, None, id="one is left"),
        pytest.param(
            replace(FAILED, restarts=(1.0,)),
            RestartSpec(max_restarts=1),
            0,
            "all 1 restarts are used up",
            id="none is left",
        ),
        pytest.param(
            replace(FAILED, restarts=(1.0,)),
            RestartSpec(max_restarts=1, window=50),
            0,
            None,
            id="the window has passed",
        ),
        pytest.param(
            replace(FAILED, restarts=(90.0,)),
            RestartSpec(max_restarts=1, window=50),
            0,
            "all 1 restarts within 50 s are used up",
            id="within the window",
        ),
        pytest.param(
            replace(FAILED, restarts=(50.0,)),
            RestartSpec(max_restarts=1, window=50),
            0,
            None,
            id="the window passes at this moment",
        ),
        pytest.param(
            FAILED,
            RestartSpec(max_restarts=1, never_codes=(3,)),
            0,
            "exit code 3 is one of `restart.never_codes`",
            id="a code that is never tried again",
        ),
        pytest.param(FAILED, RestartSpec(max_restarts=1, on=("stall",)), 0, "", id="crashes are not tried again"),
        pytest.param(DIRTY, RestartSpec(max_restarts=1), 1, None, id="dirty, with a spare: no fence is needed"),
        pytest.param(
            DIRTY,
            RestartSpec(max_restarts=1),
            0,
            "a is dirty: processes of the run could not be ended, and no spare can take its place",
            id="dirty, without a spare",
        ),
    ],
)
def test_whether_an_attempt_may_follow(state: RunState, rules: RestartSpec, spares: int, why: str | None) -> None:
    sight = next_action.RunObservations(silent_s={}, spare_count=spares)

    assert next_action.find_restart_obstacle(state, next_action.RunLimits(restart=rules), sight, "crash", 100.0) == why


@pytest.mark.parametrize(
    ("state", "sight", "then"),
    [
        pytest.param(
            DIRTY, next_action.RunObservations(silent_s={}, dirty_node_s=5.0), None, id="it may come clean yet"
        ),
        pytest.param(FAILED, next_action.RunObservations(silent_s={}), next_action.Restart, id="it has come clean"),
        pytest.param(
            DIRTY,
            next_action.RunObservations(silent_s={}, dirty_node_s=5.0, spare_count=1),
            next_action.Restart,
            id="there is a spare",
        ),
        pytest.param(
            DIRTY, next_action.RunObservations(silent_s={}, dirty_node_s=60.0), next_action.Finish, id="it stays dirty"
        ),
        pytest.param(
            DIRTY,
            next_action.RunObservations(silent_s={}, dirty_node_s=5.0, cancelled=True),
            next_action.Finish,
            id="nobody waits for it",
        ),
        pytest.param(
            replace(DIRTY, restarts=(1.0,)),
            next_action.RunObservations(silent_s={}, dirty_node_s=5.0),
            next_action.Finish,
            id="no restart is left",
        ),
    ],
)
def test_a_restart_is_refused_for_a_dirty_node_only_once_it_has_had_time_to_come_clean(
    state: RunState, sight: next_action.RunObservations, then: type[next_action.Action] | None
) -> None:
    action = next_action.decide_action(state, next_action.RunLimits(restart=RestartSpec(max_restarts=1)), sight, 100.0)

    assert action is None if then is None else isinstance(action, then)


def test_a_node_that_comes_clean_is_dirty_no_more() -> None:
    found = {"pid": 7, "start_time": 1, "command": "x", "why": "stuck"}
    state = state_of("a")
    for seq, remaining in enumerate([[found], []], start=1):
        stamp = node_events.Stamp(seq=seq, wall=0.0, mono=0.0, boot="b")
        state = apply_node_event(state, "a", stamp, node_events.Swept(attempt=0, remaining=remaining))
        assert bool(state.nodes["a"].remaining) == bool(remaining)


def test_an_unhealthy_node_ends_an_attempt_only_where_another_may_follow() -> None:
    running = replace(FAILED, reason=None, external_cause=None, workers={}, phase=state_of("a").phase)
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=1, on=("unhealthy",)))
    ends = [
        next_action.decide_action(replace(running, nodes={"a": NodeState(node="a", node_rank=0)}), limits, sight, 100.0)
        for sight in (
            next_action.RunObservations(silent_s={}, unhealthy={"a": "GPU 0: GPU is lost"}, spare_count=n)
            for n in (0, 1)
        )
    ]

    assert ends[0] is None
    assert isinstance(ends[1], next_action.EndAttempt)
