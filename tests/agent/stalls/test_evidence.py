from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import time

import pytest

from clusterctl.agent.protocol import frames as frames_module
from clusterctl.agent.watch import evidence_collector, stack_capture
from clusterctl.run.rules import stack_dump_parser as reader
from clusterctl.run.rules.stall_detection import TRANSFER_BYTES_S

FOREVER = "import time\nprint('up')\ndef waits():\n    time.sleep(1000)\nwaits()\n"


def collect(bench, *workers, seconds=4.0):
    return evidence_collector.collect_evidence(
        [worker.facts for worker in workers],
        str(bench.status_dir),
        str(bench.tmp_path / "stall-1"),
        time.monotonic() + seconds,
    )


def functions(found, rank):
    entries = [each for each in reader.parse_rank_stacks(found["ranks"]) if each.rank == rank]
    return [frame.function for each in entries for frame in each.main_thread_frames or ()]


def test_the_evidence_of_a_rank_says_where_it_is_and_is_kept_as_plain_files(bench, python):
    worker = bench.start(FOREVER, python=python)
    worker.armed()
    found = collect(bench, worker)
    rank = found["ranks"]["0"]
    assert (rank["source"], rank["state"], rank["pid"]) == ("shim", "S", worker.pid)
    assert functions(found, 0) == ["waits", "<module>"]
    assert rank["tail"] == ["up"]
    folder = bench.tmp_path / "stall-1"
    assert json.loads((folder / "rank-0.json").read_text()) == rank
    assert "in waits" in (folder / "rank-0.stacks").read_text()
    assert "stacks by: shim" in (folder / "rank-0.txt").read_text()


def test_a_look_reads_too_little_to_pass_for_activity_of_the_rank(bench, python):
    worker = bench.start(FOREVER, python=python)
    worker.armed()
    before = read_bytes(worker.pid)
    collect(bench, worker)
    assert read_bytes(worker.pid) - before < TRANSFER_BYTES_S


def read_bytes(pid):
    with open(f"/proc/{pid}/io") as file:
        return int(file.readline().split()[1])


def test_eight_ranks_take_under_two_seconds_and_under_four_with_one_stopped(bench):
    workers = [bench.start(FOREVER, rank=rank) for rank in range(8)]
    for worker in workers:
        worker.armed()
    assert collect(bench, *workers)["took_s"] < 2.0
    os.kill(workers[3].pid, signal.SIGSTOP)
    found = collect(bench, *workers)
    assert found["took_s"] < 4.0
    assert found["ranks"]["3"]["state"] == "T"
    folded = reader.fold_stacks(reader.parse_rank_stacks(found["ranks"]))
    assert [entry["ranks"] for entry in folded] == ["0-2,4-7", "3"]


def test_a_rank_in_c_code_that_holds_the_gil_shows_its_stack_and_that_it_computes(bench, python, until):
    stuck = bench.start(
        "import re, time\n"
        "time.sleep(1.5)\n"
        "print('stuck')\n"
        "def backtracks():\n"
        "    re.match(r'(a+)+$', 'a' * 64 + 'b')\n"
        "backtracks()\n",
        python=python,
    )
    waiting = bench.start(FOREVER, rank=1, python=python)
    stuck.prints("stuck")
    waiting.armed()

    def told_apart():
        """What a busy machine leaves of a core is not for the rank to say: it is held against one that waits."""
        found = collect(bench, stuck, waiting)["ranks"]
        inside = "backtracks" in functions({"ranks": found}, 0)
        return inside and found["0"]["cpu"] > found["1"]["cpu"] and found

    found = until(told_apart)
    assert found["0"]["source"] == "signal"
    assert (found["0"]["state"], found["1"]["state"]) == ("R", "S")


def test_a_look_interrupts_no_call_of_the_user(bench, python, until):
    worker = bench.start(
        "import ctypes, time\n"
        "libc = ctypes.PyDLL(None, use_errno=True)\n"  # holds the GIL, so only a signal reaches the rank
        "time.sleep(1.5)\n"
        "print('up')\n"
        "while True:\n"  # poll(2) is never restarted after a signal
        "    if libc.poll(None, 0, 100000) < 0: print('interrupted', ctypes.get_errno())\n",
        python=python,
    )
    worker.prints("up")
    worker.armed()
    until(lambda: collect(bench, worker)["ranks"]["0"]["source"] == "signal")
    for _ in range(3):
        assert collect(bench, worker)["ranks"]["0"]["source"] == "signal"
    assert worker.text == "up\n"


def test_looks_never_end_a_rank_whose_threads_recurse(bench, python):
    """Dumps by signal ended it with SIGSEGV after two or three looks with Python 3.11: they read frames without the GIL."""
    worker = bench.start(
        "import threading\n"
        "def descend(n): return 0 if n == 0 else 1 + descend(n - 1)\n"
        "def spin():\n"
        "    while True:\n"
        "        for n in range(0, 900, 37):\n"
        "            descend(n)\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n"
        "print('up')\n"
        "spin()\n",
        python=python,
    )
    worker.prints("up")
    worker.armed()
    for _ in range(8):
        assert functions(collect(bench, worker), 0)
    assert worker.process.poll() is None


