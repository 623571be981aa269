"""TorchX starts, follows, lists and ends runs by its own commands: the scheduler `clusterctl`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.heavy.conftest import Environment

pytestmark = pytest.mark.timeout(1800)

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("rank", dist.get_rank(), "sum", int(ones), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """The environment, as `environment` makes it."""

    template: str = "torchx"
    installs: tuple[tuple[str, ...], ...] = (("torchx==0.7.*",), ("--no-deps", "--no-build-isolation", str(REPOSITORY)))


@pytest.fixture
def torchx(environment: Environment, tmp_path: Path) -> list[str]:
    """The command, beside the torchrun of this interpreter, in a folder with a cluster file of two local nodes."""
    venv = environment("torchx")
    (tmp_path / "hello.py").write_text(SCRIPT)
    (tmp_path / "cluster.yaml").write_text(
        f"version: 1\ndefaults: {{transport: local, gpus: 0, python: {venv}/bin/python}}\nhosts: [host: a, host: b]\n"
    )
    variables = [
        f"XDG_STATE_HOME={tmp_path}/state",
        f"PATH={venv}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    ]
    return ["env", *variables, str(venv / "bin/torchx")]


def run(torchx: list[str], folder: Path, *words: str) -> str:
    done = subprocess.run([*torchx, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout + done.stderr


STARTS = ("run", "-s", "clusterctl", "-cfg", "health=False")


@pytest.mark.parametrize("case", [Case()], ids=["torchx"])
def test_an_application_of_torchx_runs_on_all_nodes(torchx: list[str], tmp_path: Path, case: Case) -> None:
    said = run(torchx, tmp_path, *STARTS, "--wait", "--log", "dist.ddp", "-j", "2x2", "--script", "hello.py")

    assert "Job finished: SUCCEEDED" in said
    assert sorted(re.findall(r"rank \d sum \d", said)) == [f"rank {rank} sum 4" for rank in range(4)], said


@pytest.mark.parametrize("case", [Case()], ids=["torchx"])
def test_torchx_lists_and_cancels_a_run(torchx: list[str], tmp_path: Path, case: Case) -> None:
    said = run(torchx, tmp_path, *STARTS, "utils.sh", "sleep", "600")
    handle = next(word for word in said.split() if word.startswith("clusterctl://"))

    assert f"{handle}  RUNNING" in run(torchx, tmp_path, "list", "-s", "clusterctl")
    run(torchx, tmp_path, "cancel", handle)
    wait_for(lambda: f"{handle}  CANCELLED" in run(torchx, tmp_path, "list", "-s", "clusterctl"), what="the end")


@pytest.mark.parametrize("case", [Case()], ids=["torchx"])
def test_too_many_hosts_are_refused_before_anything_starts(torchx: list[str], tmp_path: Path, case: Case) -> None:
    said = run(torchx, tmp_path, *STARTS, "dist.ddp", "-j", "3x2", "--script", "hello.py")

    assert "`hello` needs 3 hosts, and the cluster file has 2" in said
    assert not list(tmp_path.glob("state/clusterctl/runs/*"))
