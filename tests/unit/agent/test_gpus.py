"""How many GPUs a node has, and by what name each is claimed: read from the files of their drivers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.linux import gpu_devices
from tests import fake_amdgpu
from tests.unit.health.machines import amd

UUID = "GPU-0f1e2d3c-0000-1111-2222-333344445555"


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "dev").mkdir()
    return str(tmp_path)


def of_nvidia(root: str, cards: int, nodes: int, minors: bool = False) -> None:
    """Some cards that the driver has, and device nodes of as many of them as are given to us."""
    for i in range(cards):
        place = Path(root) / f"proc/driver/nvidia/gpus/0000:{i:02x}:00.0"
        place.mkdir(parents=True)
        minor = f"Device Minor: \t {cards - 1 - i}\n" if minors else ""
        (place / "information").write_text(f"Model: \t NVIDIA L4\nGPU UUID: \t {UUID[:-1]}{i}\n{minor}")
    for i in range(nodes):
        (Path(root) / f"dev/nvidia{i}").touch()


def of_amd(root: str, first: dict[str, Any] | None = None) -> dict[str, Any]:
    devices = [amd.mi300x(i) for i in range(8)]
    devices[0]["v"].update(first or {})
    group = amd.group(devices)
    fake_amdgpu.write(Path(root), group)
    return group


def test_a_machine_without_gpus_has_none(root: str) -> None:
    assert gpu_devices.count_gpus(root) == {"count": 0, "indices": [], "source": "none", "vendor": None}
    assert gpu_devices.list_machine_wide_gpu_names(root) == {}


def test_gpus_of_nvidia_are_those_that_are_given_to_us(root: str) -> None:
    of_nvidia(root, cards=8, nodes=2)
    assert gpu_devices.count_gpus(root) == {"count": 2, "indices": [0, 1], "source": "dev", "vendor": "nvidia"}


def test_gpus_of_amd_are_counted_as_their_compute_driver_has_them(root: str) -> None:
    of_amd(root)
    assert gpu_devices.count_gpus(root) == {"count": 8, "indices": list(range(8)), "source": "kfd", "vendor": "amd"}


def test_gpus_of_nvidia_come_before_those_of_amd(root: str) -> None:
    of_amd(root)
    of_nvidia(root, cards=2, nodes=2)
    assert (gpu_devices.count_gpus(root)["count"], gpu_devices.count_gpus(root)["vendor"]) == (2, "nvidia")


def test_a_gpu_of_amd_is_claimed_by_its_place(root: str) -> None:
    of_amd(root)
    names = gpu_devices.list_machine_wide_gpu_names(root)
    assert names[0] == "pci-0000:05:00.0-0"
    assert len(set(names.values())) == 8


def test_a_gpu_of_nvidia_is_claimed_by_its_place_whether_the_driver_tells_its_number_yet_or_not(root: str) -> None:
    of_nvidia(root, cards=2, nodes=2)
    before = gpu_devices.list_machine_wide_gpu_names(root)
    for file in Path(root).glob("proc/driver/nvidia/gpus/*/information"):
        file.write_text("GPU UUID: \t GPU-????????-????-????-????-????????????\n")
    assert gpu_devices.list_machine_wide_gpu_names(root) == before == {0: "pci-0000:00:00.0", 1: "pci-0000:01:00.0"}


def test_a_container_that_sees_the_places_of_all_gpus_claims_the_one_that_is_given_to_it(root: str) -> None:
    of_nvidia(root, cards=8, nodes=0, minors=True)
    (Path(root) / "dev/nvidia2").touch()
    (Path(root) / "dev/nvidiactl").touch()
    assert gpu_devices.list_machine_wide_gpu_names(root) == {0: "pci-0000:05:00.0"}


def test_a_gpu_whose_place_the_driver_hides_is_claimed_by_the_number_of_its_file(root: str) -> None:
    for minor in (10, 9):
        (Path(root) / f"dev/nvidia{minor}").touch()
    assert gpu_devices.list_machine_wide_gpu_names(root) == {0: "nvidia9", 1: "nvidia10"}


def test_a_memory_bank_that_cannot_be_read_hides_no_gpu(root: str) -> None:
    of_amd(root)
    (Path(root) / "sys/class/kfd/kfd/topology/nodes/2/mem_banks/0/properties").unlink()
    assert gpu_devices.count_gpus(root)["count"] == 8
