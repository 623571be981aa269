"""`fast_dataclass_replace.replace` does what `dataclasses.replace` does."""

from __future__ import annotations

import dataclasses

import pytest

from clusterctl.run.rules import fast_dataclass_replace
from clusterctl.run.rules.state import NodeState, RunState, WorkerState


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        pytest.param(NodeState(node="n", node_rank=1, address=None, ranks=(1, 2)), {"seq": 4}, id="a node"),
        pytest.param(WorkerState(rank=1, local_rank=0, node="n"), {"pid": 7, "began_s": 2.0}, id="a worker"),
        pytest.param(RunState(run="r"), {}, id="a run, unchanged"),
    ],
)
def test_a_copy_has_the_changes_alone(value: NodeState | WorkerState | RunState, changes: dict[str, object]) -> None:
    copy = fast_dataclass_replace.replace(value, **changes)  # type: ignore[type-var]

    assert copy == dataclasses.replace(value, **changes)
    assert copy is not value


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(KeyError):
        fast_dataclass_replace.replace(RunState(run="r"), nothing=1)
