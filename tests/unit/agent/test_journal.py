"""Reading a journal: as much of it at once as there is room for, however long it has become."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.linux.event_loop import EventLoop, FolderWatcher
from clusterctl.agent.node_state import journal
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol import events, run_requests
from clusterctl.agent.serve.follow_sender import RunFollower

EVENTS = 40_000
MOST_BYTES = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(str(tmp_path), "r", "n")
    run.make()
    return run


def line(number: int) -> str:
    stamp = events.Stamp(number, 0.0, 0.0, "boot")
    return events.encode_event(stamp, events.Alarm(0, "code", "x" * 100)) + "\n"


def peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_that_reading_a_journal_takes_does_not_grow_with_it(run: RunDir) -> None:
    Path(run.journal_file).write_text("".join(map(line, range(1, EVENTS + 1))))
    assert Path(run.journal_file).stat().st_size > 5 * MOST_BYTES
    assert peak(lambda: journal.fold_journal(journal.read_journal(run.journal_file))) < MOST_BYTES


def test_what_is_not_taken_is_read_again_and_a_torn_line_once_it_is_whole(run: RunDir) -> None:
    first, second, third = (line(number) for number in (1, 2, 3))
    Path(run.journal_file).write_text(first + second + third[:20])
    reader = journal.JournalReader(run.journal_file)
    assert next(reader.read_lines()) == first[:-1].encode()
    assert list(reader.read_lines()) == [second[:-1].encode()]
    Path(run.journal_file).write_text(first + second + third)
    assert list(reader.read_lines()) == [third[:-1].encode()]


def test_a_follower_tells_no_more_events_at_once_than_there_is_room_for(run: RunDir) -> None:
    Path(run.journal_file).write_text("".join(map(line, range(1, 8))))
    told: list[dict[str, Any]] = []
    follow = run_requests.FollowArguments(run="r", node="n", seq=0)
    follower = RunFollower(
        run, follow, told.append, lambda *_: None, lambda: 1, FolderWatcher(EventLoop(), lambda: None)
    )
    counts = []
    for limit in (3, 6, 9):
        more = follower.send_events(lambda limit=limit: len(told) < limit)
        counts.append((len(told), more))
    assert counts == [(3, False), (6, False), (7, True)]
    assert [push["event"]["seq"] for push in told] == list(range(1, 8))


def test_a_journal_that_is_closed_takes_no_more_space_than_its_events(run: RunDir) -> None:
    before = disk_usage(run.journal_file)
    writer = journal.JournalWriter(run.journal_file)
    writer.append(events.Alarm(0, "code", "text"))
    reserved = disk_usage(run.journal_file)
    writer.close()

    assert reserved >= 1 << 20
    assert disk_usage(run.journal_file) <= before + (64 << 10)
    assert [event for _, event in journal.read_journal(run.journal_file)] == [events.Alarm(0, "code", "text")]


def disk_usage(path: str) -> int:
    return os.stat(path).st_blocks * 512 if os.path.exists(path) else 0
