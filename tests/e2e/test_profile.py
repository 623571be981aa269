"""`profile` and `stacks --speedscope` of a run that trains: DDP with gloo, two nodes, one rank each."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

JOB = """
import time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train_step():
    model(torch.randn(8, 32)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)

while True:
    train_step()
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 1))
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    run = head.start()
    wait_for(lambda: "train_step" in head.run("stacks").stdout, 90.0, "training", every=1.0)
    return run


def operations(events: list[dict[str, Any]], group: str, track: str) -> set[str]:
    pids = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == group}
    tids = {e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] in pids and track in e["args"]["name"]}
    return {e["name"] for e in events if e["ph"] == "X" and e["pid"] in pids and e["tid"] in tids}


def test_the_profile_of_two_ranks_has_their_operations_and_collectives_on_one_clock(head: LocalHead, run: str) -> None:
    done = head.run("profile", "--rank", "0-1", "--for", "2s")

    assert done.returncode == 0, done.stderr
    assert "rank 1 on localhost.1: torch's profiler" in done.stderr
    events = json.loads(gzip.decompress((head.folder / f"{run}.profile.json.gz").read_bytes()))["traceEvents"]
    for rank in (0, 1):
        group = f"rank {rank} localhost.{rank}"
        assert {"aten::addmm", "AddmmBackward0", "aten::mm", "c10d::allreduce_"} <= operations(
            events, group, "main thread"
        )
        assert "gloo:all_reduce" in operations(events, group, "gloo")
    times = [e["ts"] / 1e6 for e in events if e["ph"] == "X"]
    assert min(times) > -0.5
    assert max(times) < 15.0


def test_a_file_without_gz_is_plain_json(head: LocalHead, run: str) -> None:
    done = head.run("profile", run, "--rank", "1", "--for", "1s", "-o", "plain.json", "-q")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((head.folder / "plain.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (("--rank", "7"), 102, "has no rank 7; its ranks are 0-1"),
        (("--rank", "0", "--for", "61s"), 2, "at most 60 s"),
        (("--rank", "0", "--for", "0s"), 2, "longer than 0"),
        ((), 2, "`profile` needs `--rank`"),
        (("--rank", "0", "-o", "nowhere/x.json"), 6, "nowhere/x.json cannot be written"),
    ],
    ids=["unknown rank", "too long", "no time", "no rank", "no folder"],
)
def test_what_cannot_be_recorded_is_refused_at_once(
    head: LocalHead, run: str, words: tuple[str, ...], code: int, complaint: str
) -> None:
    done = head.run("profile", run, *words)

    assert done.returncode == code
    assert complaint in done.stderr


def test_stacks_become_a_flame_graph_with_a_function_of_the_job(head: LocalHead, run: str) -> None:
    done = head.run("stacks", run, "--speedscope")

    assert done.returncode == 0, done.stderr
    document = json.loads((head.folder / f"{run}.speedscope.json").read_text())
    assert {"<module>", "train_step", "rank 0", "rank 1"} <= {frame["name"] for frame in document["shared"]["frames"]}
    assert [len(profile["samples"]) for profile in document["profiles"]][:2] == [2, 2]


def test_a_file_for_stacks_needs_its_format(head: LocalHead, run: str) -> None:
    done = head.run("stacks", run, "-o", "x.json")

    assert done.returncode == 2
    assert "`--output` needs `--speedscope`" in done.stderr


def test_a_run_that_is_over_has_nothing_to_record(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": "true"})
    head.run("up", "--no-health")

    done = head.run("profile", "--rank", "0")

    assert done.returncode == 102
    assert "is over, so no rank is running" in done.stderr
