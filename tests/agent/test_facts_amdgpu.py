"""What the files of AMD's driver are taken to say: facts that are written as the kernel would are read again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.facts import amdgpu, amdgpu_events, amdgpu_metrics, collect, driver, kernel_log
from tests import fake_amdgpu
from tests.unit.health.machines import amd

HIDDEN = 1
INIT_NAMESPACE = "pid:[4026531836]"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(INIT_NAMESPACE)
    return tmp_path


def mi300x() -> dict[str, Any]:
    return amd.group([amd.mi300x(i) for i in range(8)])


def mi250x() -> dict[str, Any]:
    return amd.group([amd.mi250x(i) for i in range(8)])


@pytest.mark.parametrize("group", [mi300x(), mi250x()], ids=["MI300X", "MI250X"])
def test_facts_of_healthy_gpus_are_what_their_files_say(root: Path, group: dict[str, Any]) -> None:
    fake_amdgpu.write(root, group)
    assert amdgpu.collect(str(root), wanted=True) == group
