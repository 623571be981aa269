"""The front of a time index goes with the output that it tells of, and whoever reads knows where it begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterctl.agent.node_state import output_reading
from clusterctl.agent.node_state.journal import JournalState
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.run_files import INDEX_RECORD
from clusterctl.agent.supervisor.worker_output_files import WorkerOutputs

BLOCK = 4096
TAIL = 64 * 1024
RECORDS = 20_000
SIZE = RECORDS * INDEX_RECORD.size
NAME = run_files.format_index_path(0, 0)


class Long:
    """A run whose one rank has written `RECORDS` lines of 4 KiB, one a second, of which the last MiB is kept."""

    def __init__(self, root: Path) -> None:
        self.dir = RunDir(str(root), "r", "n")
        os.makedirs(self.dir.attempt_dir(0))
        self.index = Path(self.dir.file_path(NAME))
        self.index.write_bytes(b"".join(INDEX_RECORD.pack(n * BLOCK, float(n)) for n in range(1, RECORDS + 1)))
        self.outputs = WorkerOutputs(self.dir, 0, 0, 1 << 20, lambda _: None, JournalState().dropped)
        self.outputs.make_files([0])
        os.truncate(self.dir.rank_file(0, 0, "log"), RECORDS * BLOCK)
        self.outputs.update_files()

    def give_up(self, replicated: int = RECORDS * BLOCK) -> None:
        self.outputs.record_replicated(0, 0, replicated)
        self.outputs.update_files()

    @property
    def allocated(self) -> int:
        return self.index.stat().st_blocks * 512

    def read(self, offset: int) -> output_reading.OutputPiece:
        return output_reading.read_growing_file(str(self.index), NAME, offset, SIZE)


@pytest.fixture
def run(tmp_path: Path) -> Long:
    return Long(tmp_path)


def test_the_index_of_output_that_is_given_up_is_given_up_too(run: Long) -> None:
    reserved = run.allocated - SIZE
    run.give_up()
    run.outputs.record_replicated_index(0, 0, SIZE)
    assert run.allocated - reserved <= TAIL + 2 * BLOCK
    piece = run.read(0)
    assert piece.offset == piece.first_valid == SIZE - TAIL - SIZE % BLOCK
    assert INDEX_RECORD.unpack(piece.data[: INDEX_RECORD.size])[1] == piece.offset // INDEX_RECORD.size + 1
    assert run.read(SIZE - 160).data == piece.data[-160:]


@pytest.mark.parametrize(
    ("output", "index"),
    [
        pytest.param(RECORDS * BLOCK, TAIL, id="index not on the head"),
        pytest.param(TAIL, SIZE, id="output not on the head"),
    ],
)
def test_nothing_is_given_up_of_an_index(run: Long, output: int, index: int) -> None:
    run.give_up(output)
    run.outputs.record_replicated_index(0, 0, index)
    assert run.read(0).offset == 0
    assert run.read(0).data == run.index.read_bytes()


def test_the_record_before_the_first_byte_that_is_there_stays(run: Long) -> None:
    half = RECORDS * BLOCK // 2
    run.give_up(half)
    run.outputs.record_replicated_index(0, 0, SIZE)
    told, _ = INDEX_RECORD.unpack(run.read(0).data[: INDEX_RECORD.size])
    assert 0 < told < half - TAIL
