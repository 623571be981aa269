"""Profiles of real processes: by torch in the shim, by py-spy, and by samples of stacks; the rank goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest

from clusterctl.agent.protocol.command_messages import RequestError
from clusterctl.agent.watch import rank_profiler
from clusterctl.render.profile_trace import convert_profile
from tests.agent.stalls.conftest import until

SPINS = """
import time
def known_function():
    return sum(range(1_000_000))
print('up')
while True:
    known_function()
    time.sleep(0.001)
"""
TORCH = """
import os, sys, threading, time
import torch
torch.set_num_threads(1)
x = torch.randn(32, 32, requires_grad=True)
def step():
    torch.mm(x, x).sum().backward()
    time.sleep(0.002)
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: step()
work(0.1)
print('up', flush=True)
"""
without_path = pytest.fixture(lambda monkeypatch: monkeypatch.setenv("PATH", ""))
"""No py-spy on PATH; an interpreter outside of an environment has none beside it."""


def profile(bench, worker, seconds=1.0) -> tuple[str, str, list[dict[str, Any]]]:
    """Method, reasons and converted events of a profile; times are seconds on the node's wall clock, as microseconds."""
    folder = bench.tmp_path / "profile"
    with rank_profiler.open_profile_folder(str(folder)):
        found = rank_profiler.profile_ranks([worker.facts], str(bench.status_dir), str(folder), seconds)["0"]
    if found["method"] == "none":
        return "none", "; ".join(found["why"]), []
    text = (folder / "rank-0.json").read_text()
    events = convert_profile(found, text, 0, "rank 0 here", 0.0)
    return found["method"], "; ".join(found["why"]), events


def begun(worker, word: str) -> None:
    """Wait until the rank says this, and its shim says that it has torch."""
    worker.prints(word)
    worker.armed()
    until(lambda: "torch" in worker.said()["frameworks"])


def names(events: list[dict[str, Any]], track: str = "main thread") -> set[str]:
    tids = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == track}
    return {e["name"] for e in events if e["ph"] in "XB" and e["tid"] in tids}


@pytest.mark.torch
def test_torch_records_the_operations_of_the_main_thread_and_the_backward_pass(bench):
    worker = bench.start(TORCH + "work(1000)")
    begun(worker, "up")

    for _ in range(2):  # a second profile works like the first
        before = time.time()
        method, why, events = profile(bench, worker)

        assert (method, why) == ("torch", "")
        assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= names(events)
        times = [e["ts"] / 1e6 for e in events if e["ph"] == "X"]
        assert before - 1.0 < min(times) < max(times) < time.time() + 1.0
        assert max(times) - min(times) < 3.0
    assert worker.process.poll() is None
    assert worker.said()["degraded"] == {}
    assert not list(bench.status_dir.glob("*.profile*"))


