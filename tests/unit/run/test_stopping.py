"""For how long nodes have known that they must stop."""

from __future__ import annotations

from clusterctl.run.rules.next_action import MAX_STEP_S, StopTimers


def test_only_the_time_counts_in_which_a_node_could_have_said_something() -> None:
    stopping = StopTimers()
    stopping.update({"here"}, 100.0)
    stopping.start("here")
    stopping.start("away")
    stopping.update({"here", "another"}, 102.0)
    stopping.start("here")

    assert stopping.update({"here"}, 103.0) == {"here": 3.0, "away": 0.0}
    assert stopping.update({"away"}, 104.0) == {"here": 3.0, "away": 1.0}


def test_the_time_in_which_the_controller_itself_stood_still_does_not_count() -> None:
    stopping = StopTimers()
    stopping.start("here")
    stopping.update({"here"}, 100.0)

    assert stopping.update({"here"}, 5000.0) == {"here": MAX_STEP_S}


def test_another_attempt_begins_with_nobody_told() -> None:
    stopping = StopTimers()
    stopping.start("here")
    stopping.reset()

    assert stopping.update({"here"}, 100.0) == {}


def test_it_is_known_since_when_a_person_wants_the_end() -> None:
    stopping = StopTimers()
    assert stopping.measure_kill_wait_s(100.0) is None
    stopping.start_kill_timer(100.0)
    assert stopping.measure_kill_wait_s(130.0) == 30.0
