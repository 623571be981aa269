"""What a journal says of a run on its node."""

from __future__ import annotations

import pytest

from clusterctl.agent.node_state.journal import fold_journal
from clusterctl.agent.protocol.events import (
    Event,
    Exited,
    Finished,
    OutputDropped,
    Prepared,
    Stamp,
    Started,
    Stopping,
    Swept,
)

STARTED = [Prepared(0), Started(0, 0, 0, 7, 1), Started(0, 1, 1, 8, 1)]
EXITED = [Exited(0, 0, exit_code=0), Exited(0, 1, exit_code=0)]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        pytest.param([], "new", id="nobody prepared it"),
        pytest.param(STARTED[:1], "prepared", id="prepared"),
        pytest.param(STARTED, "started", id="started"),
        pytest.param([*STARTED, EXITED[0]], "started", id="one of two has ended"),
        pytest.param([*STARTED, *EXITED], "exited", id="all have ended"),
        pytest.param([*STARTED, Stopping(0, "cancelled", 1.0), *EXITED], "stopping", id="stopping"),
        pytest.param([*STARTED, *EXITED, Swept(0)], "swept", id="swept"),
        pytest.param([*STARTED, *EXITED, Swept(0), Prepared(1)], "prepared", id="prepared again"),
        pytest.param([*STARTED, *EXITED, Swept(0), Finished("succeeded", 0)], "finished", id="finished"),
    ],
)
def test_where_a_node_is(events: list[Event], state: str) -> None:
    assert fold_journal((Stamp(seq, 0.0, 0.0, "b"), event) for seq, event in enumerate(events, 1)).phase == state


def test_a_run_began_when_it_was_prepared_first() -> None:
    prepared = [(Stamp(1, 50.0, 0.0, "b"), Prepared(0)), (Stamp(2, 90.0, 0.0, "b"), Prepared(1))]

    assert fold_journal(prepared).began_at == 50.0


def test_what_was_given_up_adds_up_for_each_attempt_and_rank() -> None:
    dropped = [OutputDropped(0, 0, 100, 10, ""), OutputDropped(0, 0, 300, 5, ""), OutputDropped(1, 0, 50, 1, "")]
    state = fold_journal((Stamp(seq, 0.0, 0.0, "b"), event) for seq, event in enumerate(dropped, 1))

    assert state.dropped == {(0, 0): (300, 15), (1, 0): (50, 1)}
