"""How many cores the control groups of a process leave it, from the files of a machine as its kernel shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.agent import cgroup

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
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert cgroup.cpu_limit(str(tmp_path)) == expected
