"""Which ranks a node has in an attempt."""

from __future__ import annotations

from clusterctl.run.rules.state import Placement, RankIndex


class Counted(tuple[Placement, ...]):
    """What was placed, and how much of it was looked at."""

    looked_at = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def,override]
        found = super().__getitem__(key)
        self.looked_at += len(found)
        return found


def test_the_ranks_of_a_node_are_those_of_the_attempt_that_is_asked_for() -> None:
    placed: tuple[Placement, ...] = ((0, "a", (0, 1)), (0, "b", (2, 3)), (1, "b", (0, 1)))
    places = RankIndex()

    assert [places.find_ranks(placed, 0, node) for node in "abc"] == [{0, 1}, {2, 3}, set()]
    assert places.find_ranks((*placed, (1, "c", (2,))), 1, "c") == {2}
    assert places.find_ranks(placed, 1, "b") == {0, 1}


def test_what_was_placed_in_a_thousand_attempts_is_gone_through_once_however_often_it_is_asked_for() -> None:
    placed = Counted((attempt, f"n{node}", (node,)) for attempt in range(1000) for node in range(8))
    places = RankIndex()

    assert {rank for _ in range(100) for rank in places.find_ranks(placed, 999, "n7")} == {7}
    assert placed.looked_at == len(placed)
