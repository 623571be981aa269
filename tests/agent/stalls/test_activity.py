from __future__ import annotations

import json
import os
import signal
import time

import pytest

from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.watch import evidence_collector
from clusterctl.agent.watch.activity_sampler import ActivitySampler, FileScanner, WatchedWorker, find_printed_steps


def sampler(bench, *workers, **options):
    return ActivitySampler([worker.id for worker in workers], str(bench.status_dir), **options)


def test_a_sample_holds_what_the_worker_says_of_itself(bench, python, until):
    worker = bench.start(
        "import clusterctl, time\n"
        "clusterctl.progress(step=3)\n"
        "with clusterctl.phase('checkpoint', limit='2m'): time.sleep(100)\n",
        python=python,
    )
    look = sampler(bench, worker)
    rank = until(lambda: (rank := look.sample()["ranks"]["0"])["inside"] and rank["inside"]["phase"] and rank)
    assert rank["alive"]
    assert rank["pid"] == worker.pid
    assert rank["inside"]["step"] == 3
    assert rank["inside"]["phase"]["limit_s"] == 120.0
    assert 0 <= rank["inside"]["progress_age_s"] < 30
    json.dumps(rank)


def test_output_and_transfers_and_cpu_of_the_whole_tree_grow(bench, until):
    worker = bench.start(
        argv=["bash", "-c", "while :; do head -c 100000 /dev/zero > file; echo line; done & wait"], injected=False
    )
    look = sampler(bench, worker)
    first = look.sample()["ranks"]["0"]

    def grown():
        now = look.sample()["ranks"]["0"]
        return now["output"] > first["output"] and now["procs"] > 1 and now["cpu_s"] > first["cpu_s"]

    # Members are looked up anew now and then only: a later look finds the loop.
    until(lambda: look.sample(now=time.monotonic() + 60)["ranks"]["0"]["procs"] > 1)
    until(grown)


def test_dumps_of_stacks_are_no_activity_of_the_worker(bench, until):
    worker = bench.start(
        "import threading, time\n"
        "def deep(n): deep(n - 1) if n else time.sleep(1000)\n"
        "for _ in range(40): threading.Thread(target=deep, args=(60,), daemon=True).start()\n"
        "print('up'); time.sleep(1000)\n"
    )
    worker.prints("up")
    worker.armed()
    look = sampler(bench, worker)
    before = look.sample()["ranks"]["0"]["written"]
    deadline = time.monotonic() + 4
    found = evidence_collector.collect_evidence(
        [worker.facts], str(bench.status_dir), str(bench.tmp_path / "s"), deadline
    )
    assert len(found["ranks"]["0"]["stacks"]) > 64 * 1024
    assert look.sample()["ranks"]["0"]["written"] - before < 16 * 1024


def test_a_worker_that_ended_is_not_alive_even_if_its_pid_is_used_again(bench):
    worker = bench.start("pass")
    worker.wait()
    assert not sampler(bench, worker).sample()["ranks"]["0"]["alive"]
    other = WatchedWorker(0, ProcessIdentity(os.getpid(), 1), "/dev/null")
    assert not ActivitySampler([other], str(bench.status_dir)).sample()["ranks"]["0"]["alive"]


def test_what_a_dead_process_said_is_not_repeated(bench):
    worker = bench.start("import clusterctl; clusterctl.progress(step=1)")
    worker.wait()
    assert worker.said()["step"] == 1
    assert sampler(bench, worker).sample()["ranks"]["0"]["inside"] is None


def test_a_stopped_worker_shows_its_state_and_where_it_waits(bench, until):
    worker = bench.start("print('up')\nimport time\ntime.sleep(100)\n")
    worker.prints("up")
    os.kill(worker.pid, signal.SIGSTOP)
    look = sampler(bench, worker)
    until(lambda: look.sample()["ranks"]["0"]["state"] == "T")


def test_watched_files_are_found_by_pattern_below_the_working_directory(bench):
    watch = FileScanner(["ckpt/**/*.pt"], str(bench.tmp_path), 1.0)
    path = bench.tmp_path / "ckpt" / "a" / "x.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1")
    watch.scan()
    assert [size for _, size in watch.files.values()] == [1]
    path.write_bytes(b"12")
    watch.scan()
    assert watch.files[str(path)][1] == 2


