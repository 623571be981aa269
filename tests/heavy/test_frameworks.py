"""The templates for other frameworks on two nodes with two CPU workers each over real SSH: they finish and learn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.documented import typed
from tests.lab import workloads
from tests.lab.head_cli import Head
from tests.lab.spec import SHARED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.heavy.conftest import Environment
    from tests.lab.conftest import NodeFactory

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Case:
    """A template and how it is run.

    Attributes:
        installs: What pip is asked for, call by call.
        command: Of the run on four ranks, as the template's page has it.
        alone: Of the run in one process: with the batches of the four ranks together.
        tolerance: By how much the accuracies may differ; the order of samples, or what rounding makes of sums, differs.
        losses: Relative tolerance for the loss of every epoch, where one process takes the very same steps.
    """

    template: str
    installs: Sequence[Sequence[str]]
    command: Sequence[str]
    alone: Sequence[str] | None
    tolerance: float = 0.03
    losses: float | None = None

    @property
    def environment(self) -> str:
        """The name of its virtual environment."""
        return self.template


UP = ["up"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1"}
CASES = [
    # Of tf_keras without what it asks for: the full TensorFlow, with 1 GB for GPUs.
    Case("keras_tensorflow", [["tensorflow-cpu==2.21.*"], ["--no-deps", "tf_keras==2.21.*"]], UP, []),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([case.template, *case.command]))
def test_a_framework_finds_its_ranks_by_what_every_worker_is_told(
    nodes: NodeFactory, environment: Environment, head_env: dict[str, str], tmp_path: Path, case: Case
) -> None:
    venv = environment(case.environment)
    made = nodes(2, expose=(str(venv),))
    (tmp_path / "project").mkdir()
    head = Head(tmp_path / "project", head_env)
    env = {"PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin"}
    hosts = workloads.workers(made, python=str(venv / "bin/python"))
    workloads.copy(head, case.template, hosts, env=env)

    done = head.run(*case.command, timeout=900)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights identical on all 4 ranks" in done.stdout
    assert workloads.losses(done.stdout)[-1] < workloads.losses(done.stdout)[0] / 3
    workloads.nothing_left(made)
    if case.alone is not None:
        (expected,) = workloads.alone(
            tmp_path, (case.template, case.alone), python=str(venv / "bin/python"), env={**env, **ON_CPU}
        ).values()
        assert workloads.accuracy(done.stdout) == pytest.approx(workloads.accuracy(expected), abs=case.tolerance)
        if case.losses is not None:
            assert workloads.losses(done.stdout) == pytest.approx(workloads.losses(expected), rel=case.losses)


def test_shards_of_a_checkpoint_written_by_all_ranks_resume_exactly(
    nodes: NodeFactory, head_env: dict[str, str], tmp_path: Path
) -> None:
    made = nodes(2)
    (tmp_path / "project").mkdir()
    head = Head(tmp_path / "project", head_env)
    workloads.copy(head, "checkpoint_resume", workloads.workers(made))
    there = ["--directory", f"{SHARED}/shards"]
    again = typed("clusterctl up -- --sharded --resume CHECKPOINT", CHECKPOINT=f"{SHARED}/shards/step-00000060")

    whole = head.run(*typed("clusterctl up -- --sharded"), *there, "--keep", "9", timeout=900)
    resumed = head.run(*again, *there, timeout=900)

    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "at step 60" in resumed.stdout
    assert _weights(resumed.stdout) == _weights(whole.stdout)


def _weights(said: str) -> str:
    return re.findall(r"final weights (\w+)", said)[-1]
