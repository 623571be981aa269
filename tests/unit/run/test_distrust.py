"""When a node is not believed any more, and what its epoch is."""

from __future__ import annotations

from typing import Any

from clusterctl.errors import ConnectError
from clusterctl.run.nodes import run_end_on_nodes
from clusterctl.run.nodes.run_end_on_nodes import find_highest_epoch
from clusterctl.run.rules import outcome
from clusterctl.run.rules.next_action import MAX_VIOLATIONS, VIOLATION_WINDOW_S, ProtocolViolationCounter


class Node:
    def __init__(self, answer: int | Exception) -> None:
        self._answer = answer

    def call(self, *_: object, **__: object) -> dict[str, Any]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return {"epoch": self._answer}


def test_the_highest_epoch_is_that_of_the_nodes_that_answer() -> None:
    nodes: Any = {"a": Node(2), "b": Node(7), "c": Node(ConnectError("c", "gone"))}

    assert find_highest_epoch("r", nodes) == 7
    assert find_highest_epoch("r", {}) == 0


def test_a_node_has_used_up_its_chances_at_the_third_word_within_an_hour() -> None:
    violations = ProtocolViolationCounter()
    said = [violations.add_violation("n", float(moment)) for moment in range(MAX_VIOLATIONS)]

    assert said == [False, False, True]
    assert not violations.add_violation("other", 0.0)
    assert not violations.add_violation("n", MAX_VIOLATIONS + 2 * VIOLATION_WINDOW_S)


def test_the_same_words_of_a_node_are_told_once_and_new_ones_not_for_ever() -> None:
    violations = ProtocolViolationCounter()

    assert [violations.is_new_message("n", text) for text in ("a", "a", "b", "c", "d")] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_of_a_node_that_does_not_end_and_names_no_worker_nobody_says_that_nothing_is_left() -> None:
    status = {"state": "started", "workers": [], "remaining": []}

    assert [entry["why"] for entry in run_end_on_nodes._unended("gpu01", status)] == [outcome.OVERDUE]
    assert run_end_on_nodes._unended("gpu01", {**status, "state": "swept"}) == []
