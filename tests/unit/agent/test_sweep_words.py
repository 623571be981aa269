"""What is said of processes that would not go, and which of them are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.processes import run_processes
from clusterctl.agent.processes.run_processes import KnownProcesses
from clusterctl.agent.protocol import events
from clusterctl.validation.journal_lines import parse_event_line
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clusterctl.agent.linux.proc import ProcessStat


@pytest.fixture
def start() -> Iterator[Callable[[], ProcessStat]]:
    """Starts a process that sleeps, as `sleep` or as what is named; returns what it is like."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(*command: str) -> ProcessStat:
        made.append(subprocess.Popen(command or ["sleep", "1000"]))
        return look(made[-1].pid)

    yield begin
    for one in made:
        one.kill()
        one.wait()


def look(pid: int) -> ProcessStat:
    found = proc.read_stat(pid)
    assert found is not None
    return found


def until(pid: int, state: str) -> None:
    wait_for(lambda: look(pid).state == state, what=f"pid {pid} in state {state}")


def test_a_process_that_is_still_there_is_named_by_its_command_and_what_it_is_doing_now(
    start: Callable[[], ProcessStat],
) -> None:
    found = start()
    os.kill(found.pid, signal.SIGSTOP)
    until(found.pid, "T")

    (said,) = run_processes.describe_survivors([found])

    assert said == {
        "pid": found.pid, "start_time": found.start_time, "command": "sleep 1000",
        "why": "SIGKILL has not ended it, state T",
    }  # fmt: skip


def test_a_process_that_has_gone_meanwhile_is_named_as_it_was(start: Callable[[], ProcessStat]) -> None:
    found = start()
    os.kill(found.pid, signal.SIGKILL)
    os.waitid(os.P_PID, found.pid, os.WEXITED | os.WNOWAIT)

    (said,) = run_processes.describe_survivors([found])

    assert (said["pid"], said["command"]) == (found.pid, f"[{found.comm}]")


def test_thousands_that_cannot_be_ended_are_all_named_in_an_event_that_the_head_takes(
    start: Callable[..., ProcessStat],
) -> None:
    first, other = (start(sys.executable, "-c", f"import time; time.sleep(1000); {'x' * 300}") for _ in range(2))

    said = run_processes.describe_survivors([first] * 256 + [other] * 3744)
    line = events.encode_event(events.Stamp(1, 0.0, 0.0, "b"), events.Swept(0, 0, said))

    assert [one["pid"] for one in (said[0], said[-1])] == [first.pid, other.pid]
    assert (len(said[0]["command"]), said[-1]["command"]) == (200, f"[{other.comm}]")
    assert parse_event_line(line.encode()) is not None


def test_what_is_known_is_looked_at_without_a_look_at_any_other(start: Callable[[], ProcessStat]) -> None:
    worker, stray, ended, other = (start() for _ in range(4))
    os.kill(ended.pid, signal.SIGKILL)
    until(ended.pid, "Z")
    known_processes = KnownProcesses(
        workers={worker.identity: None, ended.identity: None}, processes={stray.identity, worker.identity}
    )

    assert [one.pid for one in run_processes.list_known_processes(known_processes)] == [worker.pid, stray.pid]
    assert other.pid not in {one.pid for one in run_processes.list_known_processes(known_processes)}


def test_nothing_of_an_attempt_is_older_than_its_first_worker(start: Callable[[], ProcessStat]) -> None:
    workers = [proc.ProcessIdentity(pid, ticks) for pid, ticks in ((7, 300), (8, 200))]

    assert KnownProcesses(workers=dict.fromkeys(workers)).earliest_start_ticks == 200
    assert KnownProcesses().earliest_start_ticks == 0
