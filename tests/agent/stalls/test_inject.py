from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import clusterctl
from clusterctl.agent import inject
from tests.agent.stalls.conftest import Bench

SLEEP = "import time\nprint('up')\ntime.sleep(100)\n"


def test_what_a_worker_says_reaches_the_status_file(bench, python, until):
    worker = bench.start(
        "import clusterctl, time\n"
        "clusterctl.progress(step=3, loss=0.5)\n"
        "with clusterctl.phase('checkpoint', limit='1h30m'):\n"
        "    time.sleep(100)\n",
        python=python,
    )
    said = until(lambda: (said := worker.said()) and said["phase"] and said["main_time"] and said)
    assert (said["pid"], said["start_time"], said["rank"]) == (worker.pid, worker.start_time, 0)
    assert (said["step"], said["source"], said["facts"]) == (3, "user", {"loss": 0.5})
    assert (said["phase"]["name"], said["phase"]["limit_s"]) == ("checkpoint", 5400.0)
    assert said["degraded"] == {}


def test_the_last_word_holds_the_last_step(bench, python):
    worker = bench.start("import clusterctl\nfor i in range(1, 8): clusterctl.progress(step=i)\n", python=python)
    assert worker.wait() == 0
    assert worker.text == ""
    assert worker.said()["step"] == 7


def test_the_main_threads_stamp_grows_old_while_it_is_away(bench, python, until):
    worker = bench.start(
        "import time\nt = time.time()\nwhile time.time() < t + 3: pass\ntime.sleep(100)\n", python=python
    )
    until(lambda: (said := worker.said()) and said["main_time"] and said["time"] - said["main_time"] < 1.5)
    until(lambda: (said := worker.said()) and said["time"] - said["main_time"] > 3)


