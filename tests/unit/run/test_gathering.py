"""Which evidence of stalls a head keeps."""

from __future__ import annotations

import os
from pathlib import Path

from clusterctl.agent.protocol import stall_folders
from clusterctl.run.nodes.evidence_requests import collect_stall_evidence, find_last_stall
from clusterctl.run.record.rundir import RunDir


def test_the_head_keeps_the_evidence_of_the_first_stalls_and_of_the_last(tmp_path: Path) -> None:
    assert all(collect_stall_evidence(RunDir(tmp_path), number, {}) for number in range(1, 15))

    kept = [1, 2, *range(7, 15)]
    assert stall_folders.list_stall_folders(str(tmp_path)) == [f"stall-{number}" for number in kept]
    assert "stacks.txt" in os.listdir(tmp_path / "stall-14")


def test_another_controller_goes_on_with_the_numbers(tmp_path: Path) -> None:
    assert find_last_stall(RunDir(tmp_path)) == 0
    for number in (2, 9, 10):
        (tmp_path / f"stall-{number}").mkdir()
    assert find_last_stall(RunDir(tmp_path)) == 10


def test_a_head_without_room_for_evidence_goes_on_without(tmp_path: Path) -> None:
    assert not collect_stall_evidence(RunDir(tmp_path / "gone"), 1, {})
