"""Reading the journals of a run on the head: what that takes does not grow with them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import run_files
from clusterctl.run.record.disk_files import remove_torn_line
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules import controller_events

EVENTS = 20_000
MOST_BYTES = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.node("n").mkdir(parents=True)
    layout = [{"node": "n", "node_rank": 0, "ranks": [0]}]
    attempt = controller_events.AttemptStarted(
        attempt=0, world_size=1, master_addr=None, master_port=None, nodes=layout
    )
    with run.events.open("w") as file:
        file.write(controller_events.encode(1, 1.0, attempt) + "\n")
        clock = controller_events.ClockEstimated(node="n", offset=0.0, error=0.0)
        file.writelines(controller_events.encode(number, 1.0, clock) + "\n" for number in range(2, EVENTS))
    with (run.node("n") / run_files.JOURNAL_FILE).open("w") as file:
        for number in range(1, EVENTS):
            stamp = node_events.Stamp(number, 0.0, 0.0, "boot")
            file.write(node_events.encode_event(stamp, node_events.OutputDropped(0, 0, 4096 * number, 0, "why")) + "\n")
    return run


def peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_that_reading_a_run_takes_does_not_grow_with_its_journals(run: RunDir) -> None:
    assert load_state(run).nodes["n"].seq == EVENTS - 1
    assert peak(lambda: load_state(run)) < MOST_BYTES


def test_the_memory_that_a_writer_takes_to_begin_does_not_grow_with_the_journal(run: RunDir) -> None:
    def begin() -> None:
        writer = RunDirWriter(run)
        writer.append(controller_events.Note(text="n", level="warn"), 1.0)
        writer.close()

    assert peak(begin) < MOST_BYTES
    assert controller_events.decode(run.events.read_bytes().splitlines()[-1])[0] == EVENTS  # type: ignore[index]


@pytest.mark.parametrize("torn", [b"", b"t", b"t" * 200_000], ids=["nothing", "a byte", "a long line"])
def test_a_torn_line_is_cut_off_however_long_it_is(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n" + torn)
    remove_torn_line(path)
    assert path.read_bytes() == b"one\ntwo\n"


def test_what_a_node_tells_at_most_of_a_rank_that_failed_is_read_whatever_its_letters(run: RunDir) -> None:
    error = {"message": "\U0001f525" * 8192, "traceback": "\U0001f525" * 32768}
    failed = node_events.Exited(0, 0, exit_code=1, error=error, tail="\x01" * 8192)
    with (run.node("n") / run_files.JOURNAL_FILE).open("a") as file:
        file.write(node_events.encode_event(node_events.Stamp(EVENTS, 0.0, 0.0, "boot"), failed) + "\n")

    state = load_state(run)

    assert state.unreadable_lines == ()
    assert state.workers[0].exit_code == 1
