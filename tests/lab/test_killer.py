"""A few rounds of the random killer; `make killer` runs 200 of other choices, in any world."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.killer import Killer
from tests.lab.worlds import WORLDS

if TYPE_CHECKING:
    from tests.lab.lab import Lab

SEED = 4


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "rounds", "start"), [("plain", 4, "spawn"), ("network home", 1, "spawn"), ("plain", 2, "fork")]
)
def test_whatever_process_is_killed_at_whatever_moment_nothing_is_left_and_nothing_lost(
    lab: Lab, tmp_path: Path, name: str, rounds: int, start: str
) -> None:
    world = next(world for world in WORLDS if world.name == name)
    reason = world.unavailable()
    if reason:
        pytest.skip(reason)
    with world.on(lab) as scene:
        env = lab.head_env(XDG_STATE_HOME=str(tmp_path / "state"))
        killer = Killer(scene.nodes, env, tmp_path, SEED, world, start)
        killer.begin()

        played = [*map(killer.round, range(rounds)), killer.end()]

        bad = [f"{one}\n{killer.account(one)}" for one in played if one.problems]
    assert not bad, f"seed {SEED}: " + "\n".join(bad)
