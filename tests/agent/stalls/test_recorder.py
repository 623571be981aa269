"""Collectives that torch's flight recorder does not record."""

from __future__ import annotations

import re
import time

import pytest

from clusterctl.agent.watch import evidence_collector
from clusterctl.run.rules.stack_dump_parser import parse_rank_stacks
from tests.agent.stalls.test_frameworks import rendezvous

__all__ = ["rendezvous"]

pytestmark = pytest.mark.torch

UNRECORDED = {"TORCH_FR_BUFFER_SIZE": "0"}
BEGIN = """
import time, torch, torch.distributed as dist
from torch.distributed import all_reduce
from torch._C._distributed_c10d import ProcessGroup
"""
ALONE = BEGIN + "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
HANG = (
    BEGIN
    + """
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
for _ in range(3):
    all_reduce(torch.ones(3))
dist.all_gather([torch.ones(2) for _ in range(2)], torch.ones(2), group=pair)
if dist.get_rank() == 1:
    time.sleep(1000)
dist.broadcast(torch.ones(2, 4), 1)
"""
)


def test_a_hang_is_recorded_in_the_format_of_the_flight_recorder(bench, until, rendezvous):
    workers = [bench.start(HANG, rank=rank, env={**rendezvous, **UNRECORDED}) for rank in (0, 1)]
    until(lambda: all((worker.said("recorded") or {}).get("entries") for worker in workers))

    found = evidence_collector.collect_evidence(
        [worker.facts for worker in workers], str(bench.status_dir), str(bench.tmp_path / "s"), time.monotonic() + 4
    )["ranks"]

    assert [found[rank]["inside"]["seq"] for rank in "01"] == [{"0": [4, 3], "1": [1, 1]}, {"0": [3, 3], "1": [1, 1]}]
    gathered = {"group": "1", "number": 1, "op": "all_gather", "sizes": "[[2]]", "dtypes": "float32", "done": True}
    waits = {"group": "0", "number": 4, "op": "broadcast", "sizes": "[[2, 4]]", "dtypes": "float32", "done": False}
    assert {"p2p": False, "peer": 1, **waits} in found["0"]["recorded"]
    assert all({"p2p": False, "peer": None, **gathered} in found[rank]["recorded"] for rank in "01")
    assert found["0"]["inside"]["degraded"] == {}


MESSAGES = (
    BEGIN
    + """
dist.init_process_group("gloo")
rank, pair = dist.get_rank(), dist.new_group([0, 1])
for _ in range(3):
    dist.send(torch.ones(3), 1, tag=7) if rank == 0 else dist.recv(torch.ones(3), 0, tag=7)
if rank == 1:
    dist.isend(torch.ones(2), 0, group=pair).wait()
    time.sleep(1000)
dist.recv(torch.ones(2), 1, group=pair)
sent = dist.isend(torch.ones(4), 1)
dist.recv(torch.ones(2), 1)
"""
)


@pytest.mark.parametrize("env", [pytest.param({}, id="gloo"), pytest.param(UNRECORDED, id="without torch's recorder")])
def test_both_ranks_count_the_messages_between_them_alike(bench, until, rendezvous, env):
    workers = [bench.start(MESSAGES, rank=rank, env={**rendezvous, **env}) for rank in (0, 1)]
    until(lambda: all((worker.said("recorded") or {}).get("entries") for worker in workers))

    entries = [worker.said("recorded")["entries"] for worker in workers]
    found = [
        {entry["group"]: (entry["number"], entry["op"], entry["done"]) for entry in each if entry["p2p"]}
        for each in entries
    ]
    assert found[0] == {
        "0:0->1": (4, "send", False),
        "0:1->0": (1, "recv", False),
        "1:1->0": (1, "recv", True),
    }
    assert found[1] == {"0:0->1": (3, "recv", True), "1:1->0": (1, "send", True)}
    assert "[[3]] tag 7" in [entry["sizes"] for entry in entries[1]]


def test_entries_of_an_earlier_pause_are_removed(bench, until):
    script = ALONE + (
        "import pathlib\n"
        "all_reduce(torch.ones(1))\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"
        "all_reduce(torch.ones(1))\ntime.sleep(1000)\n"
    )
    worker = bench.start(script, rank=0)
    until(lambda: worker.said("recorded"))
    (bench.tmp_path / "go").touch()
    until(lambda: not worker.said("recorded"))
    until(lambda: len((worker.said("recorded") or {}).get("entries", [])) == 2)


