"""What commands print with `--json`: one run of two nodes is asked by every reading command, and then it fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import json_shapes as shapes
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

JOB = """\
import os, time

print(f"rank {os.environ['RANK']} is here", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise ValueError("no such batch")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 2), secrets={"TOKEN": {"env": "PATH"}})
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    answer = head.json("up", "-d", "--no-health")
    shapes.check(shapes.UP_DETACHED, answer)
    run = str(answer["run"])
    wait_for(lambda: len(lines(head, run)) >= 3, what="a line of each rank", every=0.2)
    return run


@pytest.fixture(scope="module")
def failed(head: LocalHead, run: str) -> str:
    """The same run when it is over."""
    (head.folder / "go").touch()
    assert head.run("wait", run).returncode == 100
    return run


def lines(head: LocalHead, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in head.run("logs", run, "--format", "json").stdout.splitlines()]


def test_up_dry_run_shows_the_plan_without_secrets(head: LocalHead) -> None:
    plan = head.json("up", "--dry-run")
    shapes.check(shapes.DRY_RUN, plan)
    workers = [worker for node in plan["nodes"] for worker in node["workers"]]
    assert [worker["rank"] for worker in workers] == [0, 1, 2]
    assert {worker["env"]["TOKEN"] for worker in workers} == {"***"}


def test_up_dry_run_shows_null_where_only_a_node_can_tell(head: LocalHead) -> None:
    plan = head.json("up", "--dry-run", "--set", "hosts=gpu01")
    shapes.check(shapes.DRY_RUN, plan)
    assert plan["world_size"] is None


def test_ps_lists_a_run_that_goes_on(head: LocalHead, run: str) -> None:
    found = head.json("ps")
    shapes.check(shapes.filled(shapes.PS), found)
    assert [(r["run"], r["state"], r["attended"], r["world_size"]) for r in found] == [(run, "running", True, 3)]


def test_status_of_a_run_that_goes_on(head: LocalHead, run: str) -> None:
    found = head.json("status", run)
    shapes.check(shapes.STATUS, found)
    assert [node["node"] for node in found["nodes"]] == ["localhost.0", "localhost.1"]
    assert [worker["state"] for worker in found["workers"]] == ["running"] * 3
    assert found["cause"] is None


def test_logs_are_one_object_a_line(head: LocalHead, run: str) -> None:
    found = lines(head, run)
    for line in found:
        shapes.check(shapes.LOG_LINE, line)
    assert sorted(line["text"] for line in found) == [f"rank {rank} is here" for rank in range(3)]


def test_wait_that_gave_up_says_the_state(head: LocalHead, run: str) -> None:
    found = head.json("wait", run, "--timeout", "0")
    shapes.check(shapes.WAIT, found)
    assert (found["state"], found["exit_code"]) == ("running", None)


def test_health_lists_findings_and_facts(head: LocalHead) -> None:
    found = head.json("health")
    shapes.check(shapes.HEALTH, found)
    assert all(node["findings"] for node in found["nodes"])
    shapes.check(shapes.filled(shapes.HISTORY), head.json("health", "--history"))


def test_exec_has_an_object_for_each_node(head: LocalHead) -> None:
    found = json.loads(head.run("exec", "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3").stdout)
    shapes.check(shapes.filled(shapes.EXEC), found)
    assert {(n["exit_code"], n["stdout"], n["stderr"], n["error"]) for n in found} == {(3, "out\n", "err\n", None)}


def test_exec_says_why_a_node_has_no_answer(head: LocalHead) -> None:
    asked = ["exec", "--json", "--set", "hosts=127.0.0.1", "--set", "defaults.port=1", "--", "true"]
    found = json.loads(head.run(*asked).stdout)
    shapes.check(shapes.filled(shapes.EXEC), found)
    assert "connection refused" in found[0]["error"]


def test_status_of_a_failed_run_has_its_cause(head: LocalHead, failed: str) -> None:
    found = head.json("status", failed)
    shapes.check(shapes.STATUS, found)
    cause = found["cause"]
    assert (cause["rank"], cause["node"], cause["exit_code"], cause["certain"]) == (1, "localhost.1", 1, True)
    assert "ValueError: no such batch" in cause["message"]
    assert [worker["stopped"] for worker in found["workers"]] == [True, False, True]


def test_ps_lists_a_failed_run_with_its_code(head: LocalHead, failed: str) -> None:
    found = head.json("ps", "-a")
    shapes.check(shapes.filled(shapes.PS), found)
    assert [(r["state"], r["exit_code"], r["attended"]) for r in found] == [("failed", 100, False)]


def test_wait_for_a_failed_run(head: LocalHead, failed: str) -> None:
    found = head.json("wait", failed)
    shapes.check(shapes.WAIT, found)
    assert found == {"run": failed, "state": "failed", "exit_code": 100}


def test_down_lists_what_it_ended(head: LocalHead, failed: str) -> None:
    run = str(head.json("up", "-d", "--no-health", "--command", "sleep 600")["run"])
    found = head.json("down", run, failed)
    shapes.check(shapes.DOWN, found)
    assert {(r["run"], r["state"]) for r in found} == {(run, "cancelled"), (failed, "failed")}


def test_all_that_up_tells_by_progress_json_is_json_to_the_last_line(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "job.py").write_text("raise ValueError('no such batch')\n")
    head.write_local({"script": "job.py"})

    done = head.run("up", "--no-health", "--progress", "json", "--color", "always")

    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"phase", "state"} <= told[0].keys()
    assert (done.returncode, told[-1]["state"], told[-1]["exit_code"]) == (100, "failed", 100)
    assert "no such batch" in "\n".join(told[-1]["report"])
