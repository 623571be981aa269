"""Cores, memory and processes that the control groups of a process leave it, as the kernel shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import cgroup

if TYPE_CHECKING:
    from pathlib import Path

V2 = ("proc/self/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
V1 = (
    "proc/self/mounts",
    """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
""",
)
TOP1 = "sys/fs/cgroup/cpu,cpuacct"


def own(*lines: str) -> tuple[str, str]:
    return "proc/self/cgroup", "".join(f"{line}\n" for line in lines)


def quota(folder: str, quota_us: int) -> list[tuple[str, str]]:
    return [(f"{folder}/cpu.cfs_quota_us", f"{quota_us}\n"), (f"{folder}/cpu.cfs_period_us", "100000\n")]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param([], None, id="nothing is mounted"),
        pytest.param(
            [V2, own("0::/"), ("sys/fs/cgroup/cgroup.procs", "")], None, id="version 2: the root has no limit"
        ),
        pytest.param([V2, own("0::/"), ("sys/fs/cgroup/cpu.max", "1600000 100000\n")], 16.0, id="version 2: container"),
        pytest.param([V2, own("0::/a/b"), ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")], None, id="version 2: max"),
        pytest.param(
            [
                V2,
                own("0::/a/b"),
                ("sys/fs/cgroup/a/cpu.max", "250000 100000\n"),
                ("sys/fs/cgroup/a/b/cpu.max", "800000 100000\n"),
            ],
            2.5,
            id="version 2: the least of those above",
        ),
        pytest.param(
            [V2, own("0::/../../b"), ("sys/fs/cgroup/cpu.max", "400000 100000\n")],
            4.0,
            id="version 2: a group outside of the namespace",
        ),
        pytest.param([V2, own("0::/a"), ("sys/fs/cgroup/a/cpu.max", "")], None, id="version 2: an empty file"),
        pytest.param([V1, own("3:cpu,cpuacct:/a", "0::/"), *quota(f"{TOP1}/a", -1)], None, id="version 1: no limit"),
        pytest.param(
            [V1, own("3:cpu,cpuacct:/a", "0::/"), *quota(f"{TOP1}/a", 50000)], 0.5, id="version 1: half a core"
        ),
        pytest.param(
            [V1, own("3:cpu,cpuacct:/a/b", "0::/"), *quota(f"{TOP1}/a", 200000), *quota(f"{TOP1}/a/b", -1)],
            2.0,
            id="version 1: of the parent",
        ),
        pytest.param(
            [V1, own("3:cpu,cpuacct:/docker/4f1e", "0::/"), *quota(TOP1, 600000)],
            6.0,
            id="version 1: a container that sees its own group as the root",
        ),
    ],
)
def test_the_limit_is(tmp_path: Path, files: list[tuple[str, str]], expected: float | None) -> None:
    write(tmp_path, files)
    assert cgroup.read_cpu_limit(str(tmp_path)) == expected


def write(root: Path, files: list[tuple[str, str]]) -> None:
    for name, text in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


GIB = 1 << 30
V1_ALL = (
    "proc/self/mounts",
    """\
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0
""",
)
OLD = "sys/fs/cgroup/memory"


def memory2(folder: str, limit: int | str, used: int, idle: int = 0) -> list[tuple[str, str]]:
    stat = f"anon 1\ninactive_file {idle}\nactive_file 9\n"
    return [
        (f"{folder}/memory.max", f"{limit}\n"),
        (f"{folder}/memory.current", f"{used}\n"),
        (f"{folder}/memory.stat", stat),
    ]


def memory1(folder: str, limit: int, used: int, idle: int = 0) -> list[tuple[str, str]]:
    return [
        (f"{folder}/memory.limit_in_bytes", f"{limit}\n"),
        (f"{folder}/memory.usage_in_bytes", f"{used}\n"),
        (f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {idle}\n"),
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param([], None, id="nothing is mounted"),
        pytest.param([V2, own("0::/a"), *memory2("sys/fs/cgroup/a", "max", 7)], None, id="version 2: max"),
        pytest.param(
            [
                V2,
                own("0::/a/b"),
                *memory2("sys/fs/cgroup/a", 8 * GIB, 7 * GIB),
                *memory2("sys/fs/cgroup/a/b", 9 * GIB, 0),
            ],
            (8 * GIB, 1 * GIB),
            id="version 2: the least of those above",
        ),
        pytest.param(
            [V2, own("0::/"), *memory2("sys/fs/cgroup", 8 * GIB, 7 * GIB, idle=3 * GIB)],
            (8 * GIB, 4 * GIB),
            id="version 2: files that lie in memory are no loss",
        ),
        pytest.param(
            [V1_ALL, own("4:memory:/a"), *memory1(f"{OLD}/a", 0x7FFFFFFFFFFFF000, 7)], None, id="version 1: no limit"
        ),
        pytest.param(
            [V1_ALL, own("4:memory:/slurm/uid_7/job_1"), *memory1(f"{OLD}/slurm/uid_7/job_1", 64 * GIB, 2 * GIB, GIB)],
            (64 * GIB, 63 * GIB),
            id="version 1: a job of Slurm",
        ),
        pytest.param(
            [V1_ALL, own("4:memory:/docker/4f1e"), *memory1(OLD, 2 * GIB, 3 * GIB)],
            (2 * GIB, 0),
            id="version 1: a container that sees its own group as the root",
        ),
    ],
)
def test_memory_is(tmp_path: Path, files: list[tuple[str, str]], expected: tuple[int, int] | None) -> None:
    write(tmp_path, files)
    assert cgroup.read_memory_limit(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param([V2, own("0::/"), ("sys/fs/cgroup/pids.max", "max\n")], None, id="version 2: max"),
        pytest.param(
            [V2, own("0::/"), ("sys/fs/cgroup/pids.max", "2048\n"), ("sys/fs/cgroup/pids.current", "48\n")],
            (2048, 2000),
            id="version 2: what podman allows",
        ),
        pytest.param(
            [V1_ALL, own("8:pids:/a"), ("sys/fs/cgroup/pids/a/pids.max", "100\n")], (100, 100), id="version 1"
        ),
    ],
)
def test_processes_are(tmp_path: Path, files: list[tuple[str, str]], expected: tuple[int, int] | None) -> None:
    write(tmp_path, files)
    assert cgroup.read_process_limit(str(tmp_path)) == expected
