"""A few rounds of the random killer; `make killer` runs 200 of other choices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.killer import Killer

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory

ROUNDS = 4
SEED = 4


@pytest.mark.timeout(240)
def test_whatever_process_is_killed_at_whatever_moment_nothing_is_left_and_nothing_lost(
    nodes: NodeFactory, head_env: dict[str, str], tmp_path: Path
) -> None:
    killer = Killer(nodes(2), head_env, tmp_path, SEED)
    killer.begin()

    rounds = [killer.round(number) for number in range(ROUNDS)]

    rounds.append(killer.end())
    bad = [f"{one}\n{killer.account(one)}" for one in rounds if one.problems]
    assert not bad, f"seed {SEED}: " + "\n".join(bad)
