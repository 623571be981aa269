"""GPUs while an attempt goes on and when it is over, on one node whose GPUs a library plays."""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.transport.agent_archive import load_agent_archive
from tests import fake_nvml
from tests.agent.talk import SECONDS

if TYPE_CHECKING:
    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

GPU = 6
GONE = {"pid": 4_194_301, "used": 3 << 30}
"""A pid above any that a machine gives out: nobody sees such a process."""


@pytest.fixture
def scene(tmp_path: Path) -> fake_nvml.Scenario:
    return fake_nvml.Scenario(tmp_path / "scene.json", 8)


@pytest.fixture
def talk(node: Node, scene: fake_nvml.Scenario, tmp_path: Path) -> Talk:
    archive = tmp_path / "agent.pyz"
    archive.write_bytes(load_agent_archive().data)
    return node.talk(main=[sys.executable, "-I", "-S", str(archive)], env=scene.environment())


def launch(node: Node, talk: Talk, script: str, **more: Any) -> None:
    node.launch(["/bin/sh", "-c", script], talk=talk, gpus=[GPU], **more)


def samples(talk: Talk) -> list[dict[str, Any]]:
    lines = bytes(talk.files.get("samples.jsonl", b"")).split(b"\n")[:-1]
    return [value for line in lines if (value := json.loads(line))["kind"] == "health"]


def alarms(talk: Talk) -> list[tuple[str, int | None, str]]:
    return [(event["code"], event["gpu"], event["message"]) for event in talk.of("alarm")]


def test_an_attempt_whose_gpu_memory_comes_free_ends_without_a_word(
    node: Node, talk: Talk, scene: fake_nvml.Scenario
) -> None:
    scene.gpu(GPU, compute_procs=[GONE], mem_used=3 << 30)
    launch(node, talk, "exit 0")
    talk.wait_for("exited")
    scene.gpu(GPU, compute_procs=[], mem_used=0)
    talk.wait_for("swept")
    assert alarms(talk) == []


@pytest.mark.parametrize("other", [5, GPU], ids=["a GPU of others", "a GPU of the run"])
def test_who_holds_memory_and_will_not_let_go_is_named_at_once(
    node: Node, talk: Talk, scene: fake_nvml.Scenario, other: int
) -> None:
    scene.gpu(other, compute_procs=[{"pid": os.getpid(), "used": 3 << 30}], mem_used=3 << 30)
    launch(node, talk, "exit 0")
    talk.wait_for("swept")
    name = (Path("/proc") / str(os.getpid()) / "comm").read_text().strip()
    words = f"3.0 of 80 GiB still in use, held by pid {os.getpid()} ({name}, {pwd.getpwuid(os.getuid()).pw_name})"
    assert alarms(talk) == ([("gpu_memory", GPU, words)] if other == GPU else [])


def test_a_driver_that_hangs_does_not_keep_an_attempt_open(node: Node, talk: Talk, scene: fake_nvml.Scenario) -> None:
    scene.gpu(GPU, hang=["*"])
    launch(node, talk, "exit 0", health_seconds=0.5)
    talk.wait_for("swept", seconds=SECONDS)
    words = "cannot check whether GPU memory is free: the GPU driver does not answer"
    assert alarms(talk) == [("gpu_memory", None, words)]


def test_the_death_of_the_sampler_is_an_alarm(node: Node, talk: Talk) -> None:
    launch(node, talk, "exec sleep 600", health_seconds=0.5)
    # On a busy machine the first look may come before the driver is open.
    (seen, *_) = talk.until(lambda: [sample for sample in samples(talk) if sample["gpus"]])
    assert [gpu["gpu"] for gpu in seen["gpus"]] == list(range(8))
    children = [
        pid for pid in proc.list_pids() if _parent(pid) == node.supervisor() and b"\0sampler\0" in _command(pid)
    ]
    os.kill(children[0], signal.SIGKILL)
    talk.wait_for("alarm")
    words = "the sampler of GPUs and machine has ended; the supervisor starts it again"
    assert alarms(talk) == [("sampler_died", None, words)]
    talk.ask(Command.STOP, **node.where, grace=0.0, reason="cancelled")
    talk.wait_for("swept")


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
