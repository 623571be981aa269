"""Which evidence of stalls a head keeps."""

from __future__ import annotations

import os
from pathlib import Path

from clusterctl.agent.protocol import evidence_files
from clusterctl.run.nodes.evidence import Gatherer
from clusterctl.run.record.rundir import RunDir

STALLS = 14


def gathered(gatherer: Gatherer) -> str:
    name = gatherer.begin({}, confirmed=False)
    while gatherer.busy:
        pass
    return name


def test_the_head_keeps_the_evidence_of_the_first_stalls_and_of_the_last(tmp_path: Path) -> None:
    gatherer = Gatherer(RunDir(tmp_path), lambda: None)
    names = [gathered(gatherer) for _ in range(STALLS)]
    assert evidence_files.list_stall_folders(str(tmp_path)) == names[:2] + names[-8:]
    assert "stacks.txt" in os.listdir(tmp_path / names[-1])


def test_another_controller_goes_on_with_the_numbers(tmp_path: Path) -> None:
    for number in (2, 9, 10):
        (tmp_path / f"stall-{number}").mkdir()
    assert gathered(Gatherer(RunDir(tmp_path), lambda: None)) == "stall-11"
