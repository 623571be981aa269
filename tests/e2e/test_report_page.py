"""`report` of a run that was really made."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.documented import typed
from tests.e2e import hostile
from tests.unit.render.test_page import OURS, STEERING, Tags

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

JOB = """\
import os, sys, time
import clusterctl

for step in range(30):
    clusterctl.progress(step=step)
    print("<b>step", step, flush=True)
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    raise ValueError("no <batch>")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 2))
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    head.run("up")
    (found,) = head.json("ps", "-a")
    return str(found["run"])


@pytest.fixture(scope="module")
def page(head: LocalHead, run: str) -> str:
    done = head.run(*typed("clusterctl report RUN -o run.html", RUN=run))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return (head.folder / "run.html").read_text()


@pytest.mark.parametrize(
    "said",
    [
        "<h2>What went wrong</h2>",
        "ValueError: no &lt;batch&gt;",
        "crash EXCEPTION, certain",
        "attempt 0 begins: 3 ranks on 2 nodes",
        "a worker failed: stopping the others",
        "<h2>Last lines</h2>",
        "rank 1 on localhost.1",
        "&lt;b&gt;step 29",
    ],
)
def test_the_page_tells_what_the_run_was_and_how_it_ended(page: str, said: str) -> None:
    assert said in page


def test_files_of_the_code_stand_in_a_traceback_as_in_their_folder(page: str, head: LocalHead) -> None:
    wrong = page.partition("<h2>What went wrong</h2>")[2].partition("<h2>")[0]
    assert "Traceback" in wrong
    assert f"{head.folder}/" not in html.unescape(wrong), wrong


def test_the_page_of_a_run_holds_nothing_but_itself(page: str) -> None:
    assert Tags(page).tags <= OURS
    assert not re.findall(r"https?://", page)


def test_a_page_goes_to_stdout_where_that_is_wanted(head: LocalHead, run: str) -> None:
    assert head.run("report", run, "-o", "-").stdout.startswith("<!doctype html>")


def test_a_trace_shows_the_attempt_the_ranks_and_their_steps(head: LocalHead, run: str) -> None:
    done = head.run(*typed("clusterctl report --trace"), run)

    assert done.returncode == 0, done.stderr
    events = json.loads((head.folder / f"{run}.trace.json").read_text())["traceEvents"]
    groups = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    slices = {(groups[e["pid"]], tracks[e["pid"], e["tid"]], e["name"]): e for e in events if e["ph"] == "X"}
    assert {(run, "attempts", "attempt 0"), ("localhost.0", "link", "connected")} <= set(slices)
    assert slices["localhost.1", "rank 1", "attempt 0"]["args"]["exit_code"] == 1
    assert slices[run, "attempts", "attempt 0"]["dur"] >= slices["localhost.1", "rank 1", "attempt 0"]["dur"] > 2e6
    assert {e["name"] for e in events if e["ph"] == "C"} >= {"step of rank 0", "step of rank 1"}
    assert any("ValueError" in e["name"] for e in events if e["ph"] == "i")


def test_a_page_that_cannot_be_written_is_refused(head: LocalHead, run: str) -> None:
    done = head.run("report", run, "-o", "nowhere/run.html")

    assert done.returncode == 6
    assert "nowhere/run.html cannot be written" in done.stderr


def script(key: str, value: object) -> object:
    """Add a script to whatever a text is."""
    return hostile.texts(key, value) + "<script>x</script>" if isinstance(hostile.texts(key, value), str) else value


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "going on"])
@pytest.mark.parametrize("rewrite", [hostile.texts, script, hostile.everything], ids=["texts", "scripts", "everything"])
def test_the_page_of_a_hostile_run_is_harmless(
    head: LocalHead, run: str, rewrite: hostile.Rewrite, ended: bool, tmp_path: Path
) -> None:
    hostile.make(Path(head.env["XDG_STATE_HOME"]), tmp_path, run, rewrite, ended=ended)
    other = type(head)(head.folder, {**head.env, "XDG_STATE_HOME": str(tmp_path)})

    done = other.run("report", run, "-o", "-")

    assert done.returncode == 0, done.stderr
    assert Tags(done.stdout).tags <= OURS
    assert STEERING.findall(done.stdout) == []
    assert hostile.found_in(done.stdout) == []
    assert hostile.found_in(done.stderr) == []


def test_the_page_of_a_run_that_a_person_ended_tells_of_nothing_wrong(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "job.py").write_text("import time\ntime.sleep(600)\n")
    head.write_local({"script": "job.py", "grace": "1s"})
    run = head.start()
    assert head.run("down", run).returncode == 0

    page = head.run("report", run, "-o", "-").stdout

    assert "What went wrong" not in page
    assert "cancelled" in page
