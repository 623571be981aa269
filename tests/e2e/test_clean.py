"""What `clean` leaves on the nodes of runs that ended: nothing."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events, outcome
from tests.lab.faulty import run_dir

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def on_nodes(head: LocalHead) -> list[str]:
    return sorted(path.name for path in Path(head.env["XDG_STATE_HOME"], "clusterctl/nodes").glob("*"))


def test_nothing_is_left_of_a_run_whose_start_failed_when_it_was_prepared(head: LocalHead) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        head.write_local({"command": ["true"]}, network={"master_port": port})
        refused = head.run("up", "--no-health")
    assert refused.returncode == 6, refused.stderr
    assert on_nodes(head) == [head.newest()]

    cleaned = head.run("clean", "--older-than", "0s", "--yes")

    assert cleaned.returncode == 0, cleaned.stderr
    assert on_nodes(head) == []
    assert head.json("ps", "-a") == []


def test_people_and_programs_get_runs_in_one_order(head: LocalHead) -> None:
    head.write_local({"command": ["true"]})
    for _ in range(2):
        assert head.run("up", "--no-health").returncode == 0
    with socket.create_server(("", 0)) as taken:
        head.write_local({"command": ["true"]}, network={"master_port": taken.getsockname()[1]})
        assert head.run("up", "--no-health").returncode == 6

    _, *table = head.run("ps", "-a").stdout.splitlines()

    ordered = [line.split()[0] for line in table]
    assert head.run("ps", "-a", "-q").stdout.split() == ordered
    listed = head.json("ps", "-a")
    assert [entry["run"] for entry in listed] == ordered
    assert listed[-1]["not_started"]
    assert listed[0]["started"] > listed[1]["started"]


def test_a_run_that_is_named_is_removed_alone_however_young(head: LocalHead) -> None:
    head.write_local({"command": ["true"]})
    for _ in range(2):
        assert head.run("up", "--no-health").returncode == 0
    gone, kept = (run["run"] for run in head.json("ps", "-a"))

    cleaned = head.run("clean", gone, "--yes")

    assert cleaned.returncode == 0, cleaned.stderr
    assert " on localhost" in cleaned.stderr
    assert [run["run"] for run in head.json("ps", "-a")] == [kept]
    assert gone not in on_nodes(head)


def test_a_run_that_goes_on_is_not_removed_though_it_is_named(head: LocalHead) -> None:
    head.write_local({"command": ["sleep", "600"]})
    run = head.json("up", "-d", "--no-health")["run"]

    refused = head.run("clean", run, "--yes")

    assert refused.returncode == 6
    assert f"clusterctl down {run}" in refused.stderr
    assert head.json("ps")[0]["run"] == run


def test_runs_that_are_named_are_not_chosen_by_age_as_well(head: LocalHead) -> None:
    assert head.run("clean", "demo", "--keep", "3").returncode == 2


def test_a_run_that_may_still_run_on_a_node_out_of_reach_is_kept_until_it_is_named(head: LocalHead) -> None:
    head.write_local({"command": ["true"]})
    assert head.run("up", "--no-health").returncode == 0
    run = head.newest()
    writer = RunDirWriter(RunDir(run_dir(head, run)))
    left = [outcome.build_remaining_process("localhost", None, outcome.NODE_LOST)]
    writer.append(controller_events.RunEnded(state="lost", exit_code=102, remaining=left), time.time())
    writer.close()
    # Without it nobody knows how the node is reached.
    (run_dir(head, run) / "spec.json").unlink()

    by_age = head.run("clean", "--older-than", "0s", "--yes")
    kept = head.json("ps")
    by_name = head.run("clean", run, "--yes")

    assert by_age.returncode == 7, by_age.stderr
    assert f"processes of {run} may still run on localhost, which cannot be reached" in by_age.stderr
    assert [entry["run"] for entry in kept] == [run]
    assert by_name.returncode == 0, by_name.stderr
    assert head.json("ps", "-a") == []
