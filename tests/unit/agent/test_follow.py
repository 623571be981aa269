"""Following a run whose files change while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.linux.event_loop import EventLoop, FolderWatcher
from clusterctl.agent.node_state import journal
from clusterctl.agent.node_state.output_reading import OffsetTable, OutputOffsets
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol import events, run_requests
from clusterctl.agent.serve.follow_sender import RunFollower

BLOCK = 4096


class Followed:
    """A run as its supervisor writes it, a follower of it, and what that has sent."""

    def __init__(self, root: Path) -> None:
        self.dir = RunDir(str(root), "r", "n")
        self.dir.make()
        self.journal = journal.JournalWriter(self.dir.journal_file)
        self.told: list[dict[str, Any]] = []
        self.data: list[tuple[int, bytes]] = []
        self.follower = self.followed()

    def followed(self, whole: int = 0) -> RunFollower:
        return RunFollower(
            self.dir,
            run_requests.FollowArguments(run="r", node="n", seq=0, complete_before=whole),
            self.told.append,
            lambda _stream, offset, data: self.data.append((offset, data)),
            lambda: 1,
            FolderWatcher(EventLoop(), lambda: None),
        )

    def begin(self, attempt: int = 0) -> None:
        Path(self.dir.attempt_dir(attempt)).mkdir()
        self.journal.append(events.Prepared(attempt, []))
        self.journal.append(events.Started(attempt, 0, 0, 1, 1))

    def end(self, attempt: int = 0) -> None:
        self.journal.append(events.Exited(attempt, 0, 0))
        self.journal.append(events.Swept(attempt, 0, []))

    def log(self, attempt: int = 0) -> Path:
        return Path(self.dir.rank_file(attempt, 0, "log"))


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def test_where_the_front_of_an_output_is_given_up_while_it_is_read_the_rest_is_sent_at_once(followed: Followed) -> None:
    followed.begin()
    followed.follower.send_events()
    followed.log().write_bytes(b"a" * BLOCK + b"b" * BLOCK)
    offset_table = OffsetTable(followed.dir.attempt_dir(0))
    offset_table.make([0])
    offset_table.write_offsets(0, OutputOffsets(first_valid=BLOCK, size=2 * BLOCK, lost=BLOCK))

    assert followed.follower.send_next_data(1 << 20) == BLOCK
    assert followed.data == [(BLOCK, b"b" * BLOCK)]


def test_once_all_of_an_attempt_is_sent_that_is_said_and_it_is_asked_for_no_more(followed: Followed) -> None:
    for attempt in range(3):
        followed.begin(attempt)
        followed.log(attempt).write_bytes(b"a" * 10)
        if attempt < 2:
            followed.end(attempt)
    followed.follower.send_events()
    while followed.follower.send_next_data(1 << 20):
        pass
    assert [push["before"] for push in followed.told if push["push"] == "complete"] == [2]

    followed.data.clear()
    again = followed.followed(whole=2)
    again.send_events()
    while again.send_next_data(1 << 20):
        pass
    assert followed.data == [(0, b"a" * 10)]
    assert again.state.attempt == 2
