"""The lines of a journal: each read once as it grows, each written whatever the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clusterctl.agent.linux.proc import read_boot_id
from clusterctl.agent.node_state.journal import JournalReader, JournalWriter, read_journal
from clusterctl.agent.protocol.events import Alarm, Event, Finished, Prepared, Swept
from tests.unit.agent.full import full_at

KIB = 1024


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal.jsonl")


def told(path: str) -> list[tuple[int, Event]]:
    return [(stamp.seq, event) for stamp, event in read_journal(path)]


def reserved(path: str) -> int:
    """Bytes of disk that are there for more."""
    status = os.stat(path)
    return status.st_blocks * 512 - status.st_size


def alarm(size: int) -> Alarm:
    return Alarm(0, "x", "m" * size)


# --- reading


def test_a_reader_gives_each_line_once_and_a_torn_one_when_it_is_whole(path: str) -> None:
    reader = JournalReader(path)
    assert list(reader.read_lines()) == []
    seen = []
    for text in (b"one\ntw", b"o\n", b"", b"\nfour\n"):
        with open(path, "ab") as file:
            file.write(text)
        seen.append(list(reader.read_lines()))
        assert not reader.was_restarted
    assert seen == [[b"one"], [b"two"], [], [b"", b"four"]]


@pytest.mark.parametrize("how", ["shorter", "another file"])
def test_a_journal_that_is_not_what_it_was_is_read_anew(path: str, how: str) -> None:
    Path(path).write_bytes(b"one\ntwo\n")
    reader = JournalReader(path)
    assert list(reader.read_lines()) == [b"one", b"two"]
    if how == "shorter":
        os.truncate(path, 4)
    else:
        Path(f"{path}.new").write_bytes(b"one\ntwo\nthree\n")
        os.replace(f"{path}.new", path)

    assert list(reader.read_lines()) == ([b"one"] if how == "shorter" else [b"one", b"two", b"three"])
    assert reader.was_restarted
    assert list(reader.read_lines()) == []
    assert not reader.was_restarted


def test_what_is_no_event_of_ours_is_left_out(path: str) -> None:
    JournalWriter(path).append(Prepared(0))
    with open(path, "ab") as file:
        file.write(b"noise\n" + Path(path).read_bytes().replace(b"prepared", b"newer_than_us"))
    JournalWriter(path).append(Swept(0))

    assert [event for _, event in told(path)] == [Prepared(0), Swept(0)]


# --- writing


def test_numbers_rise_by_one_and_go_on_with_the_next_supervisor(path: str) -> None:
    first = JournalWriter(path)
    assert [first.append(Prepared(0)).seq, first.append(Swept(0)).seq] == [1, 2]
    assert JournalWriter(path).append(Prepared(1)).seq == 3

    assert told(path) == [(1, Prepared(0)), (2, Swept(0)), (3, Prepared(1))]
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_an_event_has_the_time_on_both_clocks_and_the_boot_that_they_belong_to(path: str) -> None:
    before = (time.time(), time.monotonic())
    stamp = JournalWriter(path).append(Prepared(0))

    assert before <= (stamp.wall, stamp.mono) <= (time.time(), time.monotonic())
    assert before[1] <= stamp.mono <= time.monotonic()
    assert stamp.boot == read_boot_id()
    assert [one for one, _ in read_journal(path)] == [stamp]


def test_a_journal_that_has_lost_lines_goes_on_with_the_number_of_its_last(path: str) -> None:
    journal = JournalWriter(path)
    for _ in range(3):
        journal.append(alarm(1))
    Path(path).write_bytes(Path(path).read_bytes().splitlines(keepends=True)[2])

    assert JournalWriter(path).append(Swept(0)).seq == 4


def test_an_event_of_a_newer_kind_has_a_number_too_and_noise_has_none(path: str) -> None:
    JournalWriter(path).append(Prepared(0))
    newer = Path(path).read_bytes().replace(b"prepared", b"newer_than_us")
    with open(path, "ab") as file:
        file.write(b"noise\n" + newer)

    assert JournalWriter(path).append(Swept(0)).seq == 3


def test_a_line_that_a_crash_tore_is_cut_off(path: str) -> None:
    JournalWriter(path).append(Prepared(0))
    whole = Path(path).read_bytes()
    with open(path, "ab") as file:
        file.write(whole[:-5])

    JournalWriter(path).append(Swept(0))

    assert Path(path).read_bytes().startswith(whole)
    assert told(path) == [(1, Prepared(0)), (2, Swept(0))]


def test_space_for_more_is_kept_ahead_of_what_is_written(path: str) -> None:
    journal = JournalWriter(path)
    assert reserved(path) >= 1024 * KIB
    for _ in range(40):
        journal.append(alarm(100 * KIB))
        assert 100 * KIB <= reserved(path) <= 1100 * KIB
    again = JournalWriter(path)
    assert reserved(path) >= 1024 * KIB
    again.append(Swept(0))


def test_space_is_not_reserved_again_with_each_event(path: str) -> None:
    journal = JournalWriter(path)
    for _ in range(7):
        journal.append(alarm(100 * KIB))
    assert reserved(path) < 400 * KIB


def test_what_a_full_disk_has_no_room_for_waits_and_is_written_in_its_order(path: str) -> None:
    journal = JournalWriter(path)
    journal.append(Prepared(0))
    size = os.stat(path).st_size
    with full_at(size + 50):
        assert [journal.append(event).seq for event in (alarm(300), Swept(0))] == [2, 3]
        assert not journal.flush()
        # Not even a part of a line is there: it would spoil the next one.
        assert os.stat(path).st_size == size
        assert told(path) == [(1, Prepared(0))]

    assert journal.append(Finished("failed", 100)).seq == 4
    assert told(path) == [(1, Prepared(0)), (2, alarm(300)), (3, Swept(0)), (4, Finished("failed", 100))]
    assert journal.flush()
    assert reserved(path) >= 1000 * KIB


def test_on_a_disk_that_is_full_from_the_beginning_a_journal_opens_all_the_same(path: str) -> None:
    with full_at(0):
        journal = JournalWriter(path)
        journal.append(Prepared(0))
    assert told(path) == []

    assert journal.flush()
    assert told(path) == [(1, Prepared(0))]
