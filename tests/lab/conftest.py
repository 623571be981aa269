"""Fixtures of the lab: one lab for the session, clean nodes for each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.lab import Lab
from tests.lab.node import Node
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


@pytest.fixture
def nodes(lab: Lab) -> Iterator[NodeFactory]:
    """Makes clean nodes: `nodes(4)`, `nodes(2, shell="/usr/bin/fish")`, `nodes([NodeSpec(...), NodeSpec()])`.

    Afterwards every node of the test is gone, and so is all that was started with the head's home.
    """

    def make(wanted: int | Sequence[NodeSpec] = 1, **options: Any) -> list[Node]:
        specs = [NodeSpec()] * wanted if isinstance(wanted, int) else wanted
        return lab.add([replace(spec, **options) for spec in specs])

    yield make
    lab.restore_head()
    lab.remove(list(lab.nodes))
    lab.end_head_processes()
    lab.forget_shared()


@pytest.fixture
def head_env(lab: Lab, tmp_path: Path) -> dict[str, str]:
    """Environment for programs on the head, with a state folder of this test alone."""
    return lab.head_env(XDG_STATE_HOME=str(tmp_path / "state"))