def test_by_hand_everything_is_a_no_op(tmp_path):
    script = "import clusterctl\nclusterctl.progress(step=1)\nwith clusterctl.phase('x', limit='nonsense'): print('ok')"
    root = Path(clusterctl.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_children_of_the_rank_do_not_speak_for_it(bench, python, until):
    worker = bench.start(
        "import clusterctl, subprocess, sys, time\n"
        "clusterctl.progress(step=5)\n"
        "subprocess.run([sys.executable, '-c', 'import clusterctl; clusterctl.progress(step=99)'], check=True)\n"
        "print('done')\ntime.sleep(100)\n",
        python=python,
    )
    worker.prints("done")
    said = until(lambda: (said := worker.said()) and said["main_time"] and said)
    assert (said["pid"], said["step"]) == (worker.pid, 5)


def test_forking_is_as_before(bench, python, until):
    # Warnings as errors: since 3.12 a fork beside another thread warns, and ours must not be that thread.
    worker = bench.start(
        "import clusterctl, os, time\n"
        "for i in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        clusterctl.progress(step=99)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "print('forked')\n"
        "clusterctl.progress(step=6)\n"
        "time.sleep(100)\n",
        python=python,
        options=("-W", "error"),
    )
    worker.prints("forked")
    until(lambda: (worker.said() or {}).get("step") == 6)


def test_a_fork_while_another_thread_keeps_the_gil_silences_nothing(bench, python, until):
    # As a data loader that forks while a checkpoint is pickled. Our hooks run last before a fork: the other thread is woken
    # first, and keeps the GIL for longer than we wait for our own.
    worker = bench.start(
        "import clusterctl, ctypes, os, threading, time\n"
        "keep, wanted = ctypes.PyDLL(None).usleep, threading.Semaphore(0)\n"
        "def greedy():\n"
        "    while wanted.acquire(): keep(700_000)\n"
        "threading.Thread(target=greedy, daemon=True).start()\n"
        "time.sleep(1.5)\n"
        "os.register_at_fork(before=wanted.release)\n"
        "for step in range(1, 4):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "    clusterctl.progress(step=step)\n"
        "    print('forked', step)\n"
        "    while not os.path.exists(f'go-{step}'): time.sleep(0.05)\n",
        python=python,
    )
    for step in range(1, 4):
        worker.prints(f"forked {step}")
        until(lambda step=step: (worker.said() or {}).get("step") == step, f"step {step}")
        (bench.tmp_path / f"go-{step}").touch()


@pytest.fixture
def full_memory(tmp_path):
    """A tmpfs for status files that somebody else can fill."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "memory"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=True)
    bench = Bench(tmp_path, place)
    yield bench
    bench.end()
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_tmpfs_silences_nobody_who_spoke_before(full_memory, until):
    worker = full_memory.start(
        "import clusterctl, itertools, time\n"
        "for step in itertools.count(): clusterctl.progress(step=step); time.sleep(0.05)\n"
    )
    worker.armed()
    with contextlib.suppress(OSError), (full_memory.status_dir / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
    now = worker.said()["step"]
    until(lambda: worker.said()["step"] > now + 30, "more steps")


def test_the_training_takes_over_from_a_helper_of_the_prologue(bench, python, until):
    script = bench.tmp_path / "train.py"
    script.write_text(SLEEP)
    worker = bench.start(argv=["bash", "-c", f"{python} -c 'print(1)'; {python} {script}; true"])
    worker.prints("up")
    said = until(lambda: (said := worker.said()) and said["main_time"] and said)
    assert said["pid"] != worker.pid
    assert b"train.py" in Path(f"/proc/{said['pid']}/cmdline").read_bytes()


WRAPPER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
TRAINS = "import torch, time; print('up', flush=True); time.sleep(100)"


def test_the_script_that_trains_takes_over_from_the_wrapper_that_started_it(bench, until):
    worker = bench.start(argv=[sys.executable, "-c", WRAPPER, "-c", TRAINS])
    worker.prints("up")
    said = until(lambda: (said := worker.said()) and said["pid"] != worker.pid and said["main_time"] and said)
    assert said["frameworks"] == ["torch"]
    assert worker.said("ready")["pid"] == said["pid"]
    os.kill(said["pid"], signal.SIGTERM)
    worker.wait()
    assert worker.said()["pid"] == said["pid"]


def test_a_helper_that_imports_a_framework_does_not_take_over_from_a_script_that_trains(bench, until):
    helper = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    worker = bench.start(argv=[sys.executable, "-c", helper, TRAINS])
    worker.prints("up")
    until(lambda: worker.said()["main_time"])
    assert worker.said()["pid"] == worker.pid


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_of_multiprocessing_does_not_take_over_from_the_script_that_started_it(bench, until, method):
    script = bench.tmp_path / "main.py"
    script.write_text(
        "import multiprocessing, time\n"
        "def work(): import torch; print('up', flush=True); time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.get_context({method!r}).Process(target=work).start()\n"
    )
    worker = bench.start(argv=[sys.executable, str(script)])
    worker.prints("up")
    until(lambda: worker.said()["main_time"])
    assert worker.said()["pid"] == worker.pid


def test_a_process_without_a_rank_claims_nothing_and_its_children_do(bench, until):
    # As torchrun: its own process has no RANK, its workers have.
    launcher = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'], env={**os.environ, 'RANK': '4'})\n"
    )
    worker = bench.start(launcher, env={"RANK": ""})
    worker.rank = 4
    said = until(worker.said)
    assert said["pid"] != worker.pid


def test_a_process_that_replaces_itself_keeps_its_rank(bench, until):
    worker = bench.start(
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(100)'])"
    )
    until(lambda: b"-c" in Path(f"/proc/{worker.pid}/cmdline").read_bytes())
    assert worker.armed()["pid"] == worker.pid


def test_the_users_own_sitecustomize_runs_as_if_ours_were_not_there(bench, python):
    own = bench.tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("MARK = 'theirs'\nprint('their sitecustomize')\n")
    worker = bench.start(
        "import sitecustomize\nprint(sitecustomize.MARK, sitecustomize.__file__)\n", python=python, pythonpath=str(own)
    )
    assert worker.wait() == 0
    assert worker.text == f"their sitecustomize\ntheirs {own / 'sitecustomize.py'}\n"
    assert worker.said()["pid"] == worker.pid


HANDS_ON = """\
import importlib.util, os, sys
from importlib.machinery import PathFinder

print("their sitecustomize")
here = os.path.dirname(os.path.realpath(__file__))
spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.realpath(path) != here])
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_sitecustomize_that_hands_on_as_ours_does_runs_once_whichever_is_first(bench, python, first):
    own = bench.tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(HANDS_ON)
    places = [bench.inject_dir, str(own)] if first == "ours" else [str(own), bench.inject_dir]
    worker = bench.start("print('runs')\n", python=python, env={"PYTHONPATH": os.pathsep.join(places)})
    assert worker.wait() == 0
    assert worker.text == "their sitecustomize\nruns\n"
    assert worker.said()["pid"] == worker.pid


def test_a_second_copy_of_ours_hands_on_to_the_users_own(bench):
    outer, own = inject.install_shim(str(bench.tmp_path / "outer")), bench.tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('their sitecustomize')\n")
    worker = bench.start("print('runs')\n", pythonpath=os.pathsep.join([outer, str(own)]))
    assert worker.wait() == 0
    assert worker.text == "their sitecustomize\nruns\n"


def test_errors_of_the_users_sitecustomize_are_reported_as_ever(bench):
    own = bench.tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    worker = bench.start("print('runs')", pythonpath=str(own))
    assert worker.wait() == 0
    assert "ValueError: theirs" in worker.text
    assert worker.text.endswith("runs\n")


def test_a_status_directory_that_cannot_be_used_harms_nothing(bench, python):
    worker = bench.start("print('runs')", python=python, env={"CLUSTERCTL_STATUS_DIR": "/proc/none"})
    assert worker.wait() == 0
    assert worker.text == "runs\n"


