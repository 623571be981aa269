"""How many GPUs a node has, and by what name each is claimed: read from the files of their drivers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.linux import gpus
from tests import fake_amdgpu
from tests.unit.health.machines import amd

UUID = "GPU-0f1e2d3c-0000-1111-2222-333344445555"


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "dev").mkdir()
    return str(tmp_path)


def of_nvidia(root: str, cards: int, nodes: int) -> None:
    """Some cards that the driver has, and device nodes of as many of them as are given to us."""
    for i in range(cards):
        place = Path(root) / f"proc/driver/nvidia/gpus/0000:{i:02x}:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text(f"Model: \t NVIDIA L4\nGPU UUID: \t {UUID[:-1]}{i}\n")
    for i in range(nodes):
        (Path(root) / f"dev/nvidia{i}").touch()


def of_amd(root: str, first: dict[str, Any] | None = None) -> dict[str, Any]:
    devices = [amd.mi300x(i) for i in range(8)]
    devices[0]["v"].update(first or {})
    group = amd.group(devices)
    fake_amdgpu.write(Path(root), group)
    return group


def test_a_machine_without_gpus_has_none(root: str) -> None:
    assert gpus.count(root) == {"count": 0, "indices": [], "source": "none", "vendor": None}
    assert gpus.lock_names(root) == {}


def test_gpus_of_nvidia_are_those_that_are_given_to_us(root: str) -> None:
    of_nvidia(root, cards=8, nodes=2)
    assert gpus.count(root) == {"count": 2, "indices": [0, 1], "source": "dev", "vendor": "nvidia"}


def test_gpus_of_amd_are_counted_as_their_compute_driver_has_them(root: str) -> None:
    of_amd(root)
    assert gpus.count(root) == {"count": 8, "indices": list(range(8)), "source": "kfd", "vendor": "amd"}


def test_gpus_of_nvidia_come_before_those_of_amd(root: str) -> None:
    of_amd(root)
    of_nvidia(root, cards=2, nodes=2)
    assert (gpus.count(root)["count"], gpus.count(root)["vendor"]) == (2, "nvidia")


def test_a_gpu_of_amd_is_claimed_by_its_number_or_else_by_its_place(root: str) -> None:
    of_amd(root, {"uuid": "GPU-0000000000000000"})
    names = gpus.lock_names(root)
    assert (names[0], names[1]) == ("pci-0000:05:00.0-0", "GPU-1000000000000001")
    assert len(set(names.values())) == 8


def test_a_memory_bank_that_cannot_be_read_hides_no_gpu(root: str) -> None:
    of_amd(root)
    (Path(root) / "sys/class/kfd/kfd/topology/nodes/2/mem_banks/0/properties").unlink()
    assert gpus.count(root)["count"] == 8
