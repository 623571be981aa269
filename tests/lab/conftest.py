"""Fixtures of the lab: one lab for the session, clean nodes for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab import ways
from tests.lab.lab import Lab
from tests.lab.node import Node
from tests.lab.slurm import Slurm
from tests.lab.slurm_nodes import SlurmNodes, slurm_of
from tests.lab.spec import NodeSpec

if TYPE_CHECKING:
    from pathlib import Path

NodeFactory = Callable[..., list[Node]]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A started lab without nodes; skips where none can run, and fails there under CI."""
    reason = Lab.unavailable()
    if reason and os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
    with Lab() as started:
        yield started


@pytest.fixture(scope="session")
def slurm_nodes(lab: Lab) -> Iterator[SlurmNodes]:
    """A Slurm that nodes of the lab can be added to."""
    reason = Slurm.unavailable()
    if reason:
        pytest.skip(reason)
    with slurm_of(lab) as started:
        yield started


@pytest.fixture
def nodes(lab: Lab, request: pytest.FixtureRequest) -> Iterator[NodeFactory]:
    """Makes clean nodes: `nodes(4)`, `nodes(2, shell="/usr/bin/fish")`, `nodes([NodeSpec(...), NodeSpec()])`.

    Afterwards every node of the test is gone, and so is all that was started with the head's home.
    """
    way = ways.chosen()
    slurm = request.getfixturevalue("slurm_nodes") if way is not None and way.name == "srun" else None

    def make(wanted: int | Sequence[NodeSpec] = 1, **options: Any) -> list[Node]:
        specs = [NodeSpec()] * wanted if isinstance(wanted, int) else wanted
        made = lab.add([replace(spec, **options) for spec in specs])
        if slurm is not None:
            slurm.add(made)
        return made

    yield make
    lab.restore_head()
    made = list(lab.nodes)
    lab.remove(made)
    if slurm is not None:
        slurm.remove(made)
    lab.end_head_processes()
    lab.forget_shared()


@pytest.fixture
def head_env(lab: Lab, tmp_path: Path) -> dict[str, str]:
    """Environment for programs on the head, with a state folder of this test alone."""
    return lab.head_env(XDG_STATE_HOME=str(tmp_path / "state"))