def test_an_installed_clusterctl_is_not_shadowed(bench):
    own = bench.tmp_path / "own" / "clusterctl"
    own.mkdir(parents=True)
    (own / "__init__.py").write_text("WHO = 'installed'\n")
    worker = bench.start("import clusterctl\nprint(clusterctl.WHO)", pythonpath=str(own.parent))
    assert worker.wait() == 0
    assert worker.text == "installed\n"


def test_the_whole_shim_is_written(tmp_path):
    source = Path(clusterctl.__file__).parent
    inject.install_shim(str(tmp_path / "out"))
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.py")}
    shim = {f"_clusterctl_shim/{path.name}" for path in source.glob("agent/shim/*.py")}
    forkserver = {f"_clusterctl_forkserver/{path.name}" for path in source.glob("agent/forkserver/*.py")}
    assert (
        shim
        | forkserver
        | {"sitecustomize.py", "_clusterctl_lib/clusterctl/__init__.py", "_clusterctl_lib/clusterctl/agent/__init__.py"}
        <= written
    )
    assert {path for path in written if "worker" in path} == {
        f"_clusterctl_lib/clusterctl/agent/worker/{path.name}" for path in source.glob("agent/worker/*.py")
    }


def test_a_phase_whose_limit_cannot_be_read_is_said_and_raises_nothing(bench, until):
    worker = bench.start("import clusterctl, time\nwith clusterctl.phase('x', limit='soon'): time.sleep(100)\n")
    said = until(lambda: (said := worker.said()) and said["phase"] and said)
    assert said["phase"]["limit_s"] == 900.0
    assert "phase" in said["degraded"]


def test_handlers_of_the_user_stay_in_place(bench, python, until):
    worker = bench.start(
        "import signal, time\n"
        "seen = []\n"
        "for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):\n"
        "    signal.signal(s, lambda number, frame: (seen.append(number), print('got', number)))\n"
        "import faulthandler; faulthandler.enable()\n"
        "print('set')\n"
        "while True: time.sleep(0.05)\n",
        python=python,
    )
    worker.prints("set")
    worker.armed()
    for number in (10, 12, 15, 14, 1):
        os.kill(worker.pid, number)
        worker.prints(f"got {number}")
    assert worker.said()["degraded"] == {}


def test_a_signal_that_the_user_takes_over_is_given_up(bench, python, until):
    worker = bench.start(
        "import json, os, signal, time\n"
        "path = os.path.join(os.environ['CLUSTERCTL_STATUS_DIR'], 'rank-0.ready.json')\n"
        "first = json.load(open(path))['signal']\n"
        "signal.signal(first, lambda *_: print('taken over'))\n"
        "print('set')\n"
        "while True: time.sleep(0.05)\n",
        python=python,
    )
    worker.prints("set")
    until(lambda: worker.said("ready") is None)
    until(lambda: "stacks" in worker.said()["degraded"])
    assert "taken over" not in worker.text


def test_the_stacks_of_a_worker_that_closes_all_descriptors_land_in_no_file_of_the_user(bench, python, until):
    worker = bench.start(
        "import os, time\n"
        "os.closerange(3, 5000)\n"
        "mine = [open(f'mine-{i}', 'w') for i in range(900)]\n"  # one of them gets the number we had
        "print('closed')\n"
        "while True: time.sleep(0.05)\n",
        python=python,
    )
    worker.prints("closed")
    until(lambda: worker.said("ready") is None)
    until(lambda: "stacks" in worker.said()["degraded"])
    assert not any(path.read_bytes() for path in bench.tmp_path.glob("mine-*"))


def test_setproctitle_changes_nothing(bench, until):
    folder = Path(str(pytest.importorskip("setproctitle").__file__)).parents[1]
    script = "import setproctitle\nsetproctitle.setproctitle('renamed')\n" + SLEEP
    worker = bench.start(script, pythonpath=str(folder))
    worker.prints("up")
    assert worker.armed()["pid"] == worker.pid
    assert Path(f"/proc/{worker.pid}/cmdline").read_bytes().startswith(b"renamed")
    assert worker.said()["degraded"] == {}


def test_the_environment_keeps_the_users_path_behind_ours_and_adds_no_current_directory():
    from clusterctl.agent import inject

    assert inject.build_shim_environment("/i", "/s", "/a:/b")["PYTHONPATH"] == "/i:/a:/b"
    assert inject.build_shim_environment("/i", "/s", "")["PYTHONPATH"] == "/i"


def test_importing_clusterctl_loads_nothing_else():
    root = Path(clusterctl.__file__).parents[1]
    code = "import sys; before = set(sys.modules); import clusterctl; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(root)}, capture_output=True, check=True
    )
    assert json.loads(done.stdout.decode().replace("'", '"')) == ["__future__", "clusterctl"]
