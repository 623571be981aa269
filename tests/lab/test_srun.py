"""Reaching nodes by steps of Slurm: the contract of sessions, and a whole run."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.sections import hostfiles_and_slurm as product
from clusterctl.config.spec import HostSpec
from clusterctl.transport.local import LocalTransport
from tests.contract_sessions import Reach, SessionContract
from tests.lab.faulty import every_byte, make, nothing_left, order, start, writes
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for
from tests.lab.ways import STEP, WAYS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.lab import Lab
    from tests.lab.node import Node
    from tests.lab.slurm_nodes import SlurmNodes


@pytest.fixture
def made(lab: Lab, slurm_nodes: SlurmNodes) -> Iterator[list[Node]]:
    """Two nodes, each in an allocation."""
    nodes = lab.add(2)
    slurm_nodes.add(nodes)
    yield nodes
    lab.remove(nodes)
    lab.end_head_processes()
    slurm_nodes.remove(nodes)


class TestSrun(SessionContract):
    @pytest.fixture
    def reach(self, made: list[Node]) -> Reach:
        name = made[0].name
        return LocalTransport(), HostSpec(name=name, host=name, transport=(STEP, "{host}"))


def test_the_step_that_the_tests_take_is_the_one_that_the_product_makes(slurm_nodes: SlurmNodes) -> None:
    assert product.is_srun_command(slurm_nodes.argv)


def test_a_run_whose_worker_fails_is_ended_and_nothing_is_left_or_lost(
    made: list[Node], tmp_path: Path, head_env: dict[str, str]
) -> None:
    head = Head(tmp_path / "project", head_env)
    head.folder.mkdir()
    make(head, made, **WAYS["srun"].file)
    run = start(head)
    for rank in (0, 2):
        writes(made[rank // 2], rank)
    order(made[1], 2, "os._exit(3)")
    assert head.run("wait", run).returncode == 100
    nothing_left(made)
    every_byte(head, run, made)


PATIENT = "echo began $RANK; while :; do sleep 0.2; done"


@pytest.mark.timeout(240)
def test_a_node_of_an_allocation_that_is_lost_ends_the_run_and_is_named(
    lab: Lab, slurm_nodes: SlurmNodes, tmp_path: Path
) -> None:
    made = lab.add(4)
    slurm_nodes.add(made, hold=False)
    text = f"version: 1\nhosts: {{from: slurm}}\nsync: none\njob: {{command: '{PATIENT}', grace: 1s}}\n"
    (tmp_path / "cluster.yaml").write_text(text + "network: {node_lost_after: 8s}\n")
    up = [sys.executable, "-m", "clusterctl", "up", "--no-health", "--all-ranks"]
    names = ",".join(node.name for node in made)
    argv = ["salloc", "--no-kill", "-N4", "--ntasks-per-node=2", "-w", names, *up]
    env = slurm_nodes.env | {"XDG_STATE_HOME": f"{tmp_path}/state"}
    said = tmp_path / "said"
    with said.open("wb") as out:
        salloc = subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        wait_for(lambda: all(f"began {rank}" in said.read_text() for rank in range(8)), what="all ranks")
        made[2].kill()
        assert salloc.wait(120) == 105, said.read_text()
        assert f"{made[2].name}: lost" in said.read_text() or f"lost: {made[2].name}" in said.read_text(), (
            said.read_text()
        )
        nothing_left([node for node in made if node.alive])
    finally:
        salloc.kill()
        salloc.wait()
        lab.remove(made)
        slurm_nodes.remove(made)
    wait_for(lambda: not slurm_nodes.ask("squeue", "-h"), what="the queue to be empty")
