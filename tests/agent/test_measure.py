"""The program of deep checks, with real torch: a rank that dies becomes a line of its node, and the others go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.inject import install_shim
from clusterctl.health.deep.program_output import LINE_MARK, read_program_lines
from tests.lab.waiting import wait_for

pytestmark = pytest.mark.torch
SETTINGS = {"mark": LINE_MARK, "share": 0.25, "repeats": 2, "window_s": 0.05, "limit_s": 20, "start_limit_s": 90}


def start(
    folder: Path, ranks: int, rounds: Sequence[Sequence[Sequence[int]]], *path: str
) -> list[subprocess.Popen[bytes]]:
    """Start a guard for each rank, one on each node; the output of rank R goes to the file R."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([install_shim(str(folder / "shim")), *path]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-m", "_clusterctl_measure", json.dumps({**SETTINGS, "rounds": rounds})]
    guards = []
    for rank in range(ranks):
        env = {**shared, "RANK": str(rank), "GROUP_RANK": str(rank)}
        with (folder / str(rank)).open("wb") as output:
            guards.append(subprocess.Popen(argv, env=env, stdout=output))
    return guards


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    return read_program_lines((folder / str(rank)).read_bytes())


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_reported_and_the_others_keep_their_results(tmp_path: Path) -> None:
    guards = start(tmp_path, 3, [[[0, 1]], [[0, 2]], [[0, 1, 2]]])
    try:
        wait_for(lambda: any(line.get("begin") == "gemm" for line in lines(tmp_path, 1)), 120, "work of rank 1")
        (child,) = list_children(guards[1].pid)
        os.kill(child, signal.SIGKILL)
        codes = [guard.wait(120) for guard in guards]
    finally:
        for guard in guards:
            guard.kill()

    assert codes == [0, 0, 0]
    failed = [line for line in lines(tmp_path, 1) if line.get("step") == "failed"]
    assert [(line["reason"], line["is_late"]) for line in failed] == [("the process was killed by SIGKILL", False)]
    timed = [(line["round"], line["group"]) for line in lines(tmp_path, 0) if line.get("step") == "round"]
    assert timed == [(1, [0, 2]), (2, [0, 2])]
    digests = [{line["digest"] for line in lines(tmp_path, rank) if line.get("step") == "bits"} for rank in (0, 2)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 2


def test_a_python_without_torch_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    (guard,) = start(tmp_path, 1, [], str(tmp_path))
    assert guard.wait(100) == 0
    (line,) = lines(tmp_path, 0)
    assert (line["during"], line["reason"]) == ("start", "exit code 1: ImportError: no torch here")
