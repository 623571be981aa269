"""However many attempts a run has had, an agent needs few descriptors; workers keep the limit that their machine has set."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path

import pytest

from clusterctl.agent.linux import spawn
from clusterctl.agent.linux.event_loop import EventLoop, FolderWatcher
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.events import Event, Exited, Prepared, Stamp, Started, Swept, encode_event
from clusterctl.agent.protocol.run_requests import FollowArguments
from clusterctl.agent.serve.follow_sender import RunFollower
from tests.agent.conftest import Node
from tests.agent.talk import REPOSITORY

ATTEMPTS, RANKS = 60, 2
FEW = 40


def limited(limit: str) -> list[str]:
    """The agent, started by a shell that has set a limit for open files."""
    script = f'ulimit {limit}; export PYTHONPATH="{REPOSITORY}"; exec {sys.executable} -m clusterctl.agent "$@"'
    return ["/bin/sh", "-c", script, "sh"]


def long_run(run: RunDir) -> None:
    """A run with many attempts behind it, as it lies on its node."""
    events: list[Event] = []
    for attempt in range(ATTEMPTS):
        os.makedirs(run.attempt_dir(attempt))
        events.append(Prepared(attempt))
        for rank in range(RANKS):
            Path(run.rank_file(attempt, rank, "log")).write_text(f"attempt {attempt} rank {rank}\n")
            Path(run.rank_file(attempt, rank, "idx")).touch()
            events += [Started(attempt, rank, rank, 1, 1), Exited(attempt, rank, exit_code=1)]
        events.append(Swept(attempt))
    lines = [encode_event(Stamp(seq, 0.0, 0.0, "b"), event) + "\n" for seq, event in enumerate(events, 1)]
    Path(run.journal_file).write_text("".join(lines))


def test_a_run_with_many_attempts_is_sent_whole_with_few_descriptors(node: Node) -> None:
    run = RunDir(str(node.home / "state/clusterctl"), node.run, node.node)
    long_run(run)
    talk = node.talk(main=limited(f"-n {FEW}"), epoch=None)
    node.follow(talk)
    talk.until(lambda: len(talk.files) == ATTEMPTS * RANKS)
    for attempt in range(ATTEMPTS):
        for rank in range(RANKS):
            expected = f"attempt {attempt} rank {rank}\n".encode()
            name = f"attempt-{attempt}/rank-{rank}.log"
            talk.until(lambda name=name, expected=expected: talk.files[name] == expected)
    assert talk.ask(Command.STATUS, **node.where)["attempt"] == ATTEMPTS - 1
    assert len(os.listdir(f"/proc/{talk.process.pid}/fd")) < FEW // 2


def test_agent_and_supervisor_and_all_that_they_start_may_open_many_files(node: Node) -> None:
    talk = node.talk(main=limited("-S -n 256"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = f"{min(hard, spawn.MAX_OPEN_FILES)}\n".encode()
    node.launch(["/bin/sh", "-c", "ulimit -n; while [ ! -e go ]; do sleep 0.05; done"], talk=talk)
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == most)
    for pid in (talk.process.pid, node.supervisor()):
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    said = talk.ask(Command.EXEC, argv=["/bin/sh", "-c", "ulimit -n"], env={}, cwd="/", timeout=20, stream=7)
    assert said["exit_code"] == 0
    assert talk.data[7] == most
    (node.home / "work/go").touch()
    talk.wait_for("swept")


def test_output_that_cannot_be_opened_for_want_of_descriptors_is_not_taken_for_none(tmp_path: Path) -> None:
    run = RunDir(str(tmp_path), "r", "n")
    long_run(run)
    sent: dict[int, bytes] = {}
    streams = iter(range(1, 1000))
    follower = RunFollower(
        run,
        FollowArguments("r", "n", 0),
        send=lambda _: None,
        send_data=lambda stream, offset, data: sent.update({stream: data}),
        allocate_stream=lambda: next(streams),
        notifier=FolderWatcher(EventLoop(), lambda: None),
    )
    follower.send_events()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, usual[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as raised:
            follower.send_next_data(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert raised.value.errno == errno.EMFILE
    while follower.send_next_data(1000):
        pass
    assert len(sent) == ATTEMPTS * RANKS
