"""What is done aside: in a fork that nobody takes for a process of the run, and that nobody waits for in vain."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import helper_process, proc
from clusterctl.agent.protocol import command_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.agent.linux.helper_process import HelperOutput


def stay(_out: HelperOutput) -> dict[str, Any]:
    time.sleep(1000)
    return {}


def open_files(pid: int) -> list[str]:
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def sampler() -> tuple[int, int]:
    return helper_process.start_agent_command("sampler", "1000")


@pytest.mark.parametrize("start", [lambda: helper_process.start_helper(stay), sampler], ids=["a task", "a command"])
def test_a_fork_has_let_go_of_the_output_of_ranks_and_of_our_group_when_it_is_there(
    tmp_path: Path, start: Callable[[], tuple[int, int]]
) -> None:
    log = tmp_path / "attempt-0/rank-0.log"
    log.parent.mkdir()
    with log.open("w"):
        assert str(log) in open_files(os.getpid())
        pid, fd = start()
        try:
            found = proc.read_stat(pid)
            assert found is not None
            assert (found.sid, found.pgid) == (pid, pid)
            assert str(log) not in open_files(pid)
        finally:
            helper_process.kill_helper(pid)
            os.close(fd)
            os.waitpid(pid, 0)


def refuse(_out: HelperOutput) -> dict[str, Any]:
    raise command_messages.make_refused_error("no", "try another")


def hang(out: HelperOutput) -> dict[str, Any]:
    out.send_message({"at": "/mnt/data"})
    return stay(out)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        pytest.param(lambda _out: {"answer": 42}, {"answer": 42}, id="an answer"),
        pytest.param(refuse, "no", id="a refusal"),
        pytest.param(
            lambda _out: {"size": os.stat("/no/such").st_size}, "/no/such: No such file or directory", id="a fault"
        ),
        pytest.param(hang, "/mnt/data does not answer", id="it hangs"),
        pytest.param(lambda _out: os._exit(3), "the helper process was killed", id="it dies"),
    ],
)
def test_what_comes_of_a_task(task: helper_process.Task, said: object) -> None:
    outcome = helper_process.parse_result(helper_process.run_in_helper(task, 0.5))
    assert (str(outcome) if isinstance(outcome, Exception) else outcome) == said


def children() -> set[int]:
    """Return our children, those that have ended and that nobody has waited for included."""
    return {pid for pid in proc.list_pids() if (found := proc.read_stat(pid)) is not None and found.ppid == os.getpid()}


def test_no_descriptor_and_no_process_is_left_of_a_task() -> None:
    before = os.listdir("/proc/self/fd"), children()
    helper_process.run_in_helper(lambda _out: {}, 5.0)
    assert (os.listdir("/proc/self/fd"), children()) == before
