"""The second look at machines is silent about what was there at the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    # One warning is certain, whatever the machine is like. What another suite beside us runs comes and goes.
    certain = {"expect": {"python": "2.*"}, "severity": {"version.expected": "warn"}}
    head.write_local({"command": ["true"]}, workers=(1,), health={"ignore": ["run.leftover"], **certain})
    return head


def health_line(said: str) -> str:
    return next(line for line in said.splitlines() if " health " in line)


def test_a_start_says_which_warnings_are_new(head: LocalHead) -> None:
    first, second = head.run("up"), head.run("up")
    assert "last time" not in first.stderr
    assert "as last time" in health_line(second.stderr)
    assert "new:" not in second.stderr

    (known,) = (Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "health").iterdir()
    kept = json.loads(known.read_bytes())
    known.write_text(json.dumps({**kept, "findings": kept["findings"][1:]}))
    third = head.run("up")
    _, status, check = kept["findings"][0].split()[:3]
    assert health_line(third.stderr).rstrip("0123456789.s ").endswith(", 1 new")
    assert f"new: {status} {check}" in third.stderr


def test_health_shows_all_of_it(head: LocalHead) -> None:
    head.run("health")
    again = head.run("health")
    assert "WARN" in again.stdout or "UNKNOWN" in again.stdout
    assert "new:" not in again.stderr
