"""What a machine tells of itself to anybody: limits, RDMA ports, libraries, the environment, and counted errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.facts import collect_facts, host, host_network, kernel_errors
from clusterctl.agent.linux import syscalls

ROOT_USER = {"proc/self/uid_map": "         0          0 4294967295", "proc/self/status": "CapEff:\t000001ffffffffff"}
CONTAINER = {**ROOT_USER, "proc/self/status": "Name:\tsh\nCapEff:\t00000000a80425fb"}
ROOTLESS = {**ROOT_USER, "proc/self/uid_map": "         0       1000          1"}


def tree(root: Path, files: dict[str, str], links: dict[str, str] | None = None) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    for name, target in (links or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(root / target)
    return str(root)


# --- limits, memory, processors, clock


@pytest.mark.parametrize(
    ("files", "asked"),
    [(ROOT_USER, False), (CONTAINER, True), (ROOTLESS, True), ({}, True)],
    ids=["root", "root of a container", "root of a user namespace", "unknown"],
)
def test_who_may_pin_any_memory_has_no_limit_of_it(tmp_path: Path, files: dict[str, str], asked: bool) -> None:
    found = host.collect_limits(tree(tmp_path, files))
    here = subprocess.run(["bash", "-c", "ulimit -l"], capture_output=True, text=True, check=True).stdout.strip()
    assert found["memlock"] == (None if not asked or here == "unlimited" else int(here) * 1024)


def test_nobody_waits_to_see_whether_an_empty_swap_space_is_used(tmp_path: Path) -> None:
    swap = {"proc/meminfo": "SwapTotal: 50 kB\nSwapFree: 50 kB", "proc/vmstat": "pswpin 7\npswpout 9"}
    assert host.collect_memory(tree(tmp_path, swap))["swap_rate"] == 0.0
    swap["proc/meminfo"] = "SwapTotal: 50 kB\nSwapFree: 20 kB"
    assert host.collect_memory(tree(tmp_path, swap))["swap_rate"] == 0
    (tmp_path / "proc/vmstat").unlink()
    assert host.collect_memory(str(tmp_path))["swap_rate"] is None


def test_a_driver_that_sets_clocks_by_itself_is_asked_what_it_prefers(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu{}/cpufreq/"
    files = {base.format(n) + "scaling_governor": "powersave" for n in range(2)}
    files |= {base.format(n) + "energy_performance_preference": "balance_performance" for n in range(2)}
    files[base.format(0) + "scaling_driver"] = "intel_pstate"
    found = host.collect_processors(tree(tmp_path, files))
    assert (found["governors"], found["preferences"]) == ({"powersave": 2}, {"balance_performance": 2})
    assert found["frequency_driver"] == "intel_pstate"


def test_the_kernel_tells_anybody_how_wrong_the_clock_may_be() -> None:
    program = "from clusterctl.agent.linux import syscalls; print(syscalls.read_clock_error())"
    nobody = [] if os.geteuid() else ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*nobody, sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert 0 <= float(done.stdout) <= 16.0
    assert syscalls.read_clock_error() == pytest.approx(float(done.stdout), abs=1.0)


# --- RDMA

CARD = "sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0"
PORT = f"{CARD}/infiniband/mlx5_0"
PORTS = {
    f"{PORT}/fw_ver": "28.39.1002",
    f"{PORT}/board_id": "MT_0000000838",
    f"{PORT}/ports/1/state": "4: ACTIVE",
    f"{PORT}/ports/1/phys_state": "5: LinkUp",
    f"{PORT}/ports/1/link_layer": "InfiniBand",
    f"{PORT}/ports/1/gids/0": "fe80:0000:0000:0000:a088:c203:005c:1f2a",
    f"{CARD}/current_link_width": "8",
    f"{CARD}/max_link_width": "16",
    "sys/devices/pci0000:15/0000:15:01.0/max_link_width": "16",
    "sys/devices/pci0000:15/0000:15:01.0/vendor": "0x8086",
}
LINKS = {
    "sys/class/infiniband/mlx5_0": PORT,
    f"{PORT}/device": CARD,
    f"{CARD}/driver": "sys/bus/pci/drivers/mlx5_core",
}


def test_a_port_tells_its_board_its_driver_and_its_lanes(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/drivers/mlx5_core").mkdir(parents=True)
    (port,) = host_network.list_rdma_ports(tree(tmp_path, PORTS, LINKS))
    assert (port["device"], port["port"], port["state"], port["gids"]) == ("mlx5_0", 1, "ACTIVE", 1)
    assert (port["board"], port["driver"], port["pci"]) == ("MT_0000000838", "mlx5_core", "0000:18:00.0")
    assert (port["width"], port["max_width"], port["slot_width"]) == (8, 16, 16)


# --- errors that hardware has counted

QUIET = "RxErr 0\nBadTLP 0\nTOTAL_ERR_COR 0"


def test_errors_of_a_card_of_the_port_above_and_of_its_root_port_are_told_once(tmp_path: Path) -> None:
    root, switch, port = "sys/devices/pci0000:15", "0000:15:01.0/0000:16:00.0", "0000:17:04.0"
    gpu, nic = (f"{root}/{switch}/{port}/0000:{bus}:00.0" for bus in (18, 19))
    files = {
        f"{gpu}/aer_dev_correctable": "RxErr 12\nBadTLP 3\nTOTAL_ERR_COR 15",
        f"{gpu}/aer_dev_nonfatal": "Undefined 0\nCmpltTO 2\nTOTAL_ERR_NONFATAL 2",
        f"{nic}/aer_dev_correctable": QUIET,
        f"{root}/{switch}/{port}/aer_dev_correctable": QUIET,
        f"{root}/{switch}/aer_dev_correctable": "RxErr 99\nTOTAL_ERR_COR 99",
        f"{root}/0000:15:01.0/aer_dev_fatal": "DLP 1\nTOTAL_ERR_FATAL 1",
        "sys/devices/system/edac/mc/mc0/ce_count": "5",
        "sys/devices/system/edac/mc/mc0/ue_count": "0",
        "sys/devices/system/edac/mc/mc0/seconds_since_reset": "3600",
        "sys/devices/system/edac/mc/power/control": "auto",
    }
    links = {
        "sys/bus/pci/drivers/nvidia/0000:18:00.0": gpu,
        "sys/class/infiniband/mlx5_0/device": nic,
        "sys/class/net/eth0/device": nic,
        "sys/bus/pci/drivers/nvidia/module": root,
    }
    found = kernel_errors.collect_hardware_errors(tree(tmp_path, files, links))
    told = {entry["address"]: entry for entry in found["pcie"]}
    # The switch between is nobody's own port.
    assert set(told) == {"0000:18:00.0", "0000:17:04.0", "0000:15:01.0", "0000:19:00.0"}
    assert told["0000:18:00.0"] == {
        "address": "0000:18:00.0",
        "of": "GPU 0000:18:00.0",
        "correctable": {"RxErr": 12, "BadTLP": 3},
        "nonfatal": {"CmpltTO": 2},
        "fatal": {},
    }
    assert (told["0000:15:01.0"]["of"], told["0000:15:01.0"]["fatal"]) == ("above GPU 0000:18:00.0", {"DLP": 1})
    assert found["memory"] == [{"controller": "mc0", "corrected": 5, "uncorrected": 0, "seconds": 3600}]


def test_a_machine_that_counts_no_errors_has_none_to_tell(tmp_path: Path) -> None:
    assert kernel_errors.collect_hardware_errors(tree(tmp_path, {})) == {"pcie": [], "memory": []}


# --- libraries and NCCL


def test_a_library_is_found_where_the_loader_would_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    root = tree(tmp_path, {path: "", "etc/ld.so.cache": f"glibc-ld.so.cache1.1\0libibverbs.so.1\0/{path}\0other\0"})
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert host.find_library("libibverbs.so.1", root) == f"/{path}"
    (tmp_path / path).unlink()
    assert host.find_library("libibverbs.so.1", root) is None
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere:/opt/rdma/")
    tree(tmp_path, {"opt/rdma/libibverbs.so.1": ""})
    assert host.find_library("libibverbs.so.1", root) == "/opt/rdma/libibverbs.so.1"


def test_the_c_library_of_this_machine_is_found() -> None:
    found = host.find_library("libc.so.6")
    assert found is not None
    assert Path(found).exists()


@pytest.mark.parametrize(
    ("package", "preload", "version", "origin"),
    [
        ("2.21.5", None, "2.21.5", "package"),
        ("2.21.5", "/opt/nccl/libnccl.so.2.27.7", "2.27.7", "/opt/nccl/libnccl.so.2.27.7"),
        (None, None, "2.23.4", "/usr/lib64/libnccl.so.2"),
    ],
    ids=["torch from PyPI", "preloaded", "NVIDIA's container"],
)
def test_the_nccl_that_torch_would_load_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str | None,
    preload: str | None,
    version: str,
    origin: str,
) -> None:
    lib = "usr/lib64/libnccl.so.2"
    root = tree(tmp_path, {f"{lib}.23.4": "", "opt/nccl/libnccl.so.2.27.7": ""}, {lib: f"{lib}.23.4"})
    site = tmp_path / "site"
    (site / f"nvidia_nccl_cu12-{package}.dist-info" if package else site).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("LD_PRELOAD", preload or "")
    found = host.collect_versions(root)
    assert (found["nccl"], found["nccl_from"]) == (version, origin)


def test_the_way_of_nccl_to_other_nodes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/amazon/ofi-nccl/lib")
    root = tree(tmp_path, {"opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so": ""})
    assert host.collect_versions(root)["net_plugin"] is None
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    assert host.collect_versions(root)["net_plugin"] == "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
    monkeypatch.setenv("NCCL_NET_PLUGIN", "none")
    assert host.collect_versions(root)["net_plugin"] is None


# --- the environment


def told(root: str, salt: str = "s") -> dict[str, Any]:
    return host.collect_environment(root, salt)


def test_values_that_could_hide_something_are_told_as_hashes_that_nodes_of_one_look_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, {})
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/a/lib:/usr/local/cuda/lib64")
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_0,mlx5_1")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    first, salted = told(root), told(root, "another look")
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/b/lib:/usr/local/cuda/lib64")
    other = told(root)
    assert {name: first["env"][name] for name in ("LD_LIBRARY_PATH", "NCCL_SECRET_TOKEN")} == {
        "LD_LIBRARY_PATH": None,
        "NCCL_SECRET_TOKEN": None,
    }
    assert (first["env"]["NCCL_IB_HCA"], first["env"]["NCCL_IB_DISABLE"]) == ("=mlx5_0,mlx5_1", "1")
    assert "hunter2" not in str(first)
    # The homes of two users, or of two machines, are no difference.
    assert first["env_hashes"]["LD_LIBRARY_PATH"] == other["env_hashes"]["LD_LIBRARY_PATH"]
    assert first["env_hashes"]["NCCL_SECRET_TOKEN"] != salted["env_hashes"]["NCCL_SECRET_TOKEN"]


def test_nccl_takes_from_its_files_what_the_environment_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    monkeypatch.setenv("NCCL_NET", "Socket")
    files = {
        "etc/nccl.conf": "# ours\nNCCL_IB_HCA=mlx5_0\nNCCL_NET=IB\nNCCL_IB_DISABLE=0",
        "home/.nccl.conf": "NCCL_IB_DISABLE=1",
    }
    found = told(tree(tmp_path, files))["env"]
    assert (found["NCCL_IB_HCA"], found["NCCL_NET"], found["NCCL_IB_DISABLE"]) == ("mlx5_0", "Socket", "1")


# --- where a run writes


def test_the_folder_of_checkpoints_is_measured_and_written_to_and_the_newest_one_is_weighed(tmp_path: Path) -> None:
    for step, sizes in ((1, (10, 20)), (2, (1000, 2000, 0))):
        folder = tmp_path / f"ckpt/run-7/step-{step}"
        folder.mkdir(parents=True)
        for number, size in enumerate(sizes):
            (folder / f"{number}.distcp").write_bytes(b"x" * size)
        (folder / ".metadata").write_bytes(b"m" * 5)
        os.utime(folder / ".metadata", (step, step))
    (tmp_path / "ckpt/run-7/step-3").mkdir()

    request = {"groups": ["disk", "checkpoint"], "workdir": str(tmp_path), "checkpoints": "ckpt/*/step-*"}
    told = {name: group["data"] for name, group in collect_facts(request)["groups"].items()}

    assert told["checkpoint"] == {"path": f"{tmp_path}/ckpt/run-7/step-2", "bytes": 3005}
    (place,) = [entry for entry in told["disk"]["paths"] if entry["what"] == "checkpoints"]
    assert (place["path"], place["writable"]) == (f"{tmp_path}/ckpt", True)


def test_where_there_is_no_checkpoint_yet_there_is_none_to_weigh(tmp_path: Path) -> None:
    request = {"groups": ["checkpoint"], "workdir": str(tmp_path), "checkpoints": "ckpt/*.pt"}
    assert collect_facts(request)["groups"]["checkpoint"]["data"] == {"path": None, "bytes": None}


def test_who_names_no_checkpoints_is_not_asked_for_them(tmp_path: Path) -> None:
    assert "checkpoint" not in collect_facts({"groups": ["disk", "checkpoint"], "workdir": str(tmp_path)})["groups"]
