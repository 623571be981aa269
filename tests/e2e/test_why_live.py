"""What whoever watches is told of a run that hangs, and of one that fails: the short form of `why`, as it happens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.documented import typed
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.e2e.conftest import LocalHead, MakeHead

pytestmark = pytest.mark.timeout(240)

HANGS = """
import os, threading, time

def load():
    time.sleep(100_000)

def meet():
    threading.Event().wait()

print("begun", flush=True)
load() if os.environ["RANK"] == "1" else meet()
"""
FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise FileNotFoundError("no shard of this name")
time.sleep(600)
"""
LIMIT = {"timeout": "8s", "startup_timeout": "8s"}


@dataclass(frozen=True)
class Hung:
    """A run that hung and was ended for it, followed to its end; and one that was let alone, as `status` saw it."""

    head: LocalHead
    followed: CompletedProcess[str]
    run: str
    status: dict[str, Any]
    why: CompletedProcess[str]
    ended: LocalHead

    @property
    def folder(self) -> Path:
        return Path(self.head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / self.run


def begin(make_head: MakeHead, script: str, **stall: str) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(script)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(2, 1), stall={**LIMIT, **stall})
    return head


@pytest.fixture(scope="module")
def hung(make_head: MakeHead) -> Hung:
    left = begin(make_head, HANGS)
    run = left.start()
    ended = begin(make_head, HANGS, action="stop")
    followed = ended.run("up", "--no-health", timeout=150.0)

    def status() -> dict[str, Any]:
        told: dict[str, Any] = json.loads(left.run(*typed("clusterctl status --json")).stdout)
        return told

    wait_for(lambda: bool((status()["stall"] or {}).get("verdict")), 90.0, "the verdict of a stall", every=1.0)
    return Hung(left, followed, run, status(), left.run("why", run, "--json"), ended)


def short_form(text: str) -> list[str]:
    """The short form as it stands in what is shown: its first line, and those that are set in below it."""
    lines = [line.strip() for line in text.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith(("why: ", "warn: hang ")))
    last = next(number for number, line in enumerate(lines) if number >= first and "tells more" in line)
    return lines[first : last + 1]


def test_the_live_view_tells_a_confirmed_stall_in_five_lines(hung: Hung) -> None:
    first, who, waits, then, more = short_form(hung.followed.stderr)

    assert hung.followed.returncode == 104
    assert first.startswith("warn: hang NOT_JOINED, likely: rank 1 on localhost.0 (job.py:5)")
    assert who.startswith("who    rank 1 localhost.0  job.py:5 in load")
    assert waits == "waits  ranks 0,2  job.py:8 meet"
    assert then.startswith("next   clusterctl stacks")
    assert more.startswith("`clusterctl why")


def test_status_tells_the_verdict_while_it_hangs(hung: Hung) -> None:
    verdict = hung.status["stall"]["verdict"]

    assert (verdict["kind"], verdict["class"], verdict["confidence"]) == ("hang", "NOT_JOINED", "likely")
    assert [(one["rank"], one["node"], one["where"]) for one in verdict["culprits"]] == [(1, "localhost.0", "job.py:5")]


def test_the_command_says_the_same_and_found_an_answer(hung: Hung) -> None:
    assert hung.why.returncode == 0
    assert json.loads(hung.why.stdout) == hung.status["stall"]["verdict"]


def test_it_is_kept_with_the_run_for_programs_and_for_people(hung: Hung) -> None:
    kept = json.loads((hung.folder / "why.json").read_text())

    assert kept == hung.status["stall"]["verdict"]
    assert (hung.folder / "why.txt").read_text().startswith("hang NOT_JOINED, likely: rank 1 on localhost.0")
    assert "who    rank 1 localhost.0  job.py:5 in load\n" in (hung.folder / "why.txt").read_text()


def test_whoever_asks_for_how_long_a_stall_had_lasted_when_it_was_ended_hears_one_length(hung: Hung) -> None:
    """The rule is sure only a while after it begins to suspect, and the run is ended a while after that."""
    told = "".join(hung.ended.run(*words).stdout for words in (("status",), ("ps", "-a")))
    report = hung.followed.stderr.partition("stopping every worker")[2]

    assert len(set(re.findall(r"for (\d+) s \(limit", told + report))) == 1


def test_a_failure_is_told_in_short_below_the_report_of_the_end_and_kept(make_head: MakeHead) -> None:
    head = begin(make_head, FAILS)
    ended = head.run("up", "--no-health", timeout=100.0)
    (folder,) = (Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs").iterdir()
    told = short_form(ended.stderr)

    assert ended.returncode == 100
    assert told == [f"why: MISSING_FILE, certain, at job.py:4 in <module>; `clusterctl why {folder.name}` tells more"]
    # The controller keeps it once the run has ended, which is when `up` ends.
    wait_for((folder / "why.json").exists, what="the verdict to be kept")
    assert json.loads((folder / "why.json").read_text())["class"] == "MISSING_FILE"


@pytest.mark.parametrize("where", ["a terminal", "one pipe"])
def test_who_reads_output_and_report_is_one_stream_reads_an_error_and_its_traceback_once(
    make_head: MakeHead, where: str
) -> None:
    head = begin(make_head, FAILS)
    if where == "a terminal":
        with head.terminal("up", "--no-health") as screen:
            assert screen.wait(100.0) == 100
            told = screen.shown
    else:
        both = replace(head, enter=("/bin/sh", "-c", 'exec "$@" 2>&1', "sh"))
        told = both.run("up", "--no-health", timeout=100.0).stdout

    assert told.count("Traceback (most recent call last)") == 1
    # By the traceback, and on top of the report.
    assert " ".join(told.split()).count("FileNotFoundError: no shard of this name") == 2


def test_a_run_that_ends_well_is_told_nothing_of_it(make_head: MakeHead) -> None:
    ended = begin(make_head, "print('done')").run("up", "--no-health", timeout=100.0)

    assert ended.returncode == 0
    assert "why" not in ended.stderr


def test_where_nobody_could_look_when_the_stall_was_sure_somebody_looks_now(hung: Hung) -> None:
    folder = Path(hung.head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs" / str(hung.head.json("ps")[0]["run"])
    kept = [path for path in folder.glob("stall-*/*") if path.is_file()]
    assert kept
    for path in kept:
        path.unlink()

    verdict = json.loads(hung.head.run("why", folder.name, "--json").stdout)

    assert (verdict["class"], verdict["confidence"]) == ("NOT_JOINED", "likely")
    assert [one["rank"] for one in verdict["culprits"]] == [1]
