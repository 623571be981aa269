"""A machine that has no process or no descriptor to spare costs a sample or a sentence, not the supervisor."""

from __future__ import annotations

import errno
import gc
import os
import resource
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from clusterctl.agent.linux import proc, spawn
from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.serve import child_processes
from clusterctl.agent.supervisor import gpu_claims, supervisor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clusterctl.agent.linux.event_loop import FrameChannel
    from tests.agent.conftest import Node


def test_a_sampler_that_cannot_be_started_is_told_and_the_run_goes_on(node: Node) -> None:
    talk = node.launch(["sleep", "1000"], health_seconds=3.0)
    supervisor = node.supervisor()
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (0, before[1]))
    (alarm,) = talk.wait_for("alarm")
    assert (alarm["code"], "Too many open files" in alarm["message"]) == ("sampler_died", True)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
    node.stop(talk)
    talk.wait_for("swept")
    assert node.supervisor() == supervisor


def without_descriptors(work: Callable[[], object]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_look_at_gpu_memory_that_cannot_be_made_is_told_and_the_attempt_ends() -> None:
    loop, said = EventLoop(), []
    without_descriptors(
        lambda: gpu_claims.wait_for_gpu_memory(
            loop, [0], "run", lambda text, gpu: said.append((text, gpu)), lambda: said.append("done")
        )
    )
    assert said == [("cannot check whether GPU memory is free: Too many open files", None), "done"]


def test_who_has_no_descriptor_to_look_with_does_not_take_a_process_for_gone() -> None:
    us = proc.read_identity(os.getpid())
    assert us is not None

    def look() -> None:
        with pytest.raises(OSError, match="Too many open files"):
            proc.is_alive(us)

    without_descriptors(look)


def test_a_loop_goes_on_after_an_action_that_failed() -> None:
    failed: list[str] = []
    loop = EventLoop(lambda: failed.append("said"))
    calls: list[int] = []

    def often() -> None:
        calls.append(1)
        if len(calls) == 3:
            loop.stop()
        raise ValueError

    loop.call_repeatedly(0.01, often)
    loop.run()
    assert (len(calls), len(failed)) == (3, 3)


def test_what_stays_ready_after_its_action_failed_is_not_asked_again_at_once() -> None:
    read, write = os.pipe()
    os.write(write, b"x")
    failed: list[str] = []
    calls: list[int] = []
    loop = EventLoop(lambda: failed.append("said"))

    def fails() -> None:
        calls.append(1)
        raise ValueError

    loop.on_readable(read, fails)
    loop.call_later(1.5, loop.stop)
    loop.run()
    assert len(calls) == 2
    os.close(read)
    os.close(write)


def test_a_loop_whose_failures_nobody_wants_ends_with_the_first() -> None:
    loop = EventLoop()

    def fails() -> None:
        raise KeyError

    loop.call_later(0.0, fails)
    with pytest.raises(KeyError):
        loop.run()


def refuse_to_fork() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def start_program(given: bytes) -> object:
    running = child_processes.ChildProcesses(EventLoop(), cast("FrameChannel", SimpleNamespace(queued_bytes=0)))
    return running.start_program(
        spawn.Program(argv=[b"true"], env={}, cwd=b"/"), given, lambda *_: None, lambda _: None
    )


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda _run: start_program(b""), id="a program"),
        pytest.param(lambda _run: start_program(b"given"), id="a program with input"),
        pytest.param(supervisor.fork_supervisor, id="a supervisor"),
    ],
)
def test_what_cannot_be_started_leaves_no_descriptor_open(
    start: Callable[[RunDir], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt() -> set[str]:
        with pytest.raises(BlockingIOError):
            start(RunDir(str(tmp_path), "run", "n1"))
        gc.collect()
        return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}

    monkeypatch.setattr(os, "fork", refuse_to_fork)
    assert attempt() == attempt()