@pytest.mark.parametrize(
    ("script", "env", "words"),
    [
        pytest.param("print(hasattr(ProcessGroup.allreduce, '__wrapped__'))", {}, "False", id="recorded by torch"),
        pytest.param("print(hasattr(ProcessGroup.allreduce, '__wrapped__'))", UNRECORDED, "True", id="by the shim"),
        pytest.param(
            "import inspect; print(*inspect.signature(all_reduce).parameters)",
            UNRECORDED,
            "tensor op group async_op",
            id="signature",
        ),
        pytest.param(
            "step = torch.compile(lambda t: (all_reduce(t), t * 2)[1], backend='eager')\nprint(step(torch.ones(1)))",
            UNRECORDED,
            "tensor([2.])",
            id="compiled",
        ),
        pytest.param(
            "class Own(ProcessGroup):\n    pass\n"
            "try:\n    Own(0, 1).allreduce([torch.ones(1)])\n"
            "except RecursionError: print('endless')\nexcept Exception as error: print('refused')",
            UNRECORDED,
            "refused",
            id="a subclass without the method",
        ),
        pytest.param(
            "dist.barrier(); dist.all_reduce(torch.ones(1), async_op=True).wait(); dist.destroy_process_group()\n"
            "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
            "all_reduce(torch.ones(1)); print('again')",
            UNRECORDED,
            "again",
            id="a second default group",
        ),
    ],
)
def test_the_program_runs_as_without_the_shim(bench, script, env, words):
    worker = bench.start(ALONE + script + "\nprint('through')", env={**env, "OMP_NUM_THREADS": "1"})
    worker.prints("through")

    assert re.search(rf"^{re.escape(words)}$", worker.text, re.MULTILINE), worker.text


def test_this_torch_has_every_name_that_the_shim_needs(bench):
    script = "import torch, torch.distributed.rpc\nfrom _clusterctl_shim import torch_names as names\n"
    worker = bench.start(
        script + "print([n for n in names.NAMES if n not in names.OPTIONAL and not names.find_name(n)])"
    )
    worker.wait()

    assert worker.text.splitlines()[-1] == "[]"


def test_a_backend_that_cannot_be_recorded_is_named_as_blind(bench, until):
    script = (
        BEGIN
        + """
class Own(ProcessGroup):
    def getBackendName(self):
        return "own"
dist.Backend.register_backend("own", lambda store, rank, size, timeout: Own(rank, size), devices=["cpu"])
dist.init_process_group("own", rank=0, world_size=1, store=dist.HashStore())
print("joined"); time.sleep(1000)
"""
    )
    worker = bench.start(script)
    worker.prints("joined")

    said = until(lambda: (worker.said() or {}).get("degraded", {}).get("recorder"))
    assert re.fullmatch(r"blind on this backend \(own, torch [\d.]+\): goes by stacks", said)


def test_the_key_for_which_a_rank_waits_in_a_store_and_the_keys_that_it_set_are_known(bench, until):
    script = BEGIN + (
        "store = dist.HashStore()\n"
        "for step in range(3): store.set(f'a/{step}', 'x'); store.get(f'a/{step}')\n"
        "print('up'); store.get('b/7')\n"
    )
    worker = bench.start(script)
    worker.armed()
    worker.prints("up")
    found = evidence_collector.collect_evidence(
        [worker.facts], str(bench.status_dir), str(bench.tmp_path / "s"), time.monotonic() + 4
    )["ranks"]["0"]

    assert (found["calls"]["awaited_keys"], found["calls"]["set_keys"]) == (["b/7"], ["a/0", "a/1", "a/2"])
    assert found["calls"]["values"]["<module>.step"] == "2"
    (stack,) = parse_rank_stacks({"0": found})
    assert [frame.function for frame in stack.main_thread_frames or ()] == ["<module>"]


def test_a_key_that_a_store_did_not_give_in_time_is_not_awaited_any_more(bench):
    script = BEGIN + (
        "import datetime\n"
        "store = dist.HashStore()\n"
        "store.set_timeout(datetime.timedelta(milliseconds=50))\n"
        "try: store.get('b/7')\n"
        "except RuntimeError: print('up'); time.sleep(1000)\n"
    )
    worker = bench.start(script)
    worker.armed()
    worker.prints("up")
    found = evidence_collector.collect_evidence(
        [worker.facts], str(bench.status_dir), str(bench.tmp_path / "s"), time.monotonic() + 4
    )["ranks"]["0"]

    assert found["calls"]["awaited_keys"] == []
