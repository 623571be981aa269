"""Which hosts of the file take part in a run: `up --nodes`, `--exclude`, `--min-nodes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from clusterctl.agent.supervisor.gpu_claims import GpuClaims
from tests.documented import typed

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

GONE = {"host": "gone", "address": "127.0.0.1", "port": 1, "workers": 1, "gpus": 0}
SICK = {"host": "sick", "transport": "local", "workers": 1, "gpus": 0, "python": "/nowhere/python3"}


def write(head: LocalHead, *more: dict[str, Any], **keys: Any) -> None:
    """Two nodes that are well, and others."""
    path = head.write_local({"command": "true"}, workers=(1, 1), **keys)
    document = yaml.safe_load(path.read_text())
    document["hosts"] += more
    path.write_text(yaml.safe_dump(document))


def kept(head: LocalHead) -> list[tuple[str, str]]:
    (path,) = Path(head.env["XDG_STATE_HOME"]).glob("clusterctl/runs/*/spec.json")
    return [(host["name"], host["role"]) for host in json.loads(path.read_text())["hosts"]]


@pytest.mark.parametrize(
    "chosen",
    [
        ("--nodes", "localhost.1"),
        ("--exclude", "localhost.0"),
        ("--nodes", "localhost", "--exclude", "localhost.[0-0]"),
    ],
    ids=" ".join,
)
def test_the_chosen_hosts_alone_take_part_and_are_kept_with_the_run(head: LocalHead, chosen: tuple[str, ...]) -> None:
    write(head)

    done = head.run("up", "--no-health", *chosen)

    assert done.returncode == 0, done.stderr
    assert kept(head) == [("localhost.1", "worker")]
    assert [(w["rank"], w["node"]) for w in head.json("status")["workers"]] == [(0, "localhost.1")]


def test_a_plan_has_the_chosen_hosts_alone(head: LocalHead) -> None:
    write(head)

    plan = head.json(*typed("clusterctl up --exclude NODE", NODE="localhost.1"), "--dry-run")

    assert [node["node"] for node in plan["nodes"]] == ["localhost.0"]


def test_hosts_of_an_exclude_file_take_no_part(head: LocalHead) -> None:
    write(head)
    (head.folder / "bad.txt").write_text("# broken\nlocalhost.[1-1]\nhost-of-another-cluster\n")

    plan = head.json("up", "--dry-run", "--exclude-file", "bad.txt")

    assert [node["node"] for node in plan["nodes"]] == ["localhost.0"]


@pytest.mark.parametrize(
    ("chosen", "code", "said"),
    [
        pytest.param(("--exclude-file", "gone.txt"), 102, "gone.txt: No such file", id="no file"),
        pytest.param(("--exclude", "localhots.1"), 102, "no node `localhots.1`", id="unknown"),
        pytest.param(("--exclude", "*"), 102, "no node is selected", id="nobody"),
        pytest.param(("--min-nodes", "3"), 2, "`--min-nodes 3` is more than the 2 nodes", id="more than there are"),
        pytest.param(
            ("--set", "job.nodes=2", "--nodes", "localhost.1"), 2, "`job.nodes: 2` is more than the 1 node", id="nodes"
        ),
        pytest.param(
            ("--set", "job.nodes=1", "--min-nodes", "2"), 2, "more than the 1 of `job.nodes`", id="the job needs fewer"
        ),
        pytest.param(("--nodes", "[1"), 2, "`[` is not closed", id="no set"),
    ],
)
def test_a_choice_that_cannot_be_made_starts_nothing(
    head: LocalHead, chosen: tuple[str, ...], code: int, said: str
) -> None:
    write(head)

    done = head.run("up", "--no-health", *chosen)

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert head.json("ps", "-a") == []


@pytest.mark.parametrize(
    ("other", "options"),
    [pytest.param(GONE, ("--no-health",), id="cannot be reached"), pytest.param(SICK, (), id="failed a check")],
)
def test_a_run_begins_without_a_node_that_is_not_fit_where_enough_are_left(
    head: LocalHead, other: dict[str, Any], options: tuple[str, ...]
) -> None:
    write(head, other)

    done = head.run(*typed("clusterctl up --min-nodes N", N="2"), *options)

    assert done.returncode == 0, done.stderr
    assert f"the run begins with 2 of 3 nodes: {other['host']} will wait as spares" in done.stderr
    assert kept(head)[-1] == (other["host"], "spare")
    assert len(head.json("status")["workers"]) == 2


def test_a_run_that_needs_some_of_the_hosts_takes_free_ones_and_says_why_not_the_others(head: LocalHead) -> None:
    path = head.write_local({"command": "true", "nodes": 2}, workers=(1, 1, 1, 1))
    document = yaml.safe_load(path.read_text())
    for index, host in enumerate(document["hosts"]):
        host["gpus"] = [800 + index]
    document["hosts"].append(GONE)
    path.write_text(yaml.safe_dump(document))
    holder = GpuClaims("theirs", "n1")
    holder.claim([801])
    try:
        done = head.run("up", "--no-health")
    finally:
        holder.release()

    assert done.returncode == 0, done.stderr
    assert "`job.nodes` allows other nodes: gone will wait as spares" in done.stderr
    assert (
        "the run takes localhost.[0,2]; the others wait as spares "
        "(localhost.1: GPU 801 is held by run theirs (node n1); localhost.3: not needed)"
        in " ".join(done.stderr.split())
    )
    assert [role for _, role in kept(head)] == ["worker", "spare", "worker", "spare", "spare"]


def test_a_plan_uses_the_first_hosts_that_the_job_needs(head: LocalHead) -> None:
    write(head)

    plan = head.json("up", "--dry-run", "--set", "job.nodes=1")

    assert [node["node"] for node in plan["nodes"]] == ["localhost.0"]


def test_a_run_does_not_begin_with_fewer_than_were_asked_for(head: LocalHead) -> None:
    write(head, GONE)

    done = head.run("up", "--no-health", "--min-nodes", "3")

    assert done.returncode == 4, done.stderr
    assert "gone" in done.stderr


def test_a_start_that_a_node_prevents_says_how_to_begin_without_it(head: LocalHead) -> None:
    write(head, GONE)
    done = head.run("up", "--no-health")
    assert done.returncode == 4
    assert "`--exclude gone` begins with 2 of 3 nodes" in done.stderr

    assert head.run("up", "--no-health", "--exclude", "gone").returncode == 0


def test_where_no_node_is_left_nobody_is_told_to_begin_without_it(head: LocalHead) -> None:
    head.write_local({"command": "true"})
    done = head.run("up", "--no-health", "--set", "hosts=[{host: gone, address: 127.0.0.1, port: 1}]")
    assert done.returncode == 4
    assert "--exclude" not in done.stderr