def test_ranks_below_a_launcher_of_the_user_are_sampled_too(bench, until):
    worker = bench.start(
        "import os, subprocess, sys\n"
        "code = 'import clusterctl, time; clusterctl.progress(step=2); time.sleep(100)'\n"
        "subprocess.run([sys.executable, '-c', code], env={**os.environ, 'RANK': '7'})\n",
        env={"RANK": ""},
    )
    look = sampler(bench, worker)
    rank = until(
        lambda: (rank := look.sample()["ranks"].get("7")) and rank["inside"] and rank["inside"]["step"] and rank
    )
    assert rank["alive"]
    assert rank["inside"]["step"] == 2


def test_a_status_file_that_nobody_renews_says_so_unless_its_writer_is_only_held_up(bench):
    worker = bench.start(argv=["sleep", "100"], injected=False)
    said = {
        **dict.fromkeys(("step", "source", "seq", "backend", "timeout_s", "facts", "degraded", "phase", "main_time")),
        "pid": worker.pid,
        "start_time": worker.start_time,
        "beats": 7,
        "looks": 0,
        "held": 0,
        "frameworks": [],
        "progress_time": 90.0,
    }
    look = sampler(bench, worker)
    unseen = {}
    for tid, age in ((worker.pid, 30.0), (1 << 22, 30.0), (1 << 22, 5.0)):
        (bench.status_dir / "rank-0.status.json").write_text(json.dumps({**said, "tid": tid, "time": 100.0}))
        unseen[tid, age] = look.sample(now=100.0 + age)["ranks"]["0"]["inside"].get("unseen")
    assert unseen == {(worker.pid, 30.0): None, (1 << 22, 30.0): True, (1 << 22, 5.0): None}


def test_a_status_file_that_is_no_json_is_no_status(bench):
    worker = bench.start("import time\ntime.sleep(100)\n", injected=False)
    (bench.status_dir / "rank-0.status.json").write_text('{"pid": "x"')
    assert sampler(bench, worker).sample()["ranks"]["0"]["inside"] is None


def test_sampling_eight_ranks_every_two_seconds_costs_under_half_a_percent_of_a_core_per_rank(bench):
    workers = [bench.start("import time\ntime.sleep(100)\n", rank=rank) for rank in range(8)]
    for worker in workers:
        worker.armed()
    look = sampler(bench, *workers)
    begun = time.process_time()
    for tick in range(40):
        look.sample(now=time.monotonic() + 2.0 * tick)
    assert (time.process_time() - begun) / (40 * 2.0 * len(workers)) < 0.005


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        pytest.param("step 1\nstep 2\nstep 3 loss 2\n", (3, 3.0), id="words"),
        pytest.param("Epoch [1/10]\nEpoch [2/10], step [1/100]", (2, 1.0), id="brackets"),
        pytest.param("{'loss': 1.2, 'epoch': 0.01}\n{'loss': 1.1, 'epoch': 0.02}", (2, 0.02), id="parts of an epoch"),
        pytest.param("  1%|#  | 24/1000 [00:10<, 2it/s]\r  1%|#  | 25/1000 [", (2, 25.0), id="a bar without a label"),
        pytest.param("Training:  3%|# | 7/300", (1, 7.0), id="a bar of training"),
        pytest.param("global_step=41 lr=1e-4", (1, 41.0), id="an assignment"),
        pytest.param("Map:  10%|##| 100/1000\rMap: 20%|##| 200/1000", None, id="a bar of data preparation"),
        pytest.param("Downloading shards: 100%|###| 4/4", None, id="a bar of a download"),
        pytest.param("still retrying 17\nusing batch size 32", None, id="other numbers"),
        pytest.param("step 9\nstep 9\nstep 9", (1, 9.0), id="one step again and again"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_steps_are_found_in_the_last_lines_of_an_output(tail, found):
    assert find_printed_steps(tail.encode()) == found


def test_printed_steps_are_part_of_a_sample_until_the_rank_reports_steps_itself(bench, until):
    go = bench.tmp_path / "go"
    worker = bench.start(
        "import clusterctl, os, time\n"
        "for step in range(5): print('step', step, flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.1)\n"
        "for step in range(5): clusterctl.progress(step=step)\n"
        "time.sleep(100)\n"
    )
    look = sampler(bench, worker)
    assert until(lambda: look.sample()["ranks"]["0"]["printed_steps"] == (5, 4.0))
    go.touch()
    assert until(lambda: look.sample()["ranks"]["0"]["printed_steps"] is None)