def test_a_process_that_has_not_armed_the_signal_is_never_sent_it(bench):
    worker = bench.start(FOREVER, injected=False)
    worker.prints("up")
    found = collect(bench, worker)
    assert found["ranks"]["0"]["source"] in ("proc", "py-spy")
    assert worker.process.poll() is None


def test_a_ready_file_of_another_process_is_not_believed(bench, until):
    armed = bench.start(FOREVER, rank=0)
    said = armed.armed()
    victim = bench.start(FOREVER, rank=1, injected=False)
    victim.prints("up")
    claims = {**said, "pid": victim.pid, "start_time": victim.start_time}
    (bench.status_dir / "rank-1.ready.json").write_text(json.dumps(claims))
    found = collect(bench, victim)
    assert any("not caught" in why for why in found["ranks"]["1"]["why"])
    assert victim.process.poll() is None


def test_a_dump_never_lands_in_a_file_of_the_user(bench):
    worker = bench.start(
        "import os, json, time\n"
        "path = os.path.join(os.environ['CLUSTERCTL_STATUS_DIR'], 'rank-0.ready.json')\n"
        "fd = json.load(open(path))['fd']\n"
        "mine = os.open('mine', os.O_WRONLY | os.O_CREAT)\n"
        "print('up')\n"
        "while True:\n"
        "    os.dup2(mine, fd)\n"
        "    time.sleep(0.001)\n",
    )
    worker.prints("up")
    for _ in range(5):
        collect(bench, worker, seconds=1.0)
    assert (bench.tmp_path / "mine").read_bytes() == b""
    assert worker.process.poll() is None, worker.text


def test_a_signal_that_is_not_caught_any_more_is_not_sent(bench):
    worker = bench.start(
        "import ctypes, json, os, time\n"
        "path = os.path.join(os.environ['CLUSTERCTL_STATUS_DIR'], 'rank-0.ready.json')\n"
        "number = json.load(open(path))['signal']\n"
        "ctypes.CDLL(None).signal(number, None)\n"  # back to its default, which kills
        "print('up')\n"
        "import _thread, time\n"
        "time.sleep(1000)\n",
    )
    worker.prints("up")
    collect(bench, worker)
    assert worker.process.poll() is None


def test_children_are_listed_with_their_state(bench, until):
    worker = bench.start(
        "import os, signal, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('child', pid)\n"
        "time.sleep(1000)\n"
    )
    worker.prints("child")
    child = until(lambda: collect(bench, worker)["ranks"]["0"]["children"])[0]
    assert f"child {child['pid']}" in worker.text
    until(lambda: collect(bench, worker)["ranks"]["0"]["children"][0]["state"] == "T")


def test_ranks_below_a_launcher_of_the_user_are_looked_at_too(bench, until):
    worker = bench.start(
        "import os, subprocess, sys\n"
        "code = 'import time\\ndef waits():\\n    time.sleep(1000)\\nwaits()'\n"
        "subprocess.run([sys.executable, '-c', code], env={**os.environ, 'RANK': '7'})\n",
        env={"RANK": ""},
    )
    until((bench.status_dir / "rank-7.ready.json").exists)
    until(lambda: functions(collect(bench, worker), 7) == ["waits", "<module>"])


def test_a_worker_that_is_gone_is_said_to_be_gone(bench):
    worker = bench.start("print('last words')")
    worker.wait()
    rank = collect(bench, worker)["ranks"]["0"]
    assert rank["error"] == "the worker has ended"
    assert rank["tail"] == ["last words"]


def test_a_look_that_fails_says_why_and_costs_no_other_rank_its_own(bench):
    worker, other = (bench.start(FOREVER, rank=rank) for rank in (0, 1))
    other.armed()
    unknown = {key: value for key, value in worker.facts.items() if key != "start_time"}
    found = evidence_collector.collect_evidence(
        [unknown, other.facts], str(bench.status_dir), str(bench.tmp_path / "evidence"), time.monotonic() + 4.0
    )
    assert found["ranks"]["0"]["error"] == "the collection failed: KeyError('start_time')"
    assert found["took_s"] < 3.0
    assert functions(found, 1) == ["waits", "<module>"]


def test_the_deadline_holds_even_if_nothing_answers(bench):
    worker = bench.start(FOREVER)
    worker.prints("up")
    assert collect(bench, worker, seconds=0.0)["took_s"] < 1.0


