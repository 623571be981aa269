"""What the head keeps of what its nodes send."""

from __future__ import annotations

import json
from pathlib import Path

from clusterctl.agent.protocol.run_files import SAMPLES_FILE, format_output_path
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import MAX_SAMPLES_BYTES, RunDirWriter
from clusterctl.run.record.sample_files import read_latest_activity

MEGABYTE = 1 << 20


def kept(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_of_samples_only_the_end_is_kept_and_the_cursor_goes_on(tmp_path: Path) -> None:
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    line = json.dumps({"kind": "activity", "attempt": 0, "filler": "x" * 1000}).encode() + b"\n"
    payload = line * (MEGABYTE // len(line))
    size = 0
    for _ in range(100):
        size = writer.replicate("n0", SAMPLES_FILE, size, payload)
        assert kept(run.node("n0") / SAMPLES_FILE) <= MAX_SAMPLES_BYTES + MEGABYTE
    assert writer.list_cursors("n0") == {SAMPLES_FILE: 100 * len(payload)}
    assert read_latest_activity(run, "n0") == json.loads(line)
    writer.close()


def test_of_output_everything_is_kept(tmp_path: Path) -> None:
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    for number in range(40):
        writer.replicate("n0", format_output_path(0, 0), number * MEGABYTE, b"x" * MEGABYTE)
    assert kept(run.node("n0") / format_output_path(0, 0)) >= 40 * MEGABYTE
    writer.close()
