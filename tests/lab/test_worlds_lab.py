"""Every world of the table is there when it is asked for, and its nodes can be logged in to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lab.worlds import WORLDS, World

if TYPE_CHECKING:
    from tests.lab.lab import Lab


@pytest.mark.parametrize("world", [pytest.param(world, id=world.name) for world in WORLDS])
def test_a_node_of_a_world_answers(lab: Lab, world: World) -> None:
    reason = world.unavailable()
    if reason:
        pytest.skip(reason)
    with world.on(lab, 1) as scene:
        (node,) = scene.nodes
        assert lab.ssh(node, "hostname").stdout == f"{node.name}\n"
    assert lab.nodes == []


def test_worlds_have_names_of_their_own() -> None:
    assert len({world.name for world in WORLDS}) == len(WORLDS)
