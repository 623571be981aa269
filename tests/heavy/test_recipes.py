"""Every recipe that trains, on two lab nodes over real SSH: a rank is killed once, and the run continues and succeeds."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests import recipes
from tests.lab import workloads
from tests.lab.head_cli import Head
from tests.lab.spec import SHARED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.heavy.conftest import Environment
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node
    from tests.recipes import Recipe

pytestmark = pytest.mark.timeout(1800)


def kill_on_its_node(made: Sequence[Node], recipe: Recipe, worker: Mapping[str, Any]) -> None:
    node = next(node for node in made if node.name == worker["node"])
    pids = node.pids_of(recipe.killed)[:1] if recipe.killed else [worker["pid"]]
    node.run(["/bin/kill", f"-{signal.SIGKILL}", *map(str, pids)])


@pytest.mark.parametrize("case", recipes.RECIPES, ids=lambda case: case.template)
def test_a_recipe_continues_after_a_killed_rank_and_succeeds(
    nodes: NodeFactory, environment: Environment, lab: Lab, head_env: dict[str, str], tmp_path: Path, case: Recipe
) -> None:
    venv = environment(case.environment) if case.environment else None
    made = nodes(2, expose=(str(venv),) if venv else ())
    (tmp_path / "project").mkdir()
    head = Head(tmp_path / "project", head_env)
    python = {"python": str(venv / "bin/python")} if venv else {}
    # DeepSpeed compiles on each node, with the `ninja` of its environment.
    env = {"PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin"} if venv else {}
    recipes.write_cluster_file(
        head,
        case.template,
        [{"host": node.name, "gpus": 0, "workers": 1} for node in made],
        defaults={"workdir": f"{SHARED}/{case.template}", **python},
        env={"OMP_NUM_THREADS": "1", **env},
    )

    folder, kill = lab.shared / case.template, partial(kill_on_its_node, made, case)
    recipes.kill_rank_after_checkpoint(head, case, folder, kill, 900.0)

    workloads.nothing_left(made)
