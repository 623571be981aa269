"""A disk that is full to the last byte: nothing that happens is forgotten, and what could not be written is written later."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest

from clusterctl.agent.node_state.journal import JournalReader, JournalWriter
from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import Node

JOURNAL = "journal.jsonl"


def fill(folder: Path) -> Path:
    """Leave no byte free on a filesystem; return the file that holds them all."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    assert os.statvfs(folder).f_bavail == 0
    return filler


def free_reserve(file: Path) -> None:
    """Give back what is reserved beyond the end of a file."""
    os.truncate(file, file.stat().st_size)


def test_events_that_found_no_room_are_written_in_their_order_once_there_is_some(small_disk: Node) -> None:
    path = small_disk.home / JOURNAL
    writer = JournalWriter(str(path))
    reader = JournalReader(str(path))
    writer.append(node_events.Prepared(0))
    free_reserve(path)
    filler = fill(small_disk.home)

    for rank in range(20):
        writer.append(node_events.Exited(0, rank, exit_code=7, tail="x" * 1000))
    assert not writer.flush()
    written = len(list(reader.read_lines()))
    assert written < 21

    filler.unlink()
    assert writer.flush()
    events = [node_events.decode_event(line) for line in path.read_bytes().splitlines()]
    assert [stamp.seq for stamp, _ in events] == list(range(1, 22))
    assert len(list(reader.read_lines())) == 21 - written


def test_a_worker_that_ends_while_the_disk_is_full_keeps_its_exit_code(small_disk: Node) -> None:
    talk = small_disk.launch(["/bin/sh", "-c", "trap 'exit 7' TERM; echo on; while :; do sleep 0.05; done"])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == b"on\n")
    (reserved,) = small_disk.folder.glob("attempt-0/rank-0.exit.*")
    free_reserve(reserved)
    fill(small_disk.home)
    os.kill(talk.of("started")[0]["pid"], signal.SIGTERM)
    talk.wait_for("swept")

    assert talk.exits()[0]["exit_code"] == 7


def test_an_end_that_the_journal_has_no_room_for_is_told_once_it_has(small_disk: Node) -> None:
    loud = "seq 2000; trap 'exit 7' TERM; echo on; while :; do sleep 0.05; done"
    talk = small_disk.launch(["/bin/sh", "-c", loud])
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log", b"").endswith(b"on\n"))
    supervisor = small_disk.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    free_reserve(small_disk.folder / JOURNAL)
    filler = fill(small_disk.home)
    os.kill(supervisor, signal.SIGKILL)
    talk.wait_for("adopted")
    fill(small_disk.home)
    os.kill(talk.of("started")[0]["pid"], signal.SIGTERM)
    talk.eventually((small_disk.folder / "attempt-0/rank-0.exit").exists)
    assert small_disk.supervised()
    filler.unlink()
    talk.wait_for("swept")

    assert talk.exits()[0]["exit_code"] == 7
    assert len(talk.of("adopted")) == 1
    assert [event["seq"] for event in talk.events] == list(range(1, len(talk.events) + 1))


@pytest.mark.parametrize("killed", [False, True], ids=["", "by another supervisor"])
def test_what_is_on_the_head_of_an_earlier_attempt_gives_way_before_what_nobody_has(
    small_disk: Node, killed: bool
) -> None:
    logs = [f"attempt-{number}/rank-0.log" for number in (0, 1)]
    talk = small_disk.launch(["head", "-c", "6M", "/dev/zero"])
    talk.wait_for("swept")
    talk.until(lambda: len(talk.files.get(logs[0], b"")) == 6 << 20)
    talk.post(Command.REPLICATED, **small_disk.where, offsets={logs[0]: 6 << 20})
    talk.greedy = False
    if killed:
        small_disk.prepare(talk, attempt=1)
        os.kill(small_disk.supervisor(), signal.SIGKILL)
        talk.wait_for("adopted")
    slowly = "for n in $(seq 22); do head -c 500k /dev/urandom; sleep 0.1; done"
    small_disk.prepare(talk, attempt=1)
    small_disk.start(talk, ["/bin/bash", "-c", slowly], attempt=1)
    talk.wait_for("swept", 2)

    assert [event["exit_code"] for event in talk.of("exited")] == [0, 0]
    assert [(event["code"], event["message"]) for event in talk.of("alarm")] == [
        ("disk_full", "the disk is full: the oldest output is discarded, first the part that the head has")
    ]
    assert {(event["attempt"], event["lost"]) for event in talk.of("dropped")} == {(0, 0)}
    status = (small_disk.folder / logs[1]).stat()
    assert status.st_blocks * 512 >= status.st_size == 22 * 500 * 1024


def test_the_reserve_of_a_journal_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    journal = JournalWriter(str(path))
    try:
        os.posix_fallocate(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR), 0, 1)
    except OSError as error:
        pytest.skip(f"no fallocate here: {errno.errorcode[error.errno or 0]}")
    for rank in range(300):
        journal.append(node_events.Exited(0, rank, tail="x" * 8000))
        status = path.stat()
        assert status.st_blocks * 512 - status.st_size > 128 << 10


def test_a_journal_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert list(JournalReader(str(tmp_path / JOURNAL)).read_lines()) == []
