"""The templates for torch on two nodes with two workers each over real SSH: they finish, learn, and are right."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.documented import typed
from tests.lab import workloads
from tests.lab.head_cli import Head
from tests.lab.spec import SHARED
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

if not all(map(find_spec, ("torch", "keras", "sklearn"))):
    pytest.skip("needs torch, keras and scikit-learn", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

ON_CPU = ["--backend", "gloo"]
STEPS = ["--steps", "200", "--every", "10", "--min-accuracy", "0.9"]


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each template says when one process runs it."""
    return workloads.alone(
        tmp_path_factory.mktemp("alone"),
        # One process sees the same samples in each step as four ranks do, where the size is that of a rank's part.
        ("keras_ddp", ["--batch-size", "128"]),
        ("torch_ddp", ["--dropout", "0"]),
        ("checkpoint_resume", STEPS),
    )


def run(head: Head, *words: str) -> str:
    """Type a command as a page has it; return what the job says."""
    done = head.run(*words, timeout=workloads.LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_keras_on_torch_under_ddp_learns_as_one_process_does(
    nodes: NodeFactory, head: Head, alone: dict[str, str]
) -> None:
    workloads.copy(head, "keras_ddp", workloads.workers(nodes(2)))

    said = run(head, *typed("clusterctl up -- --precision bf16"))

    expected = alone["keras_ddp"]
    assert "training on 4 ranks, cpu, gloo, bf16" in said
    assert "weights identical on all 4 ranks" in said
    assert workloads.losses(said)[-1] < workloads.losses(said)[0] / 3
    # Each rank normalises its own quarter of a batch, and in half the bits: alike in what is learnt, not in the weights.
    assert workloads.accuracy(said) == pytest.approx(workloads.accuracy(expected), abs=0.03)


def test_torch_ddp_takes_the_steps_of_one_process_with_uneven_parts_and_accumulation(
    nodes: NodeFactory, head: Head, alone: dict[str, str]
) -> None:
    made = nodes(2)
    workloads.copy(head, "torch_ddp", workloads.workers(made))

    said = run(head, *typed("clusterctl up -- --dropout 0 --profile traces"))
    run(head, *typed("clusterctl sync --pull 'traces/*'"))

    expected = alone["torch_ddp"]
    assert "weights identical on all 4 ranks" in said
    assert workloads.losses(said) == pytest.approx(workloads.losses(expected), rel=1e-3)
    assert workloads.accuracy(said) == pytest.approx(workloads.accuracy(expected), abs=0.006)
    traces = [sorted(p.name for p in (head.folder / "pulled" / n.name / "traces").iterdir()) for n in made]
    assert traces == [["trace-rank0.json", "trace-rank1.json"], ["trace-rank2.json", "trace-rank3.json"]]


def test_dataparallel_trains_in_one_process_and_says_that_the_others_have_nothing_to_do(
    nodes: NodeFactory, head: Head
) -> None:
    workloads.copy(head, "torch_dataparallel", workloads.workers(nodes(2)))

    run(head, "up")
    expected = workloads.by_hand(head.folder)

    said = {rank: head.run("logs", "--rank", str(rank), "--format", "raw").stdout for rank in range(4)}
    assert workloads.losses(said[0]) == pytest.approx(workloads.losses(expected), rel=1e-4)
    assert workloads.accuracy(said[0]) == pytest.approx(workloads.accuracy(expected), abs=0.003)
    assert all(said[rank].startswith("DataParallel is one process on one machine") for rank in (1, 2, 3))


def test_fsdp_tensor_parallel_and_pipeline_end_with_the_weights_of_the_unsplit_model(
    nodes: NodeFactory, head: Head
) -> None:
    workloads.copy(head, "torch_model_parallel", workloads.workers(nodes(2)))

    said = run(head, *typed("clusterctl up -- --mode all"))

    parts = dict(
        zip(("fsdp", "tensor", "pipeline"), re.split(r"(?:fsdp|tensor|pipeline) on 4 ranks", said)[1:], strict=True)
    )
    for part in parts.values():
        assert float(part.split("unsplit model to within ")[1].split()[0]) < 1e-5
        held, total = re.findall(r"rank 0 holds (\d+) of (\d+)", part)[0]
        assert int(held) < int(total) * 0.6
        assert workloads.losses(part)[-1] < workloads.losses(part)[0] / 3


def test_a_run_whose_node_is_killed_ends_on_a_spare_with_the_weights_of_an_uninterrupted_one(
    nodes: NodeFactory, head: Head, lab: Lab, alone: dict[str, str]
) -> None:
    made = nodes(3)
    undisturbed = trained(head, workloads.workers(made[:2]), f"{SHARED}/undisturbed")
    spare = workloads.workers(made[2:], role="spare")
    step = random.randrange(20, 160, 10)
    directory = lab.shared / f"killed-at-{step}"

    run = begin(head, [*workloads.workers(made[:2]), *spare], f"{SHARED}/{directory.name}")
    wait_for((directory / f"step-{step:08d}").exists, 120.0, what=f"step {step}", every=0.002)
    made[1].kill()
    ended = head.run("wait", run, timeout=workloads.LONG)

    said = output(head, run)
    status = head.json("status", run)
    assert ended.returncode == 0, ended.stderr + said + head.run("status", run).stdout
    assert (status["state"], status["attempt"]) == ("succeeded", 1)
    assert [n["node"] for n in status["nodes"]] == [made[0].name, made[2].name]
    resumed = int(re.findall(r"resumed from \S+/step-(\d+) at step (\d+)", said)[0][1])
    assert step <= resumed < 200
    assert weights(said) == weights(undisturbed)
    assert workloads.accuracy(undisturbed) == pytest.approx(workloads.accuracy(alone["checkpoint_resume"]), abs=0.03)
    workloads.nothing_left([made[0], made[2]])


SPAWNS = """\
import gc
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

DEVICES = 2


def make_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])


def make_data():
    x = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
    return torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(x.sum(axis=1, keepdims=True)))


def on_each_device(index, devices):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "56492"
    torch.distributed.init_process_group("gloo", rank=index, world_size=devices)
    train(index, devices)
    # If DDP outlived the process group, gloo's threads would be waited for with the interpreter's lock held, for which
    # they may be waiting: now and then a process stands still after its last line (PyTorch's issue 56297).
    gc.collect()
    torch.distributed.destroy_process_group()


def train(index, devices):
    keras.utils.set_random_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    data = make_data()
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=devices, rank=index, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(10):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    weights = float(sum(parameter.sum() for parameter in model.parameters()))
    node, ends = os.environ["CLUSTERCTL_NODE"], f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    # In one piece: both processes of a worker write to its one file.
    os.write(1, f"device {index} of {devices} in {node}: {ends}, weights {weights:.6f}\\n".encode())


if __name__ == "__main__":
    torch.multiprocessing.start_processes(on_each_device, args=(DEVICES,), nprocs=DEVICES, start_method="fork")
"""


def test_a_keras_script_that_spawns_its_own_processes_runs_unchanged_as_one_worker_a_node(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    (head.folder / "train.py").write_text(SPAWNS)
    head.write({n.name: 1 for n in made}, {"script": "train.py"}, env={"OMP_NUM_THREADS": "1"})

    done = head.run("up", "--no-health", "--all-ranks", timeout=workloads.LONG)

    assert done.returncode == 0, done.stdout + done.stderr
    line = r"device (\d) of 2 in (\S+): loss ([\d.]+) to ([\d.]+), weights (\S+)"
    found = re.findall(line, done.stdout)
    assert sorted((node, index) for index, node, *_ in found) == sorted((n.name, i) for n in made for i in "01")
    assert all(float(last) < float(first) / 3 for _, _, first, last, _ in found)
    assert len({weights for *_, weights in found}) == 1
    workloads.nothing_left(made)


TORCHRUN = {
    "command": (
        "python -m torch.distributed.run --nnodes $GROUP_WORLD_SIZE --node-rank $GROUP_RANK --nproc-per-node 2"
        " --master-addr $MASTER_ADDR --master-port $MASTER_PORT train.py"
    ),
    "grace": "1s",
}
MEET = """\
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
line = "rank {RANK} local {LOCAL_RANK} sees {total}\\n".format(**os.environ, total=int(total))
os.write(1, line.encode())  # in one piece: both processes of a node write to one pipe

import clusterctl  # nothing of it is installed here

model = torch.nn.Linear(2, 2)
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.5)
clusterctl.verify_sync(model)
if dist.get_rank() == 3:
    torch.nn.init.constant_(model.bias, 0.25)
try:
    clusterctl.verify_sync(model, step=7)
except RuntimeError as error:
    print(error, flush=True)
dist.destroy_process_group()
"""
HIDE = """\
import os, signal, time
if os.environ["RANK"] == "2" and os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["hidden", "601"], {})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600 if os.environ["RANK"] != "0" else 0)
"""


def test_torchrun_as_a_command_on_each_node_trains_and_leaves_nothing(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    (head.folder / "train.py").write_text(MEET)
    head.write({n.name: 1 for n in made}, TORCHRUN)

    done = head.run("up", "--no-health", "--all-ranks", timeout=workloads.LONG)

    assert done.returncode == 0, done.stdout + done.stderr
    said = [head.run("logs", "--rank", str(rank), "--format", "raw").stdout for rank in range(2)]
    assert all(f"rank {rank} local {rank % 2} sees 6\n" in said[rank // 2] for rank in range(4)), said
    differs = "weights are not the same on all ranks at step 7: rank 3 differs from the other 3, first in `bias`"
    assert all(differs in text for text in said)
    workloads.nothing_left(made)


def test_down_ends_torchrun_waiting_for_others_and_all_that_its_workers_left_behind(
    nodes: NodeFactory, head: Head
) -> None:
    made = nodes(2)
    (head.folder / "train.py").write_text(HIDE)
    head.write({n.name: 1 for n in made}, TORCHRUN)
    run = head.json("up", "-d", "--no-health", timeout=workloads.LONG)["run"]
    wait_for(lambda: made[1].pids_of("hidden 601"), what="the hidden child")

    ended = head.run("down", run)

    assert ended.returncode == 0, ended.stderr
    assert head.json("status", run)["state"] == "cancelled"
    workloads.nothing_left(made)


def trained(head: Head, hosts: Sequence[dict[str, object]], directory: str) -> str:
    """Return what an undisturbed run says."""
    run = begin(head, hosts, directory)
    assert head.run("wait", run, timeout=workloads.LONG).returncode == 0, output(head, run)
    return output(head, run)


def begin(head: Head, hosts: Sequence[dict[str, object]], directory: str) -> str:
    job = {
        "script": "train.py",
        "args": ON_CPU,
        "framework": "torch",
        "grace": "1s",
        "checkpoint": {"pattern": f"{directory}/step-*", "shared": True},
    }
    workloads.copy(
        head,
        "checkpoint_resume",
        hosts,
        job=job,
        restart={"max_restarts": 1, "backoff": 0},
        on_controller_loss={"stop_after": "20s"},
        network={"node_lost_after": "6s"},
    )
    done = head.run("up", "-d", "--no-health", "--json", "--", *STEPS, "--directory", directory, timeout=workloads.LONG)
    assert done.returncode == 0, done.stderr
    return head.newest()


def output(head: Head, run: str) -> str:
    return head.run("logs", run, "--rank", "0", "--format", "raw").stdout


def weights(said: str) -> str:
    return re.findall(r"final weights (\w+)", said)[-1]
