"""The output files of a run on a node: what their indices tell, what gives way, and how much is said of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clusterctl.agent.node_state.journal import JournalState, apply_event
from clusterctl.agent.node_state.output_reading import OffsetTable
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol.events import Alarm, Event, OutputDropped, Stamp
from clusterctl.agent.protocol.run_files import INDEX_RECORD
from clusterctl.agent.supervisor.worker_output_files import OpenWorkerOutput, WorkerOutputs

MEGABYTE = 1 << 20


class Run:
    """A run directory, its journal in memory, and the output files of its attempts."""

    def __init__(self, root: Path) -> None:
        self.dir = RunDir(str(root), "r", "n")
        self.state = JournalState()
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)
        apply_event(self.state, Stamp(len(self.events), 0.0, 0.0, "b"), event)

    def attempt(self, number: int = 0, *, reserve: int = 0, max_size: int | None = None) -> WorkerOutputs:
        os.makedirs(self.dir.attempt_dir(number), exist_ok=True)
        outputs = WorkerOutputs(self.dir, number, reserve, max_size, self.record, self.state.dropped)
        outputs.make_files([0])
        return outputs

    def dropped(self) -> list[OutputDropped]:
        return [event for event in self.events if isinstance(event, OutputDropped)]

    def log(self, attempt: int = 0) -> Path:
        return Path(self.dir.rank_file(attempt, 0, "log"))

    def index(self) -> list[int]:
        return [size for size, _ in INDEX_RECORD.iter_unpack(Path(self.dir.rank_file(0, 0, "idx")).read_bytes())]

    def allocated(self, attempt: int = 0) -> int:
        return self.log(attempt).stat().st_blocks * 512


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def write(outputs: WorkerOutputs, count: int) -> None:
    for begin in range(0, count, MEGABYTE):
        os.write(outputs.get_descriptor(0), b"x" * min(MEGABYTE, count - begin))


# --- the index


def test_the_index_tells_at_once_of_what_is_new_after_a_while_and_of_much(run: Run) -> None:
    outputs = run.attempt()
    for size in (1, 1, 4095, 1, 4096):
        write(outputs, size)
        outputs.update_files()
    assert run.index() == [1, 4097, 8194]


def test_what_the_index_did_not_tell_at_once_it_tells_within_a_second(run: Run) -> None:
    outputs = run.attempt()
    for _ in range(2):
        write(outputs, 1)
        outputs.update_files()
    begun = time.monotonic()
    while run.index() == [1]:
        outputs.update_files()
        assert time.monotonic() - begun < 20
    assert run.index() == [1, 2]
    assert time.monotonic() - begun > 0.9


def test_the_index_ends_with_the_size_of_the_output(run: Run) -> None:
    outputs = run.attempt()
    for _ in range(3):
        write(outputs, 10)
        outputs.update_files()
    outputs.close()
    assert run.index() == [10, 30]


def test_an_index_goes_on_where_the_last_supervisor_left_it(run: Run) -> None:
    outputs = run.attempt()
    write(outputs, 10)
    outputs.update_files()
    write(outputs, 10)
    outputs.update_files()
    again = run.attempt()
    again.update_files()
    assert run.index() == [10, 20]


# --- what gives way


def test_on_a_disk_with_space_nothing_is_said_and_nothing_given_up(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    for _ in range(10):
        write(outputs, MEGABYTE // 2)
        outputs.update_files()
        outputs.extend_reserves()
        outputs.record_replicated(0, 0, 10 * MEGABYTE)
    outputs.close()
    assert run.events == []


def test_the_reserve_of_the_index_is_given_back_in_the_end(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    write(outputs, 10)
    outputs.update_files()
    index = Path(run.dir.rank_file(0, 0, "idx"))
    assert index.stat().st_blocks * 512 >= 64 * 1024
    outputs.close()
    assert index.stat().st_blocks * 512 <= 4096
    assert run.index() == [10]


def test_an_index_has_space_ahead_however_long_it_gets(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    index = Path(run.dir.rank_file(0, 0, "idx"))
    for _ in range(2 * 64 * 1024 // INDEX_RECORD.size):
        write(outputs, 4096)
        outputs.update_files()
    assert index.stat().st_size >= 2 * 64 * 1024
    assert index.stat().st_blocks * 512 >= index.stat().st_size + 16 * 1024


def test_the_reserve_is_given_back_in_the_end(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    write(outputs, 10)
    assert run.allocated() >= MEGABYTE
    outputs.close()
    assert run.allocated() <= 4096


def test_a_limit_is_held_and_the_journal_hears_of_it_once(run: Run) -> None:
    outputs = run.attempt(max_size=MEGABYTE)
    for number in range(1, 41):
        write(outputs, MEGABYTE)
        outputs.record_replicated(0, 0, number * MEGABYTE)
        outputs.update_files()
        assert run.allocated() <= 3 * MEGABYTE
    outputs.close()
    (dropped,) = run.dropped()
    assert (dropped.lost, dropped.why) == (0, "logs.max_size")
    assert dropped.first_valid == OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).first_valid


def test_a_limit_is_held_in_pieces_of_a_mebibyte_and_not_at_each_look(run: Run) -> None:
    outputs = run.attempt(max_size=4 * MEGABYTE)
    first = []
    for number in range(1, 41):
        write(outputs, MEGABYTE // 4)
        outputs.record_replicated(0, 0, number * MEGABYTE // 4)
        outputs.update_files()
        first.append(OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).first_valid)
    assert len(set(first)) == 1 + 6
    assert first[-1] >= 5 * MEGABYTE


def test_under_a_flood_the_journal_hears_of_each_64_mib(run: Run) -> None:
    outputs = run.attempt(max_size=MEGABYTE)
    for number in range(1, 140):
        write(outputs, MEGABYTE)
        outputs.record_replicated(0, 0, number * MEGABYTE)
        outputs.update_files()
    assert [event.first_valid // (64 * MEGABYTE) for event in run.dropped()] == [1, 2]


def test_what_is_not_on_the_head_stays_whatever_the_limit(run: Run) -> None:
    outputs = run.attempt(max_size=MEGABYTE)
    write(outputs, 5 * MEGABYTE)
    outputs.update_files()
    outputs.close()
    assert run.events == []
    assert run.allocated() >= 5 * MEGABYTE


@pytest.mark.parametrize("max_size", [MEGABYTE, None])
def test_where_there_is_a_limit_what_is_on_the_head_is_given_up_after_the_end(run: Run, max_size: int | None) -> None:
    outputs = run.attempt(max_size=max_size)
    write(outputs, 3 * MEGABYTE)
    outputs.close()
    outputs.record_replicated(0, 0, MEGABYTE)
    assert run.dropped() == []
    outputs.record_replicated(0, 0, 3 * MEGABYTE)
    if max_size is None:
        assert run.dropped() == []
        assert run.allocated() >= 3 * MEGABYTE
    else:
        assert [event.lost for event in run.dropped()] == [0]
        assert run.allocated() <= 128 << 10


def test_the_same_holds_for_an_attempt_before_this_one_and_for_another_supervisor(run: Run) -> None:
    first = run.attempt(0)
    write(first, 3 * MEGABYTE)
    first.close()
    run.attempt(1, max_size=MEGABYTE).record_replicated(0, 0, 3 * MEGABYTE)
    assert [(event.attempt, event.lost) for event in run.dropped()] == [(0, 0)]
    assert run.allocated(0) <= 128 << 10


def test_what_was_given_up_and_not_told_is_told_by_the_next_supervisor(run: Run) -> None:
    outputs = run.attempt(max_size=MEGABYTE)
    write(outputs, 5 * MEGABYTE)
    outputs.record_replicated(0, 0, 5 * MEGABYTE)
    outputs.update_files()
    assert run.dropped() == []
    run.attempt(max_size=MEGABYTE).close()
    assert [event.first_valid for event in run.dropped()] == [4 * MEGABYTE]


# --- a file that was emptied


def test_a_file_that_grows_beyond_its_reserve_at_once_was_not_emptied(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    for _ in range(5):
        write(outputs, 3 * MEGABYTE)
        outputs.update_files()
    assert run.events == []
    assert OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).file_start == 0


@pytest.mark.parametrize("reserve", [MEGABYTE, 0], ids=["with a reserve", "without one"])
def test_a_file_that_was_emptied_goes_on_behind_what_was_sent(run: Run, reserve: int) -> None:
    outputs = run.attempt(reserve=reserve)
    os.write(outputs.get_descriptor(0), b"first words\n")
    outputs.update_files()
    offset_table = OffsetTable(run.dir.attempt_dir(0))
    offset_table.write_sent(0, 12)
    os.truncate(run.log(), 0)
    os.write(outputs.get_descriptor(0), b"other\n")
    outputs.update_files()
    offsets = offset_table.read_offsets(0)
    assert (offsets.file_start, offsets.first_valid, offsets.size, offsets.lost) == (12, 12, 18, 0)
    alarm = run.events[0]
    assert isinstance(alarm, Alarm)
    assert (alarm.attempt, alarm.code, alarm.rank) == (0, "output_emptied", 0)
    assert alarm.message == (
        "rank 0 has emptied its own output, as `> /dev/stderr` and `open('/dev/stdout', 'w')` do:"
        " output that had not been sent is lost; use `>&2`, `>> /dev/stderr` or mode 'a' instead"
    )
    assert [type(event) for event in run.events] == [Alarm, OutputDropped]


def test_a_file_that_is_emptied_again_and_again_is_told_of_once_a_minute(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    for number in range(50):
        os.write(outputs.get_descriptor(0), b"retry\n")
        outputs.update_files()
        OffsetTable(run.dir.attempt_dir(0)).write_sent(0, 6 * (number + 1))
        os.truncate(run.log(), 0)
        outputs.update_files()
    outputs.close()
    assert [type(event) for event in run.events] == [Alarm, OutputDropped, OutputDropped]
    assert run.dropped()[-1].first_valid == 300
    assert OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).file_start == 300


def test_a_supervisor_that_was_not_there_when_a_file_was_emptied_finds_out(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    os.write(outputs.get_descriptor(0), b"first words\n")
    outputs.update_files()
    os.truncate(run.log(), 0)
    os.write(outputs.get_descriptor(0), b"fewer words")
    again = OpenWorkerOutput(run.dir, 0, 0, OffsetTable(run.dir.attempt_dir(0)), MEGABYTE)
    assert again.update_offsets().emptied
    assert again.offsets.lost == 12
    assert again.offsets.file_start % 4096 == 0


def test_after_a_reboot_a_file_counts_as_it_is(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    os.write(outputs.get_descriptor(0), b"first words\n")
    outputs.update_files()
    offset_table = Path(run.dir.attempt_dir(0)) / "offsets"
    offset_table.write_bytes(offset_table.read_bytes()[:40] + b"another!")  # the boot that it was written in
    os.truncate(run.log(), 6)
    assert not OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).is_emptied(6)
    again = run.attempt(reserve=MEGABYTE)
    assert run.events == []
    assert OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).size == 6
    again.close()


# --- what is held open


def test_nothing_stays_open_of_an_attempt_that_is_over(run: Run) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    outputs = run.attempt(reserve=MEGABYTE)
    assert 0 in outputs
    assert 1 not in outputs
    write(outputs, 10)
    outputs.update_files()
    outputs.close()
    assert 0 not in outputs
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_all_files_of_an_attempt_share_one_table_of_offsets(run: Run) -> None:
    outputs = run.attempt()
    one = len(os.listdir("/proc/self/fd"))
    outputs.make_files([1])
    # Its output and its index, and no table of its own.
    assert len(os.listdir("/proc/self/fd")) == one + 2
    outputs.close()


@pytest.mark.parametrize(
    ("reserve", "size", "fast"),
    [
        pytest.param(MEGABYTE, MEGABYTE // 8 + 1, True, id="more than an eighth of the reserve"),
        pytest.param(MEGABYTE, MEGABYTE // 8, False, id="an eighth of it"),
        pytest.param(0, MEGABYTE, False, id="there is no reserve to be kept"),
    ],
)
def test_what_grows_fast_is_to_be_looked_at_earlier(run: Run, reserve: int, size: int, fast: bool) -> None:
    outputs = run.attempt(reserve=reserve)
    assert outputs.update_files() is False
    write(outputs, size)
    assert outputs.update_files() is fast
    assert outputs.update_files() is False
    outputs.close()


def test_the_reserve_is_ahead_of_what_grows_between_two_looks(run: Run) -> None:
    outputs = run.attempt(reserve=MEGABYTE)
    write(outputs, MEGABYTE)
    assert run.allocated() < MEGABYTE + MEGABYTE // 2
    outputs.extend_reserves()
    assert run.allocated() >= 2 * MEGABYTE
    outputs.close()


def test_what_is_replicated_of_an_index_is_that_of_the_attempt_it_was_said_of(run: Run) -> None:
    first = run.attempt(0)
    write(first, 10)
    first.close()
    second = run.attempt(1)
    second.record_replicated_index(0, 0, 16)
    second.record_replicated_index(1, 0, 16)
    second.record_replicated(0, 0, 10)
    assert OffsetTable(run.dir.attempt_dir(0)).read_offsets(0).replicated == 10
    assert OffsetTable(run.dir.attempt_dir(1)).read_offsets(0).replicated == 0
    second.close()
