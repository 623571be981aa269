"""From which checkpoint an attempt goes on, and that a person is told."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.faulty import controller_pid
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

CRASHES = """\
import os, pathlib, sys
print("resumes from", os.environ.get("CLUSTERCTL_RESUME_FROM"), flush=True)
attempt = int(os.environ["CLUSTERCTL_ATTEMPT"])
for name in sys.argv[1:]:
    number, _, path = name.partition(":")
    if int(number) == attempt:
        pathlib.Path(path).write_text("weights of this run")
sys.exit(3 if attempt < 2 else 0)
"""
OLD = "step-9"
NOT_OURS = "this run does not go on from it (`job.checkpoint.resume: any` would)"


def prepare(head: LocalHead, *writes: str, restarts: int = 2, backoff: Any = 0, **checkpoint: Any) -> None:
    """A job that crashes twice, in a folder in which an earlier run has left a checkpoint."""
    (head.folder / "train.py").write_text(CRASHES)
    (head.folder / OLD).write_text("weights of an earlier run")
    job = {"script": "train.py", "args": list(writes), "checkpoint": {"pattern": "step-*", **checkpoint}}
    head.write_local(job, restart={"max_restarts": restarts, "backoff": backoff})


def taken(head: LocalHead) -> list[str]:
    """What each attempt was told to go on from."""
    run = head.newest()
    lines = head.run("logs", run, "--format", "json").stdout.splitlines()
    found = {(entry := json.loads(line))["attempt"]: entry["text"] for line in lines}
    return [found[attempt].removeprefix("resumes from ") for attempt in sorted(found)]


@pytest.mark.parametrize(
    ("checkpoint", "writes", "expected", "told"),
    [
        pytest.param(
            {},
            [],
            ["None", "None", "None"],
            [
                f"1 checkpoint of earlier runs matches `step-*`: {NOT_OURS}",
                "attempt 1 starts from scratch: no checkpoint of this run matches `step-*`",
                "attempt 2 starts from scratch: no checkpoint of this run matches `step-*`",
            ],
            id="nothing of this run",
        ),
        pytest.param(
            {},
            ["0:step-1"],
            ["None", "step-1", "step-1"],
            ["attempt 1 goes on from `step-1`", "attempt 2 goes on from `step-1`"],
            id="what this run has written",
        ),
        pytest.param(
            {"resume": "this run"},
            [f"0:{OLD}"],
            ["None", OLD, OLD],
            [f"attempt 1 goes on from `{OLD}`"],
            id="what this run has written in the place of an older one",
        ),
        pytest.param(
            {"resume": "any"},
            ["0:step-1"],
            [OLD, "step-1", "step-1"],
            [f"attempt 0 goes on from `{OLD}`", "attempt 1 goes on from `step-1`"],
            id="whatever is there",
        ),
        pytest.param({"resume": "never"}, ["0:step-1"], ["None", "None", "None"], [], id="never"),
    ],
)
def test_attempts_go_on_from(
    head: LocalHead, checkpoint: dict[str, str], writes: list[str], expected: list[str], told: list[str]
) -> None:
    prepare(head, *writes, **checkpoint)

    done = head.run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    assert taken(head) == expected
    said = [line.strip() for line in done.stderr.splitlines()]
    assert [line for line in told if line not in said] == []
    if not told:
        assert not any("goes on from" in line or "starts from scratch" in line for line in said)


def test_a_slurm_job_that_is_requeued_goes_on_from_what_it_has_written_itself(head: LocalHead) -> None:
    prepare(head, "0:step-1", restarts=0)

    def up(job: str, restarts: str = "0") -> list[str]:
        env = {**head.env, "SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}
        assert dataclasses.replace(head, env=env).run("up", "--no-health").returncode == 100
        return taken(head)

    assert up("77") == ["None"]
    assert up("77") == ["None"]
    assert up("77", "1") == ["step-1"]
    assert up("77", "2") == ["step-1"]
    assert up("78", "1") == ["None"]


def test_a_slurm_job_that_had_written_nothing_takes_no_checkpoint_of_others(head: LocalHead) -> None:
    prepare(head, restarts=0)
    for restarts in ("0", "1"):
        env = {**head.env, "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": restarts}
        assert dataclasses.replace(head, env=env).run("up", "--no-health").returncode == 100

        assert taken(head) == ["None"]


def test_a_controller_that_adopts_the_run_knows_what_was_there_when_it_began(head: LocalHead) -> None:
    prepare(head, restarts=1, backoff="3s")
    run = head.start()
    wait_for(lambda: head.json("status", run)["state"] == "restarting", what="the pause before the next attempt")

    os.kill(controller_pid(head, run), signal.SIGKILL)
    attached = head.run("attach", "--adopt", run)

    assert attached.returncode == 100, attached.stderr
    assert taken(head) == ["None", "None"]


DIES_ONCE = """\
import os, signal
if os.environ["RANK"] == "1" and os.environ["CLUSTERCTL_ATTEMPT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_why_an_attempt_died_is_told_and_kept_though_another_follows(head: LocalHead) -> None:
    (head.folder / "train.py").write_text(DIES_ONCE)
    head.write_local({"script": "train.py"}, workers=(1, 1), restart={"max_restarts": 3, "backoff": 0})

    done = head.run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    told = (
        "first observed failure: rank 1 on localhost.1, killed by SIGKILL"
        " (not by clusterctl, no OOM kill in the kernel log)\n"
    )
    assert f"{told}restart 1 of 3 now (rank 1 on localhost.1: killed by SIGKILL)\n" in done.stderr
    status = head.json("status", head.newest())
    assert [(one["attempt"], (one["cause"] or {}).get("signal")) for one in status["attempts"]] == [
        (0, "SIGKILL"),
        (1, None),
    ]


FAILS_ALIKE = """\
import pathlib
pathlib.Path("last.pt").write_text("weights")
raise ValueError("again")
"""


@pytest.mark.parametrize("resume", ["this run", "never"])
def test_a_checkpoint_that_every_attempt_writes_anew_counts_as_getting_further(head: LocalHead, resume: str) -> None:
    (head.folder / "train.py").write_text(FAILS_ALIKE)
    job = {"script": "train.py", "checkpoint": {"pattern": "last.pt", "resume": resume}}
    head.write_local(job, restart={"max_restarts": 4, "backoff": 0})

    done = head.run("up", "--no-health")

    assert "no restart: all 4 restarts are used up" in done.stderr
