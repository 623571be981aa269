"""What nobody has said yet is told as nothing, in the type that it has once it is said."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from clusterctl.agent.node_state import journal as on_node
from clusterctl.plan.rendezvous import NodeInfo
from clusterctl.run.rules import blame, policy, state

KINDS = (
    state.RunState,
    state.NodeState,
    state.WorkerState,
    on_node.NodeState,
    NodeInfo,
    policy.Observations,
    blame.Cause,
)
NOTHING = {"str": "", "bool": False, "int": 0, "float": 0.0, "tuple": (), "dict": {}, "Mapping": {}, "list": []}
SOMETHING = {
    ("RunState", "phase"): state.RunPhase.STARTING,
    ("RunState", "attempt"): -1,
    ("WorkerState", "phase"): state.WorkerPhase.PENDING,
    ("NodeState", "attempt"): -1,
    ("NodeInfo", "cores"): 1,
    ("NodeInfo", "netns_id"): ("", ""),
    ("Observations", "dirty_s"): float("inf"),
}
"""What is not empty before anybody has spoken, and why is told where it stands."""


def left_out(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]


def rows() -> list[Any]:
    return [
        pytest.param(kind, field, id=f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}.{field.name}")
        for kind in KINDS
        for field in fields(kind)
        if field.default is not MISSING or field.default_factory is not MISSING
    ]


@pytest.mark.parametrize(("kind", "field"), rows())
def test_what_nobody_has_said_is_nothing(kind: type, field: Field[Any]) -> None:
    known = str(field.type)
    nothing = None if known.endswith("| None") else NOTHING.get(known.partition("[")[0])
    expected = SOMETHING.get((kind.__name__, field.name), nothing)

    assert (type(left_out(field)), left_out(field)) == (type(expected), expected)
