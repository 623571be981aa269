"""Casts over a real network: nodes that die, links that are cut, clocks that are wrong, disks that fill up."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

SIZE = 48 << 20
CONTENT = random.Random(5).randbytes(SIZE)
ROUNDS = int(os.environ.get("CAST_ROUNDS", "1"))
NODES = 8 if ROUNDS > 1 else 5
SLOW = ("--limit", "12MB/s")


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "data.bin").write_bytes(CONTENT)
    return Head(folder, head_env)


def start(head: Head, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterctl", "cast", "data.bin", "~/data/", "--json", *arguments],
        cwd=head.folder, env=dict(head.env), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=110)
    assert out, errors
    answer: dict[str, Any] = json.loads(out)
    return {**answer, "code": process.returncode, "stderr": errors}


def spooled_bytes(nodes: Sequence[Node]) -> int:
    return sum(file.stat().st_blocks * 512 for node in nodes for file in node.path("data").glob(".clusterctl-cast-0/*"))


def is_whole(node: Node) -> bool:
    path = node.path("data/data.bin")
    return path.exists() and path.read_bytes() == CONTENT


def has_nothing_left(node: Node) -> bool:
    return not any(node.path("data").glob(".*")) and not any("peer" in p.comm for p in node.processes())


def begin(head: Head, made: Sequence[Node]) -> None:
    head.write({node.name: 1 for node in made}, {"command": "true"})


def test_each_node_is_whole_and_the_head_has_sent_the_file_once(nodes: NodeFactory, head: Head) -> None:
    made = nodes(4)
    begin(head, made)

    done = end(start(head))

    assert (done["code"], done["warnings"], done["head_sent_bytes"]) == (0, [], SIZE)
    assert [is_whole(node) and has_nothing_left(node) for node in made] == [True] * 4


@pytest.mark.timeout(120 * ROUNDS)
def test_when_a_node_dies_and_a_link_is_cut_the_others_are_whole(nodes: NodeFactory, head: Head) -> None:
    made = nodes(NODES)
    begin(head, made)
    for round_number in range(ROUNDS):
        chance = random.Random(round_number)
        dead, cut, other = chance.sample(made, 3)
        moment = chance.randrange(1, NODES // 2 * SIZE)
        process = start(head, *SLOW)
        wait_for(lambda: spooled_bytes(made) > moment or process.poll() is not None)  # noqa: B023
        cut.block(other)
        dead.kill()

        done = end(process)
        assert list(done["errors"]) == [dead.name]
        assert [is_whole(node) and has_nothing_left(node) for node in made if node is not dead] == [True] * (NODES - 1)
        cut.unblock(other)
        dead.boot()
        assert not dead.path("data/data.bin").exists()
        for node in made:
            shutil.rmtree(node.path("data"))


def test_nodes_that_cannot_reach_one_another_get_the_file_from_the_head(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3)
    begin(head, made)
    for node in made:
        node.block(*(other for other in made if other is not node))

    done = end(start(head))

    assert (done["code"], done["head_sent_bytes"]) == (0, 3 * SIZE)
    assert done["warnings"] == [
        "n[1-3] could not reach n[1-3]",
        "this machine sent the pieces itself to n[1-3]",
    ]
    assert [is_whole(node) and has_nothing_left(node) for node in made] == [True] * 3


def test_files_of_a_node_that_the_others_cannot_reach_pass_this_machine(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3)
    begin(head, made)
    source, *others = made
    source.path("data.bin").write_bytes(CONTENT)
    source.block(*others)

    done = head.run("cast", f"{source.name}:~/data.bin", "all:~/data/", "--json", timeout=110)

    answer = json.loads(done.stdout)
    assert (done.returncode, answer["errors"], answer["head_sent_bytes"]) == (0, {}, SIZE), done.stderr
    assert answer["warnings"] == ["n[2-3] can reach no node that has the files: this machine relays them"]
    assert [is_whole(node) and has_nothing_left(node) for node in others] == [True] * 2


def test_a_clock_that_is_a_day_off_does_not_matter(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3)
    begin(head, made)
    made[0].skew_clock(86400.0)
    made[1].skew_clock(-400 * 86400.0)

    done = end(start(head))

    assert (done["code"], done["warnings"], done["head_sent_bytes"]) == (0, [], SIZE)
    assert all(is_whole(node) for node in made)


@pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make killer`")
def test_the_nodes_finish_when_the_head_is_killed_and_the_next_cast_sends_nothing_twice(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(3)
    begin(head, made)
    process = start(head, *SLOW)
    wait_for(lambda: spooled_bytes(made) > SIZE)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    done = end(start(head))

    assert done["code"] == 0
    assert done["head_sent_bytes"] < SIZE
    assert [is_whole(node) and has_nothing_left(node) for node in made] == [True] * 3


@pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make killer`")
def test_a_second_cast_waits_for_the_first(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    begin(head, made)
    first = start(head, "--limit", "2MB/s")
    wait_for(lambda: spooled_bytes(made) > 0)

    second = start(head)
    done = [end(first), end(second)]

    assert [answer["code"] for answer in done] == [0, 0]
    assert done[1]["warnings"] == ["waiting for another cast to the same folder on n[1-2]"]
    assert done[1]["head_sent_bytes"] == 0
    assert [is_whole(node) and has_nothing_left(node) for node in made] == [True] * 2


def test_a_disk_that_fills_up_fails_its_node_alone(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3)
    begin(head, made)
    process = start(head, *SLOW)
    wait_for(lambda: any(made[0].path("data").glob(".clusterctl-cast-0/[0-9a-f]*")))
    made[0].fill_disk(leave=1 << 20)

    done = end(process)

    assert list(done["errors"]) == [made[0].name]
    assert "cannot be written to" in done["errors"][made[0].name]
    assert not any(made[0].path("data").iterdir())
    assert [node.path("data/data.bin").read_bytes() == CONTENT for node in made[1:]] == [True] * 2


def test_a_home_that_the_nodes_share_gets_the_file_once(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3, shared_home=True)
    begin(head, made)
    done = head.run("cast", "data.bin", "~/data/", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["head_sent_bytes"] == SIZE
    assert made[0].path("data/data.bin").read_bytes() == CONTENT
    assert not any(made[0].path("data").glob(".*"))


def test_a_sync_of_large_code_is_a_cast_and_links_and_copies_arrive(nodes: NodeFactory, head: Head) -> None:
    made = nodes(3)
    begin(head, made)
    (head.folder / "same.bin").write_bytes(CONTENT)
    (head.folder / "link.bin").symlink_to("data.bin")
    (head.folder / "logs").mkdir()

    first = head.run("sync")
    (head.folder / "same.bin").unlink()
    (head.folder / "new.bin").write_bytes(CONTENT[::-1])
    second = head.run("sync")

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "n[1-3]: 1 of" in second.stderr
    for node in made:
        work = node.path(head.workdir())
        assert {path.name for path in work.iterdir()} == {"data.bin", "new.bin", "link.bin", "logs", "cluster.yaml"}
        assert os.readlink(work / "link.bin") == "data.bin"
        assert (work / "data.bin").read_bytes() == CONTENT
        assert (work / "new.bin").read_bytes() == CONTENT[::-1]
