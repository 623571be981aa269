"""What the files of AMD's driver are taken to say: facts that are written as the kernel would are read again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.facts import amdgpu, collect_facts, gpu_reading_base, kernel_gpu_facts, machine_sampler
from tests import fake_amdgpu
from tests.unit.health.machines import amd

GIB = 1024**3
OURS = {"comm": "python", "user": os.getuid(), "run": None, "visible": True, "agent": False}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    return tmp_path


def mi300x(**first: Any) -> dict[str, Any]:
    """Eight of them; the values given are those of the first."""
    devices = [amd.mi300x(i) for i in range(8)]
    devices[0]["v"].update(first)
    return amd.group(devices)


def mi250x() -> dict[str, Any]:
    return amd.group([amd.mi250x(i) for i in range(8)])


def seen(root: Path) -> dict[str, Any]:
    return amdgpu.collect_amdgpu(str(root), expects_gpus=True)


def gpu(root: Path, group: dict[str, Any], index: int = 0) -> Path:
    """The folder of a GPU's files."""
    return root / "sys/bus/pci/devices" / group["devices"][index]["v"]["pci"]


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(mi300x(), id="MI300X"),
        pytest.param(mi250x(), id="MI250X"),
        pytest.param(mi300x(bad_pages={"retired": 16, "pending": 8, "failed": 1}), id="bad pages"),
        pytest.param(mi300x(ras={**amd.WELL, "umc": [2, 40]}, ecc_unc=2, ecc_cor=40), id="errors"),
        pytest.param(mi300x(xgmi_links=[1] * 6 + [0]), id="a link that is down"),
        pytest.param(mi300x(procs=[{"pid": 4242, "used": 3 * GIB, "kind": "compute", **OURS}]), id="a holder"),
        pytest.param(mi300x(temp=101.0, util=97, power_w=749.0), id="hot and busy"),
        pytest.param({**mi300x(), "numa_balancing": 1}, id="NUMA balancing"),
    ],
)
def test_facts_are_what_the_files_say(root: Path, group: dict[str, Any]) -> None:
    fake_amdgpu.write(root, group)
    assert seen(root) == group


def test_a_device_node_that_is_not_there_is_told(root: Path) -> None:
    group = mi300x()
    group["dev"][1]["access"] = "absent"
    fake_amdgpu.write(root, group)
    assert seen(root)["dev"][:2] == [
        {"path": "/dev/kfd", "access": "ok"},
        {"path": "/dev/dri/renderD128", "access": "absent"},
    ]


# --- what cannot be read, and what is not to be believed


