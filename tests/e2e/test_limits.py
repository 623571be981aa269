"""How many files may be open: a controller takes what it can get and goes on with little; workers get what the hard limit allows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.lab.faulty import run_dir

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def test_a_run_with_more_output_files_than_the_head_may_open_arrives_whole(head: LocalHead) -> None:
    head.write_local({"command": "echo $RANK"}, workers=(8,) * 5)

    done = replace(head, enter=("prlimit", "--nofile=100:100")).run("up", "--no-health", "--all-ranks")

    assert done.returncode == 0, done.stderr
    run = head.json("ps", "-a")[0]["run"]
    logs = (run_dir(head, run) / "nodes").glob("*/attempt-0/rank-*.log")
    assert sorted(int(log.read_text()) for log in logs) == list(range(40))


@pytest.mark.parametrize("most", [26, 40])
def test_a_head_that_may_open_too_few_says_how_to_have_more(head: LocalHead, most: int) -> None:
    head.write_local({"command": "true"}, workers=(1,) * 20)

    done = replace(head, enter=("prlimit", f"--nofile={most}:{most}")).run("up", "--no-health")

    # Whether a node or the start itself is first to find none left is a matter of luck.
    assert done.returncode in (4, 6), done.stderr
    assert "Too many open files" in done.stderr
    assert "hint: raise the limit of open files (`ulimit -n`)" in done.stderr


def test_workers_on_the_head_may_open_as_many_files_as_on_any_node(head: LocalHead) -> None:
    head.write_local({"command": "echo $(ulimit -Sn) of $(ulimit -Hn)"})

    done = replace(head, enter=("prlimit", "--nofile=300:600")).run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    assert "600 of 600" in done.stdout
