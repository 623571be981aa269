from __future__ import annotations

import os
import socket
import time

import pytest

from clusterctl.agent.inject import shim_files
from clusterctl.agent.watch import evidence_collector
from clusterctl.run.rules import stack_dump_parser as reader

pytestmark = pytest.mark.torch

LOOP = """
import os, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(torch.randn(40, 4), batch_size=4, num_workers=2)
for batch in data:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
def waits_for_the_others():
    dist.all_reduce(torch.ones(1))
kept = iter(data)
next(kept)
print("trained")
if dist.get_rank() == 1:
    time.sleep(1000)
waits_for_the_others()
"""


@pytest.fixture
def rendezvous():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def test_steps_and_collectives_of_ddp_are_counted_and_its_stacks_tell_who_waits(bench, until, rendezvous):
    workers = [bench.start(LOOP, rank=rank, env=rendezvous) for rank in (0, 1)]
    for worker in workers:
        worker.prints("trained")
    said = [until(lambda w=worker: (s := w.said()) and s["step"] == 10 and s["seq"] and s) for worker in workers]
    assert [each["source"] for each in said] == ["torch", "torch"]
    assert {each["backend"] for each in said} == {"gloo"}
    assert {each["timeout_s"] for each in said} == {1800.0}
    assert [each["degraded"] for each in said] == [{}, {}]
    groups = [worker.said("group") for worker in workers]
    assert [(group["rank"], group["world_size"], group["is_joined"]) for group in groups] == [
        (0, 2, True),
        (1, 2, True),
    ]
    # Rank 0 has begun one collective more than rank 1 will ever join.
    until(lambda: workers[0].said()["seq"]["0"][0] == workers[1].said()["seq"]["0"][0] + 1)
    found = evidence_collector.collect_evidence(
        [worker.facts for worker in workers], str(bench.status_dir), str(bench.tmp_path / "s"), time.monotonic() + 4
    )
    frames = {
        stack.rank: [f.function for f in stack.main_thread_frames or ()]
        for stack in reader.parse_rank_stacks(found["ranks"])
    }
    assert "waits_for_the_others" in frames[0]
    assert frames[1] == ["<module>"]
    # The data loader's own processes are children, and never the rank.
    assert [each["pid"] for each in said] == [worker.pid for worker in workers]
    assert all(len(found["ranks"][rank]["children"]) >= 2 for rank in "01")


MEETS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
def meet(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    dist.barrier()  # Otherwise one could close its connections before the other has made them.
    dist.destroy_process_group()
if __name__ == "__main__":
    WORK
"""


@pytest.mark.parametrize(
    ("work", "size", "alone"),
    [
        pytest.param("pass", 2, True, id="no_group"),
        pytest.param("meet(0, STORE)", 1, True, id="a_group_of_one"),
        pytest.param("mp.spawn(meet, (STORE,), 2)", 2, False, id="its_processes_meet"),
    ],
)
def test_a_rank_that_has_torch_and_met_nobody_says_so_at_its_end(bench, tmp_path, work, size, alone):
    (tmp_path / "meets.py").write_text(
        MEETS.replace("WORK", work).replace("SIZE", str(size)).replace("STORE", repr(str(tmp_path / "store")))
    )
    worker = bench.start(f"import runpy\nrunpy.run_path({str(tmp_path / 'meets.py')!r}, run_name='__main__')", rank=0)
    assert worker.process.wait(120) == 0
    assert shim_files.has_worked_alone(str(bench.status_dir), 0) is alone


def test_the_recorder_of_ranks_whose_collectives_stand_still_tells_which_one_waits_and_in_what(
    bench, until, rendezvous
):
    workers = [bench.start(LOOP, rank=rank, env=rendezvous) for rank in (0, 1)]
    until(lambda: all((worker.said("recorded") or {}).get("entries") for worker in workers))
    found = evidence_collector.collect_evidence(
        [worker.facts for worker in workers], str(bench.status_dir), str(bench.tmp_path / "s"), time.monotonic() + 4
    )
    last = {rank: found["ranks"][rank]["recorded"][-1] for rank in "01"}
    assert (last["0"]["op"], last["0"]["done"], last["1"]["done"]) == ("all_reduce", False, True)
    assert last["0"]["number"] == last["1"]["number"] + 1


def test_batches_of_keras_fit_are_counted(bench, until):
    script = (
        "import os; os.environ['KERAS_BACKEND'] = 'torch'\n"
        "import keras, numpy, time\n"
        "model = keras.Sequential([keras.layers.Dense(1)])\n"
        "model.compile(optimizer='sgd', loss='mse')\n"
        "x = numpy.ones((40, 4)); y = numpy.ones((40, 1))\n"
        "model.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), validation_batch_size=8, verbose=0)\n"
        "print('fitted'); time.sleep(1000)\n"
    )
    worker = bench.start(script)
    worker.prints("fitted")
    # What is said comes soon after what is done: the last batches may lie between two words.
    said = until(lambda: (said := worker.said()) and said["beats"] >= 20 + 2 * 5 and said)
    assert (said["step"], said["source"], said["beats"]) == (20, "keras", 20 + 2 * 5)
    assert said["degraded"] == {}


def test_a_compiled_optimizer_step_is_not_traced_anew_each_time(bench):
    script = (
        "import torch, torch._dynamo\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "optimizer = torch.optim.SGD([p], lr=0.1)\n"
        "step = torch.compile(lambda: optimizer.step(), backend='eager')\n"
        "with torch._dynamo.config.patch(error_on_recompile=True):\n"
        "    for _ in range(20): step()\n"
        "print('compiled')\n"
    )
    worker = bench.start(script)
    assert worker.wait() == 0, worker.text
    assert worker.said()["step"] == 20


COMPILES = """
import time, torch

def compile_slowly(graph, inputs):
    print("compiling", flush=True)
    open("go").read()
    return graph.forward

print("result", torch.compile(lambda x: x + 1, backend=compile_slowly)(torch.ones(1)).item(), flush=True)
time.sleep(1000)
"""


def test_a_rank_that_compiles_is_in_a_phase_until_the_code_is_made(bench, until):
    os.mkfifo(bench.tmp_path / "go")
    worker = bench.start(COMPILES)
    worker.prints("compiling")
    phase = until(lambda: (s := worker.said()) and s["phase"])
    assert (phase["name"], phase["limit_s"]) == ("torch.compile", 900.0)

    (bench.tmp_path / "go").write_text("")
    worker.prints("result 2.0")
    until(lambda: (s := worker.said()) and s["phase"] is None)


def test_a_program_that_removes_the_begin_of_a_phase_compiles(bench):
    script = (
        "import torch, torch._dynamo.callback as callback\n"
        "callback.callback_handler.start_callbacks.clear()\n"
        "print(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item())\n"
    )
    worker = bench.start(script)
    assert worker.wait() == 0, worker.text
