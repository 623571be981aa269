"""Runs that went wrong for real (torch with gloo, four ranks on two nodes), judged from what was kept of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent.protocol.stall_folders import list_stall_folders
from clusterctl.cli.verdicts import load_verdict, open_bundle
from clusterctl.errors import NotFoundError
from clusterctl.run.record import run_bundle
from clusterctl.run.record import saved_verdict as kept
from clusterctl.why.verdict import Confidence

BUNDLES = Path(__file__).parent / "bundles"

JUDGED = {
    "sleep-2": ("NOT_JOINED", 2, "train.py:10"),
    "spin-1": ("NOT_JOINED", 1, "train.py:12"),
    "gil-3": ("GIL_HELD", 3, "train.py:13"),
    "lock-0": ("NOT_JOINED", 0, "train.py:14"),
    "pipe-3": ("NOT_JOINED", 3, "train.py:15"),
    "child-2": ("NOT_JOINED", 2, "train.py:20"),
    "stop-1": ("STOPPED", 1, "train.py:18"),
    "broadcast-0": ("MISMATCH", 0, "train.py:19"),
    "exit0-2": ("EXITED_EARLY", 2, None),
    "raise-1": ("EXCEPTION", 1, "train.py:17"),
    "segv-3": ("SIGNAL", 3, None),
    "saves-0": ("SLOW", 0, None),  # before the stall was called
}


@pytest.mark.parametrize(("name", "expected"), JUDGED.items(), ids=JUDGED)
def test_the_culprit_of_a_kept_run_is_named(name: str, expected: tuple[str, int, str | None]) -> None:
    with open_bundle(BUNDLES / f"{name}.tar.gz") as run:
        verdict = load_verdict(run, live=False)

    (culprit,) = verdict.culprits
    assert (verdict.cls.value, culprit.rank, culprit.where) == expected
    assert verdict.confidence in (Confidence.CERTAIN, Confidence.LIKELY)


def test_every_bundle_that_lies_here_is_judged() -> None:
    assert {path.name.removesuffix(".tar.gz") for path in BUNDLES.glob("*.tar.gz")} == set(JUDGED)


@pytest.mark.parametrize("content", [b"", b"no archive"], ids=["empty", "no archive"])
def test_what_is_no_bundle_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bundle"
    path.write_bytes(content)

    with pytest.raises(NotFoundError, match="is not a bundle|contains no run"), open_bundle(path):
        pass


def test_what_was_seen_of_a_run_that_nobody_calls_stalled_is_in_its_bundle(tmp_path: Path) -> None:
    kinds = BUNDLES.with_name("kinds")
    with open_bundle(kinds / "sleeps-0.tar.gz") as other:
        seen = kept.read_evidence(other.path / list_stall_folders(str(other.path))[-1])
    with open_bundle(BUNDLES / "saves-0.tar.gz") as run:
        before = load_verdict(run, live=False)
        run_bundle.save_bundle(run, tmp_path / "bundle.tar.gz", seen, redact=True)
    with open_bundle(tmp_path / "bundle.tar.gz") as run:
        after = load_verdict(run, live=False)

    assert [culprit.where for culprit in before.culprits] == [None]
    assert [culprit.where for culprit in after.culprits] == ["job.py:69"]
    assert (after.kind, after.cls, after.confidence) == (before.kind, before.cls, before.confidence)