OWN = """
from torch.profiler import ProfilerActivity, profile, schedule
def count(path):
    import json
    return sum(e.get('name') == 'aten::mm' for e in json.load(open(path))['traceEvents'])
def wait_for(condition):
    while not condition(): step()
is_recording = lambda: torch.autograd.profiler._is_profiler_enabled
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("script", "seconds", "method", "why"),
    [
        pytest.param(
            "with profile(activities=[ProfilerActivity.CPU]) as own:\n    print('ready', flush=True)\n    work(4.0)\n",
            1.0,
            ("py-spy", "samples"),
            "the program's own profiler is active",
            id="the program records",
        ),
        pytest.param(
            "print('ready', flush=True)\nwait_for(is_recording)\nwork(0.2)\n"
            "with profile(activities=[ProfilerActivity.CPU]) as own: work(0.5)\n",
            60.0,
            ("torch",),
            "the program started its own profiler",
            id="the program begins to record meanwhile",
        ),
        pytest.param(
            "with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=2, active=1)) as own:\n"
            "    step(); own.step()\n    print('ready', flush=True)\n    wait_for(is_recording)\n    work(0.2)\n    own.step()\n    work(0.2)\n",
            60.0,
            ("torch",),
            "the program started its own profiler",
            id="the program has prepared to record before",
        ),
    ],
)
def test_the_programs_own_profiler_and_ours_never_mix(bench, script, seconds, method, why):
    export = "own.export_chrome_trace('own.json')\nprint('own', count('own.json'), flush=True)\nwork(1000)\n"
    worker = bench.start(TORCH + OWN + script + export)
    begun(worker, "ready")

    used, reasons, events = profile(bench, worker, seconds)

    assert used in method
    assert why in reasons
    worker.prints("own")
    assert int(worker.text.split("own ")[1].split()[0]) > 10, "the program has its own recording"
    assert "aten::mm" in names(events) or "step" in names(events)
    assert profile(bench, worker, 0.5)[0] == "torch", "the next profile works"
    assert worker.process.poll() is None, worker.text


@pytest.mark.torch
def test_a_fork_ends_the_recording_and_both_processes_go_on(bench):
    worker = bench.start(
        TORCH + "while not torch.autograd.profiler._is_profiler_enabled: step()\n"
        "work(0.3)\nchild = os.fork()\n"
        "if child == 0:\n    work(0.2)\n    os._exit(3)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\nwork(1000)\n"
    )
    begun(worker, "up")

    method, why, events = profile(bench, worker, 60.0)

    assert (method, why) == ("torch", "torch: ended early, because the process forked")
    assert "aten::mm" in names(events)
    worker.prints("child 3")
    assert worker.process.poll() is None


def test_py_spy_samples_a_rank_without_torch(bench):
    if not os.path.exists(os.path.join(os.path.dirname(sys.executable), "py-spy")):
        pytest.skip("needs py-spy")
    worker = bench.start(SPINS)
    worker.prints("up")
    worker.armed()

    method, why, events = profile(bench, worker)

    assert (method, why) == ("py-spy", "torch: the rank has not imported torch")
    assert {"<module>", "known_function"} <= names(events)


@pytest.mark.usefixtures("without_path")
def test_stacks_are_sampled_without_torch_and_py_spy(bench):
    worker = bench.start(SPINS, python=os.path.realpath(sys.executable))
    worker.prints("up")
    worker.armed()

    method, why, events = profile(bench, worker)

    assert method == "samples"
    assert "torch: the rank has not imported torch; py-spy: not installed on this node" in why
    assert {"<module>", "known_function"} <= names(events)
    assert sum(e["dur"] for e in events if e["name"] == "<module>") == pytest.approx(1e6, rel=0.5)
    assert worker.process.poll() is None


@pytest.mark.usefixtures("without_path")
def test_samples_do_no_harm_to_threads_that_free_their_frames_all_the_time(bench):
    """A few dumps by signal, which read frames without the GIL, end such a process."""
    worker = bench.start(
        "import sys, threading\n"
        "sys.setrecursionlimit(5000)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def spin():\n    while True: deep(1500)\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n"
        "print('up')\nspin()\n",
        python=os.path.realpath(sys.executable),
    )
    worker.prints("up")
    worker.armed()

    method, _, events = profile(bench, worker, 3.0)

    assert method == "samples"
    assert {"spin", "deep"} <= names(events)
    assert worker.process.poll() is None, worker.text


@pytest.mark.usefixtures("without_path")
def test_a_rank_that_hangs_in_c_code_with_the_gil_is_sampled_by_signal(bench, until):
    worker = bench.start(
        "import re, time\n"
        "print('up')\n"
        "time.sleep(1.5)\n"
        "def backtracks():\n"
        "    re.match(r'(a+)+$', 'a' * 64 + 'b')\n"
        "backtracks()\n",
        python=os.path.realpath(sys.executable),
    )
    worker.prints("up")
    worker.armed()
    until(lambda: time.monotonic() - worker.said()["time"] > 2.0, "the status to grow old")

    method, _, events = profile(bench, worker, 0.5)

    assert method == "signal"
    assert "backtracks" in names(events)


@pytest.mark.usefixtures("without_path")
def test_a_rank_without_shim_and_py_spy_cannot_be_profiled_and_the_reasons_are_given(bench):
    worker = bench.start(SPINS, python=os.path.realpath(sys.executable), injected=False)
    worker.prints("up")

    method, why, _ = profile(bench, worker)

    assert method == "none"
    for reason in (
        "torch: the rank has no shim",
        "py-spy: not installed",
        "samples: the rank has no shim",
        "signal: signal: ",
    ):
        assert reason in why
    assert worker.process.poll() is None


def test_a_second_profile_is_refused_while_one_is_recorded(tmp_path):
    inside, outside = threading.Event(), threading.Event()

    def hold() -> None:
        with rank_profiler.open_profile_folder(str(tmp_path)):
            inside.set()
            outside.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60.0)
    with pytest.raises(RequestError, match="another profile"), rank_profiler.open_profile_folder(str(tmp_path)):
        pass
    outside.set()
    thread.join()


def test_files_of_an_earlier_profile_are_removed(tmp_path):
    (tmp_path / "rank-7.json").write_text("{}")
    with rank_profiler.open_profile_folder(str(tmp_path)):
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b'{"traceEvents": [{"na', "is incomplete"), (b"", "is incomplete")],
    ids=["cut", "empty"],
)
def test_a_trace_that_a_full_disk_has_cut_is_not_used(tmp_path, content, complaint):
    (tmp_path / "rank-0.json").write_bytes(content)
    with pytest.raises(rank_profiler.NoStacksError, match=complaint):
        rank_profiler.check_file(str(tmp_path / "rank-0.json"))
