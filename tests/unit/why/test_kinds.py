"""Every kind of fault that `make why` plays, judged again from what was kept of one run of it (`--bundles`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cli.verdicts import load_verdict, open_bundle
from clusterctl.run.record import state_reader
from clusterctl.why.verdict import Confidence, Fault
from tests.lab.why.kinds import KINDS, Expected

KEPT = sorted((Path(__file__).parent / "kinds").glob("*.tar.gz"))


def expected_of(path: Path) -> tuple[Expected, int]:
    kind, _, culprit = path.name.removesuffix(".tar.gz").rpartition("-")
    return KINDS[kind], int(culprit)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name.removesuffix(".tar.gz"))
def test_what_went_wrong_and_who_did_it_is_told(path: Path) -> None:
    expected, culprit = expected_of(path)
    with open_bundle(path) as run:
        verdict = load_verdict(run, live=False)
        state, _ = state_reader.load_state_and_attendance(run)
    stopped = frozenset(rank for rank, worker in state.workers.items() if worker.stopped)
    world = len(state.workers) or 4  # none where nothing was started
    named = {one.rank for one in verdict.culprits if one.rank is not None}

    assert verdict.cls.value in expected.classes, verdict.summary
    assert named == expected.ranks(culprit, world, stopped), verdict.summary


HANGS_UNTOLD = [path for path in KEPT if "uninjected" in path.name and expected_of(path)[0].kind == "hang"]


@pytest.mark.parametrize("path", HANGS_UNTOLD, ids=lambda path: path.name.removesuffix(".tar.gz"))
def test_a_rank_that_is_missing_is_at_most_likely_where_no_rank_tells_of_itself_and_that_is_said(path: Path) -> None:
    with open_bundle(path) as run:
        verdict = load_verdict(run, live=False)

    assert any("`job.inject: false`" in text for text in verdict.missing_evidence)
    assert verdict.confidence is not Confidence.CERTAIN or verdict.cls is Fault.STOPPED


def test_a_run_of_each_kind_lies_here() -> None:
    assert {path.name.rpartition("-")[0] for path in KEPT} == KINDS.keys()
