"""The worlds that machines live in, by name.

@pytest.mark.parametrize("world", [pytest.param(world, id=world.name) for world in WORLDS])
def test_a_run(lab: Lab, world: World) -> None:
    with world.on(lab, 2) as scene:
        ...  # scene.nodes, scene.env
        scene.befall()
"""

from __future__ import annotations

from typing import Final

from tests.lab.spec import NodeSpec
from tests.lab.world import Scene, World, alike
from tests.lab.worlds_far import FAR
from tests.lab.worlds_machine import MACHINES
from tests.lab.worlds_places import PLACES

__all__ = ["EVERYDAY", "WORLDS", "Scene", "World"]

WORLDS: Final = [
    World(name="plain", sentence="nothing is special", make=alike(NodeSpec())),
    *PLACES,
    *MACHINES,
    *FAR,
]
EVERYDAY: Final = frozenset(
    [
        "network home, cached",
        "network home, dead",
        "shared temporary folders",
        "cleaned",
        "read-only home",
        "rebooted",
        "few processes",
        "IPv6 only",
        "jump host",
        "openssh",
        "two heads",
    ]
)
"""Those in which most is different, and that take seconds: what the suite plays; `make worlds` plays all."""