def test_counts_of_a_memory_controller_that_slept_are_not_believed(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    (gpu(root, group) / "ras/aca_umc").write_text("ue: 2097120\nce: 1048560\n")
    values = seen(root)["devices"][0]["v"]
    assert (values["ecc_unc"], values["ecc_cor"], values["ras"]["umc"]) == (0, 0, [0, 0])


def test_a_gpu_that_sleeps_is_not_woken(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    (gpu(root, group) / "power/runtime_status").write_text("suspended\n")
    (gpu(root, group) / "ras/aca_umc").write_text("ue: 7\nce: 0\n")
    first, second = seen(root)["devices"][:2]
    assert {"name", "serial", "pcie_width", "procs"} <= set(first["v"])
    assert {"temp", "ecc_unc", "util", "memory"}.isdisjoint(first["v"])
    assert first["err"] == {}
    assert "temp" in second["v"]


def test_a_gpu_that_has_fallen_off_the_bus_is_lost_and_not_asked_further(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    (gpu(root, group) / "config").write_bytes(b"\xff" * 64)
    told = seen(root)["devices"][0]
    assert (told["err"], told["codes"]) == ({"config": "lost"}, {"config": errno.ENODEV})
    assert "temp" not in told["v"]


def test_each_file_that_cannot_be_read_says_why(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    place = gpu(root, group)
    (place / "gpu_busy_percent").write_text("much\n")
    (place / "mem_info_vram_used").unlink()
    (place / "vbios_version").unlink()
    (place / "vbios_version").symlink_to("/proc/self/mem")  # reading it ends with EIO
    told = seen(root)["devices"][0]
    assert told["err"] == {"util": "failed", "memory": "unsupported", "vbios": "lost"}
    assert told["codes"] == {"util": errno.EBADMSG, "memory": errno.ENOENT, "vbios": errno.EIO}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY])
def test_a_gpu_that_is_being_reset_may_be_well_a_moment_later(number: int) -> None:
    assert gpu_reading_base.FILE_ERROR_NAMES[number] in gpu_reading_base.TRANSIENT_ERRORS


def test_a_card_without_a_name_is_named_by_its_chip(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    (gpu(root, group) / "product_name").unlink()
    told = seen(root)["devices"][0]
    assert told["v"]["name"] == "AMD gfx942 (0x74a1)"
    assert told["err"] == {}


def test_a_gpu_that_uses_the_main_memory_says_how_much_of_that_is_in_use(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    (gpu(root, group) / "mem_info_vram_total").write_text(f"{GIB // 2}\n")
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    assert seen(root)["devices"][0]["v"]["memory"] == {"used": 102400, "total": 1024000, "version": 0}


# --- which GPUs


def test_the_graphics_of_a_processor_are_no_gpu_and_keep_their_number(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    bank = root / "sys/class/kfd/kfd/topology/nodes/2/mem_banks/0/properties"
    bank.write_text("heap_type 1\nsize_in_bytes 536870912\n")
    assert [device["index"] for device in seen(root)["devices"]] == [1, 2, 3, 4, 5, 6, 7]


def test_partitions_of_one_gpu_are_devices_with_names_of_their_own(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    shutil.copytree(nodes / "2", nodes / "10")
    place = int("05", 16) << 8 | 3 << 28
    text = (nodes / "10/properties").read_text().replace(f"location_id {int('05', 16) << 8}", f"location_id {place}")
    (nodes / "10/properties").write_text(text)
    told = seen(root)["devices"]
    assert [told[0]["v"]["uuid"], told[8]["v"]["uuid"]] == ["GPU-1000000000000000", "GPU-1000000000000000-3"]
    assert (told[8]["v"]["partition"], told[8]["v"]["pci"]) == (3, told[0]["v"]["pci"])


def test_in_a_container_nobody_is_named_by_a_number_that_is_the_machines(root: Path) -> None:
    fake_amdgpu.write(root, mi300x(procs=[{"pid": 4242, "used": GIB, "kind": "compute", **OURS}]))
    (root / "proc/self/ns/pid").unlink()
    (root / "proc/self/ns/pid").symlink_to("pid:[4026532999]")
    (held,) = seen(root)["devices"][0]["v"]["procs"]
    assert (held["pid"], held["comm"], held["visible"]) == (4242, None, False)


def test_the_link_of_a_card_with_bridges_of_its_own_is_that_to_the_slot(root: Path) -> None:
    port = root / "sys/devices/pci0000:00/0000:00:01.1"
    outer, inner, card = (port / "0000:01:00.0", port / "0000:01:00.0/0000:02:00.0", "0000:03:00.0")
    for place, vendor, width, most in (
        (port, "0x1022", 16, 16),
        (outer, "0x1002", 8, 16),
        (inner, "0x1002", 16, 16),
        (inner / card, "0x1002", 16, 16),
    ):
        place.mkdir(parents=True)
        (place / "vendor").write_text(vendor + "\n")
        (place / "class").write_text("0x038000\n" if place.name == card else "0x060400\n")
        (place / "current_link_width").write_text(f"{width}\n")
        (place / "max_link_width").write_text(f"{most}\n")
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices" / card).symlink_to(inner / card)
    (found,) = kernel_gpu_facts.collect_driver(str(root))["pci"]
    assert (found["vendor"], found["width"], found["max_width"], found["slot_width"]) == ("amd", 8, 16, 16)


@pytest.mark.parametrize(
    ("address", "vendor", "kind", "known"),
    [
        ("0000:05:00.0", "0x1002", "0x120000", "amd"),
        ("0000:c1:00.0", "0x1002", "0x038000", "amd"),
        ("0000:3a:00.0", "0x8086", "0x038000", "intel"),
        ("0000:00:02.0", "0x8086", "0x030000", None),
        ("0000:c1:00.0", "0x19e5", "0x120000", "ascend"),
        ("0000:41:00.0", "0x1a03", "0x030000", None),
    ],
)
def test_gpus_are_known_by_vendor_and_class(
    root: Path, address: str, vendor: str, kind: str, known: str | None
) -> None:
    place = root / "sys/bus/pci/devices" / address
    place.mkdir(parents=True)
    (place / "vendor").write_text(vendor + "\n")
    (place / "class").write_text(kind + "\n")
    assert [entry["vendor"] for entry in kernel_gpu_facts.collect_driver(str(root))["pci"]] == (
        [known] if known else []
    )


# --- what holds the clocks down


def test_clocks_are_held_down_where_a_counter_rises_between_two_readings() -> None:
    values = mi300x()["devices"][0]["v"]
    calm, hot = (amdgpu.FirmwareMetrics(fake_amdgpu.metrics(values, held=held)) for held in (5, 9))
    assert amdgpu.list_slowdown_causes(calm, calm) == []
    assert amdgpu.list_slowdown_causes(calm, hot) == ["socket temperature"]


def test_older_firmware_says_at_once_what_holds_the_clocks_down() -> None:
    values = mi250x()["devices"][0]["v"]
    hot = amdgpu.FirmwareMetrics(fake_amdgpu.metrics({**values, "slowdown": ["temperature"]}))
    assert amdgpu.list_slowdown_causes(hot, hot) == ["temperature"]
    assert hot.xgmi_links is None


@pytest.mark.parametrize("data", [b"", b"\x10\x00\x01\x03", b"\x08\x00\x02\x04" + b"\xff" * 4, b"\xff" * 300], ids=repr)
def test_a_table_that_nobody_knows_tells_nothing(data: bytes) -> None:
    table = amdgpu.FirmwareMetrics(data)
    assert (amdgpu.list_slowdown_causes(table, table), table.xgmi_links) == (None, None)


# --- the probe and the sampler


def test_the_probe_asks_amds_driver_only_where_there_is_one(root: Path) -> None:
    request = {"root": str(root), "groups": ["amdgpu", "driver"]}
    assert set(collect_facts(request)["groups"]) == {"driver"}
    fake_amdgpu.write(root, mi300x())
    told = collect_facts(request)["groups"]["amdgpu"]
    assert (told["status"], told["data"]) == ("ok", mi300x())


def test_a_sample_has_what_stats_and_judges_read(root: Path) -> None:
    fake_amdgpu.write(root, mi250x())
    told = machine_sampler.sample_gpus(amdgpu.AmdGpuReader(str(root)))
    assert (told["status"], len(told["gpus"])) == ("ok", 8)
    assert {
        "gpu": 0, "vendor": "amd", "util": 0, "mem_used": 11014144, "mem_total": 68702699520, "temp_c": 35.0,
        "mem_temp_c": 41.0, "power_w": 90.0, "ecc_unc": 0, "temp_limit_c": 100.0, "slowdown": [], "err": {},
    }.items() <= told["gpus"][0].items()  # fmt: skip
    assert told["gpus"][1]["power_w"] is None


def test_a_sample_compares_counters_and_links_with_the_one_before(root: Path) -> None:
    group = mi300x()
    fake_amdgpu.write(root, group)
    session = amdgpu.AmdGpuReader(str(root))
    links = machine_sampler.LostLinkCounter(session)
    first = machine_sampler.sample_gpus(session)
    values = {**group["devices"][0]["v"], "xgmi_links": [1] * 5 + [0, 0]}
    (gpu(root, group) / "gpu_metrics").write_bytes(fake_amdgpu.metrics(values, held=3))
    second = {**machine_sampler.sample_gpus(session), "xids": []}
    links.add_lost_links(second)
    assert (first["gpus"][0]["slowdown"], second["gpus"][0]["slowdown"]) == ([], ["socket temperature"])
    assert [told["links_lost"] for told in second["gpus"]] == [2, 0, 0, 0, 0, 0, 0, 0]


def test_who_holds_memory_after_a_run_is_told_like_nvidias(root: Path) -> None:
    fake_amdgpu.write(root, mi300x(procs=[{"pid": 4242, "used": GIB, "kind": "compute", **OURS}]))
    (held,) = amdgpu.AmdGpuReader(str(root)).read_memory_and_processes([0])
    assert (held["gpu"], held["version"], [entry["pid"] for entry in held["procs"]]) == (0, 1, [4242])


def test_a_probe_in_a_process_of_its_own_finds_them_too(root: Path) -> None:
    fake_amdgpu.write(root, mi300x())
    asked = json.dumps({"root": str(root), "groups": ["amdgpu", "driver"]})
    argv = [sys.executable, "-m", "clusterctl.agent", "facts"]
    done = subprocess.run(argv, input=asked, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["groups"]["amdgpu"]["data"]["count"] == 8
