"""A restart on nodes with disks of their own: no checkpoint is lost, whoever has written which part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.faulty import add_spare
from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

JOB = """\
import json, os, pathlib, sys, time
env, home, ckpt = os.environ, pathlib.Path.home(), pathlib.Path("ckpt")
rank, attempt, resume = int(env["RANK"]), int(env["CLUSTERCTL_ATTEMPT"]), env.get("CLUSTERCTL_RESUME_FROM")
ckpt.mkdir(exist_ok=True)

def save(name, text):
    path = ckpt / name
    path.parent.mkdir(exist_ok=True)
    path.with_name(path.name + ".tmp").write_text(text)
    path.with_name(path.name + ".tmp").rename(path)

def content(path):
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return {f.name: f.read_text() for f in files}

print(json.dumps({"rank": rank, "resume": resume, "has": content(pathlib.Path(resume)) if resume else None}), flush=True)
"""
WAIT = """
while attempt == 0:
    (home / f"saved-{rank}").touch()
    if (home / f"die-{rank}").exists():
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
"""
ONE_FILE = (
    'if rank == 0 and attempt == 0:\n    save("step-1.pt", "old"); time.sleep(0.05); save("step-2.pt", "weights")\n'
)
SHARDS = """
if attempt == 0:
    save(f"step-2/__{rank}_0.distcp", f"shard {rank}")
    time.sleep(0.05)
    if rank == 0:
        save("step-2/.metadata", "all")
"""
TRAINER = """
if attempt == 0:
    save(f"step-2/rng_state_{rank}.pth", f"of rank {rank}")
    if rank == 0:
        save("step-2/model.pt", "weights")
"""
OWN_WORLD = """
if attempt == 0:
    save("step-1.pt", f"shard {rank}")
    time.sleep(0.05)
    if rank == 0:
        save("step-2.pt", "shard 0")
"""
BY_RANK = 'if attempt == 0:\n    save(f"step-2-rank{rank}.pt", f"of rank {rank}")\n'
BIG = 'if rank == 0 and attempt == 0:\n    save("step-2.pt", "x" * (24 << 20))\n'
WRITES_ANEW = """
if rank == 0:
    save("last.pt", f"weights {attempt}")
