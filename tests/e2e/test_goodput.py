"""A run that crashes, restarts from an earlier step and ends: where its time went, to people and to programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

JOB = """\
import os, time

attempt = int(os.environ["CLUSTERCTL_ATTEMPT"])
step, ends = (5, None) if attempt else (0, time.monotonic() + 6)
while not os.path.exists("go"):
    step += 1
    print("step", step, flush=True)
    time.sleep(0.1)
    if ends and time.monotonic() > ends:
        raise ValueError("no such batch")
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 1), restart={"max_restarts": 1, "backoff": "0s"})
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    """A run whose second attempt has made its first steps."""
    run = head.start()
    wait_for(lambda: goodput(head, run)["lost_steps"], what="the first step of the second attempt", every=0.5)
    return run


def goodput(head: LocalHead, run: str) -> dict[str, Any]:
    found: dict[str, Any] = head.json("status", run)["goodput"] or {"lost_steps": None}
    return found


def test_the_goodput_of_a_restarted_run_counts_its_repeated_steps(head: LocalHead, run: str) -> None:
    found = goodput(head, run)

    assert (found["restarts"], found["has_steps"], found["is_upper_bound"]) == (1, True, False)
    assert 0 < found["lost_steps"] <= 60
    assert found["lost_s"] > 0 < found["productive_s"] < found["wall_s"]
    assert f"{found['lost_steps']} steps repeated" in head.run("status", run).stdout


def test_the_report_shows_the_goodput(head: LocalHead, run: str) -> None:
    assert "steps repeated" in head.run("report", run, "-o", "-").stdout
