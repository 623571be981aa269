"""For how long nodes have known that they must stop."""

from __future__ import annotations

from clusterctl.run.rules.stop_clock import LONGEST_LOOK, Stopping


def test_only_the_time_counts_in_which_a_node_could_have_said_something() -> None:
    stopping = Stopping()
    stopping.look({"here"}, 100.0)
    stopping.told("here")
    stopping.told("away")
    stopping.look({"here", "another"}, 102.0)
    stopping.told("here")

    assert stopping.look({"here"}, 103.0) == {"here": 3.0, "away": 0.0}
    assert stopping.look({"away"}, 104.0) == {"here": 3.0, "away": 1.0}


def test_the_time_in_which_the_controller_itself_stood_still_does_not_count() -> None:
    stopping = Stopping()
    stopping.told("here")
    stopping.look({"here"}, 100.0)

    assert stopping.look({"here"}, 5000.0) == {"here": LONGEST_LOOK}


def test_another_attempt_begins_with_nobody_told() -> None:
    stopping = Stopping()
    stopping.told("here")
    stopping.forget()

    assert stopping.look({"here"}, 100.0) == {}


def test_it_is_known_since_when_a_person_wants_the_end() -> None:
    stopping = Stopping()
    assert stopping.killed(100.0) is None
    stopping.kill(100.0)
    assert stopping.killed(130.0) == 30.0