while attempt < 2:
    if rank == 1 and (home / f"die-{attempt}").exists():
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
"""
REPLACED = {"network": {"node_lost_after": "4s"}, "on_controller_loss": {"stop_after": "2s"}}


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def begin(head: Head, nodes: Sequence[Node], saves: str, *, spare: Node | None = None, **more: Any) -> str:
    """Start a job whose ranks save and wait; return its run once all have saved."""
    checkpoint = {"pattern": "ckpt/step-*", **more.pop("checkpoint", {})}
    (head.folder / "train.py").write_text(JOB + saves + WAIT)
    job = {"script": "train.py", "grace": "1s", "checkpoint": checkpoint}
    path = head.write({n.name: 1 for n in nodes}, job, restart={"max_restarts": 1, "backoff": 0}, **more)
    if spare is not None:
        add_spare(path, spare)
    run = str(head.json("up", "-d", "--no-health")["run"])
    for rank, node in enumerate(nodes):
        node.wait_for(node.path(f"saved-{rank}").exists, what="its checkpoint")
    return run


def resumed(head: Head, run: str, attempt: int = 1) -> dict[int, tuple[str | None, dict[str, str] | None]]:
    """What each rank of an attempt was told to go on from, and what it found there."""
    lines = head.run("logs", run, "--format", "json", "--attempt", str(attempt)).stdout.splitlines()
    told = [json.loads(text) for line in lines if (text := json.loads(line)["text"]).startswith("{")]
    return {one["rank"]: (one["resume"], one["has"]) for one in told}


ALL_SHARDS = {".metadata": "all", "__0_0.distcp": "shard 0", "__1_0.distcp": "shard 1"}


@pytest.mark.parametrize(
    ("saves", "shared", "path", "content"),
    [
        pytest.param(ONE_FILE, False, "ckpt/step-2.pt", {"step-2.pt": "weights"}, id="one file, by rank 0"),
        pytest.param(ONE_FILE, True, "ckpt/step-2.pt", {"step-2.pt": "weights"}, id="a folder that is called shared"),
        pytest.param(SHARDS, False, "ckpt/step-2", ALL_SHARDS, id="shards on each node"),
        pytest.param(
            TRAINER,
            False,
            "ckpt/step-2",
            {"model.pt": "weights", "rng_state_0.pth": "of rank 0", "rng_state_1.pth": "of rank 1"},
            id="a folder with something of each rank",
        ),
    ],
)
def test_a_restart_copies_the_newest_checkpoint_to_nodes_that_lack_it(
    nodes: NodeFactory, head: Head, saves: str, shared: bool, path: str, content: dict[str, str]
) -> None:
    first, second = nodes(2)
    run = begin(head, [first, second], saves, checkpoint={"shared": shared})

    second.path("die-1").touch()
    attached = head.run("attach", run)

    assert attached.returncode == 0, attached.stderr
    assert resumed(head, run) == {0: (path, content), 1: (path, content)}
    assert f"{path} copied from " in attached.stderr
    assert f"attempt 1 goes on from `{path}`" in attached.stderr
    assert ("`job.checkpoint.shared` says" in attached.stderr) is shared


def test_a_copy_is_not_gone_on_from_once_its_source_was_written_anew(nodes: NodeFactory, head: Head) -> None:
    first, second = nodes(2)
    (head.folder / "train.py").write_text(JOB + WRITES_ANEW)
    job = {"script": "train.py", "grace": "1s", "checkpoint": {"pattern": "ckpt/last.pt"}}
    head.write({n.name: 1 for n in (first, second)}, job, restart={"max_restarts": 2, "backoff": 0})
    up = head.start("up", "--no-health")
    written = first.path(f"{head.workdir()}/ckpt/last.pt")

    for attempt in range(2):
        first.wait_for(lambda a=attempt: written.exists() and written.read_text() == f"weights {a}", what="its weights")
        second.path(f"die-{attempt}").touch()
    said = up.communicate(timeout=60)[1]

    assert up.returncode == 0, said
    assert {attempt: resumed(head, head.newest(), attempt)[1] for attempt in (1, 2)} == {
        attempt: ("ckpt/last.pt", {"last.pt": f"weights {attempt - 1}"}) for attempt in (1, 2)
    }


def test_what_nodes_write_under_one_name_for_themselves_is_not_mixed(nodes: NodeFactory, head: Head) -> None:
    first, second = nodes(2)
    run = begin(head, [first, second], OWN_WORLD)

    second.path("die-1").touch()
    attached = head.run("attach", run)

    assert attached.returncode == 0, attached.stderr
    own = {rank: ("ckpt/step-1.pt", {"step-1.pt": f"shard {rank}"}) for rank in (0, 1)}
    assert resumed(head, run) == own
    assert "`ckpt/step-2.pt` is not on" in attached.stderr


def test_a_spare_is_given_the_newest_checkpoint(nodes: NodeFactory, head: Head) -> None:
    first, second, spare = nodes(3)
    run = begin(head, [first, second], ONE_FILE, spare=spare, **REPLACED)

    second.kill()
    attached = head.run("attach", run)

    assert attached.returncode == 0, attached.stderr
    one = ("ckpt/step-2.pt", {"step-2.pt": "weights"})
    assert resumed(head, run) == {0: one, 1: one}
    assert f"ckpt/step-2.pt copied from {first.name} to {spare.name}, 7 B" in attached.stderr


def test_a_run_whose_only_checkpoint_is_lost_with_a_node_stops_and_says_so(nodes: NodeFactory, head: Head) -> None:
    first, second, spare = nodes(3)
    run = begin(head, [first, second], ONE_FILE, spare=spare, **REPLACED)

    first.kill()
    attached = head.run("attach", run)

    assert attached.returncode == 100, attached.stderr
    assert (
        f"no checkpoint of this run is on n[2-3], and {first.name}, which cannot be reached, may have some"
        in attached.stderr
    )
    assert resumed(head, run) == {}


def test_files_of_each_rank_by_name_are_not_given_to_other_ranks(nodes: NodeFactory, head: Head) -> None:
    first, second = nodes(2)
    run = begin(head, [first, second], BY_RANK)

    second.path("die-1").touch()
    attached = head.run("attach", run)

    assert attached.returncode == 100, attached.stderr
    assert "which writes checkpoints of other names, as `ckpt/step-2-rank1.pt`" in attached.stderr
    assert resumed(head, run) == {}


def test_a_checkpoint_for_which_a_node_has_no_space_stops_the_run_and_stays_where_it_is(
    nodes: NodeFactory, head: Head
) -> None:
    first, second = nodes(2)
    run = begin(head, [first, second], BIG, logs={"reserve": "1MiB"})

    second.fill_disk(leave=4 << 20)
    second.path("die-1").touch()
    attached = head.run("attach", run)

    assert attached.returncode == 100, attached.stderr
    assert f"`ckpt/step-2.pt` cannot be copied from {first.name} to {second.name}: " in attached.stderr
    assert " free" in attached.stderr, attached.stderr
    assert first.path(f"{head.workdir()}/ckpt/step-2.pt").stat().st_size == 24 << 20