def test_py_spy_is_asked_where_the_signal_cannot_be(bench, monkeypatch):
    frames = [{"name": "train", "filename": "t.py", "line": 3}]
    thread = {"pid": 1, "thread_id": 1, "thread_name": "MainThread", "owns_gil": False, "frames": frames}
    folder = bench.tmp_path / "bin"
    folder.mkdir()
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n[ \"$2\" = --nonblocking ] || exit 1\ncat <<'END'\n{json.dumps([thread])}\nEND\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    worker = bench.start(FOREVER, injected=False)
    worker.prints("up")
    found = collect(bench, worker)
    assert found["ranks"]["0"]["source"] == "py-spy"
    assert functions(found, 0) == ["train"]


HAS_PY_SPY = shutil.which("py-spy", path=f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(HAS_PY_SPY is None, reason="py-spy is not installed")
def test_a_stopped_rank_is_read_by_py_spy(bench):
    worker = bench.start(FOREVER)
    worker.armed()
    os.kill(worker.pid, signal.SIGSTOP)
    assert functions(collect(bench, worker), 0) == ["waits", "<module>"]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user takes root")
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_an_unprivileged_user_gets_the_same(bench, injected):
    python = "/usr/bin/python3"
    if not os.access(python, os.X_OK) or sys.version_info[:2] < (3, 9):
        pytest.skip("no interpreter that another user may execute")
    uid = 65534
    for folder in (bench.status_dir, bench.tmp_path):
        os.chown(folder, uid, uid)
    for folder, _, names in os.walk(bench.inject_dir):
        os.chown(folder, uid, uid)
        for name in names:
            os.chown(os.path.join(folder, name), uid, uid)
    for parent in bench.tmp_path.parents:
        with contextlib.suppress(PermissionError):
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    # Everything from here on is the other user's: the worker and who looks at it.
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", FOREVER]
    worker = bench.start(FOREVER, argv=argv, injected=injected)
    if injected:
        worker.armed()
    worker.prints("up")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(uid)
        os.setuid(uid)
        os.write(writing, json.dumps(collect(bench, worker)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    assert worker.process.poll() is None
    rank = found["ranks"]["0"]
    assert rank["source"] in (["shim"] if injected else ["py-spy", "proc"])
    assert functions(found, 0) == ([] if rank["source"] == "proc" else ["waits", "<module>"])


def test_a_dump_is_refused_for_a_stopped_process(bench, until):
    worker = bench.start(FOREVER)
    said = worker.armed()
    os.kill(worker.pid, signal.SIGSTOP)
    path = str(bench.status_dir / "rank-0.stacks")
    assert until(lambda: stack_capture.find_signal_obstacle(said, path)) == "process is in state T"


def test_what_very_many_ranks_have_to_say_is_kept_whole_and_fits_into_one_answer(bench):
    output = bench.tmp_path / "output"
    lines = ["\x01" * 1600 + str(number) for number in range(40)]
    output.write_text("\n".join(lines) + "\n")
    gone = [{"rank": rank, "pid": 1 << 23, "start_time": 0, "output": str(output)} for rank in range(64)]
    folder = bench.tmp_path / "stall-1"
    found = evidence_collector.collect_evidence(gone, str(bench.status_dir), str(folder), time.monotonic() + 4.0)
    assert frames_module.encode_message({"id": 1, "result": found})
    assert json.loads((folder / "rank-63.json").read_text())["tail"] == lines
    told = found["ranks"]["63"]
    assert told["tail"] == lines[-len(told["tail"]) :]
    assert told["tail"]
    assert told["why"] == [f"answer: cut, the complete evidence is in {folder}"]


WORKS = """
import pathlib, time
class Barrier:
    def __init__(self):
        self.folder, self.count, self.path = "stream-17", 3, pathlib.PurePosixPath("a/b")
    def wait(self, key, rounds):
        print("up", key, rounds)
        while True:
            time.sleep(0.02)
def outer():
    secret = "of the caller"
    Barrier().wait("key-1", 5)
outer()
"""


def test_numbers_and_hashes_of_texts_of_the_innermost_call_are_read_and_the_call_goes_on(bench, python):
    worker = bench.start(WORKS, python=python)
    worker.armed()
    worker.prints("up key-1 5")
    values = collect(bench, worker)["ranks"]["0"]["calls"]["values"]

    numbers = {name: text for name, text in values.items() if not text.startswith("#")}
    assert numbers == {"wait.rounds": "5", "wait.self.count": "3"}
    assert values.keys() - numbers.keys() == {"wait.key", "wait.self.folder", "wait.self.path"}
    assert "key-1" not in json.dumps(values)
    assert worker.process.poll() is None


def test_values_that_were_read_keep_no_object_of_the_call_alive(bench, python, until):
    """A tensor that a call has dropped would keep its memory."""
    script = (
        "import time, weakref\n"
        "class Held: pass\n"
        "def trains():\n"
        "    batch = Held()\n"
        "    print('up')\n"
        "    while not ready(): time.sleep(0.02)\n"
        "    seen = weakref.ref(batch)\n"
        "    del batch\n"
        "    print('kept' if seen() else 'dropped')\n"
        "def ready():\n"
        "    import os\n"
        "    return os.path.exists(os.environ['GO'])\n"
        "trains()\n"
    )
    go = bench.tmp_path / "go"
    worker = bench.start(script, python=python, env={"GO": str(go)})
    worker.armed()
    worker.prints("up")
    collect(bench, worker)
    go.touch()
    worker.wait()

    assert worker.text.splitlines()[-1] == "dropped"
