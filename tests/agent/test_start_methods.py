"""A worker means the same whether it is started anew or forked: each test runs in both ways, mostly beside a bare Python."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.started import METHODS, Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Node

    Make = Callable[..., Job]


@pytest.fixture(params=METHODS)
def job(node: Node, request: pytest.FixtureRequest) -> Make:
    def make(text: str, *arguments: str, **options: Any) -> Job:
        made = Job(node, request.param, "train.py", *arguments, **options)
        made.write("train.py", text)
        return made

    return make


def same_as_bare(job: Job) -> str:
    """What a worker says, which is what Python says by itself, with the same exit code."""
    ran, (code, text) = job.run(seconds=200.0), job.bare()
    assert (ran.code(), ran.said()) == (code, text)
    return text


MAIN = """\
'''What it is for.'''
import os, sys
print(__name__, __file__, __spec__, __package__, __doc__, type(__loader__).__name__, __loader__.name)
print(sorted(globals()), sys.modules["__main__"].__dict__ is globals())
print(sys.argv, sys.orig_argv, sys.path[0], os.getcwd(), sys.executable, sys.prefix)
print(sys.flags, sys.dont_write_bytecode, sys.warnoptions, sys._xoptions)
"""


def test_a_script_is_main(job: Make) -> None:
    assert "__main__" in same_as_bare(job(MAIN, "--epochs", "3", "ä"))


def test_a_module_is_main(node: Node, job: Make) -> None:
    made = job("", "--lr", "1")
    made.argv[1:] = ["-m", "pkg.train", "--lr", "1"]
    made.write("pkg/__init__.py", "")
    made.write(
        "pkg/train.py", MAIN.replace("__spec__, ", "__spec__.name, ").replace(", __loader__.name", ", __loader__.path")
    )
    assert "pkg/train.py" in same_as_bare(made)


def test_a_package_with_a_main_is_main(job: Make) -> None:
    made = job("")
    made.argv[1:] = ["-m", "pkg"]
    made.write("pkg/__init__.py", "")
    made.write("pkg/__main__.py", "import sys; print(__spec__.name, __package__, sys.argv); 1 / 0")
    assert "pkg.__main__" in same_as_bare(made)


def test_a_script_behind_a_link_finds_its_own_modules(job: Make) -> None:
    made = job("")
    made.write("below/real.py", "import sys, friend; print(__file__, sys.path[0], friend.WHO)")
    made.write("below/friend.py", "WHO = 'friend'")
    (made.work / "train.py").unlink()
    (made.work / "train.py").symlink_to("below/real.py")
    assert "friend" in same_as_bare(made)


FAILURES = {
    "an exception": "def f():\n    raise ValueError('too small')\n\nf()\n",
    "an exception with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
    "a mistake of syntax": "x = (1,\n",
    "a group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])\n",
    "exit with a number": "import sys; sys.exit(3)\n",
    "exit with nothing": "import sys; sys.exit()\n",
    "exit with a text": "import sys; sys.exit('no data')\n",
    "exit with a large number": "import sys; sys.exit(300)\n",
    "exit at once": "import os; os._exit(7)\n",
    "an interrupt": "raise KeyboardInterrupt\n",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n",
    "an abort": "import os; os.abort()\n",
    "a hook of its own": "import sys, traceback\n"
    "sys.excepthook = lambda t, v, tb: print('mine', t, v, len(traceback.extract_tb(tb)))\nraise ValueError('x')\n",
    "the end": "print('done')\n",
}


@pytest.mark.parametrize("how", FAILURES)
def test_it_ends_as_python_does(job: Make, how: str) -> None:
    if "ExceptionGroup" in FAILURES[how] and sys.version_info < (3, 11):
        pytest.skip("there are no groups")
    same_as_bare(job(FAILURES[how], env={"PYTHONFAULTHANDLER": ""}))


def test_what_is_to_be_done_at_the_end_is_done(job: Make) -> None:
    text = """
        import atexit, sys, threading, time
        class Slow:
            def __del__(self):
                print("deleted", flush=True)
        kept = Slow()
        atexit.register(print, "first registered", sys.modules["__main__"].__dict__.get("__file__"))
        atexit.register(lambda: print("last registered", "__file__" in sys.modules["__main__"].__dict__))
        ready = threading.Event()
        threading.Thread(target=lambda: (ready.wait(), print("thread done"))).start()
        threading.Timer(0.1, ready.set).start()
        print("main done", end="")
    """
    import textwrap

    assert "first registered" in same_as_bare(job(textwrap.dedent(text), env={"PYTHONUNBUFFERED": ""}))


def test_signals_are_as_python_has_them(job: Make) -> None:
    text = "import signal\n"
    text += "print([(n, signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)])\n"
    text += "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    text += "print([l for l in open('/proc/self/status') if l.startswith(('SigIgn', 'SigBlk', 'SigCgt'))])\n"
    import re

    made = job(text)
    ran, (_, bare) = made.run(), made.bare()
    address = re.compile("0x[0-9a-f]+")
    assert address.sub("", ran.said()) == address.sub("", bare)


def test_it_has_a_session_and_a_group_of_its_own(job: Make) -> None:
    text = "import os, threading\n"
    text += "print(os.getpid() == os.getsid(0) == os.getpgrp(), os.getpid() == threading.get_native_id())\n"
    text += "print(threading.current_thread() is threading.main_thread(), threading.main_thread().native_id == os.getpid())\n"
    text += "print(open('/proc/self/comm').read().strip(), open('/proc/self/cmdline').read().split(chr(0)))\n"
    text += "print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/task')))\n"
    said = job(text, "--x", "1").run().said().splitlines()
    assert said[:2] == ["True True", "True True"]
    assert said[2] == f"{Path(sys.executable).name} {[sys.executable, 'train.py', '--x', '1', '']}"
    assert said[3] == "['0', '1', '2'] 1"


def test_its_environment_is_the_same_for_python_the_kernel_and_programs(job: Make) -> None:
    text = "import json, os, subprocess\n"
    text += "shown = dict(line.split('=', 1) for line in open('/proc/self/environ').read().split(chr(0)) if line)\n"
    text += "told = subprocess.run(['env', '-0'], stdout=subprocess.PIPE, check=True).stdout.decode()\n"
    text += "told = dict(line.split('=', 1) for line in told.split(chr(0)) if line)\n"
    text += "print(json.dumps([dict(os.environ), shown, told]))\n"
    made = job(text, env={"PLAIN": "a b", "EMPTY": "", "WIDE": "ä" * 3000})
    ours, shown, told = json.loads(made.run(late={"MASTER_ADDR": "n1"}).said())
    assert ours == shown == told
    assert (ours["RANK"], ours["MASTER_ADDR"], ours["PLAIN"], ours["EMPTY"]) == ("0", "n1", "a b", "")
    assert ours["PWD"] == str(made.work)
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in ours
    assert "OMP_NUM_THREADS" not in ours or "OMP_NUM_THREADS" in os.environ


def test_output_goes_to_its_file_in_order(job: Make) -> None:
    text = "import os, sys\n"
    text += "print(repr(sys.stdin.read()), sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.errors)\n"
    text += "print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering, sys.stdout.name)\n"
    text += "print('to stderr', file=sys.stderr)\nos.write(1, b'below\\n')\nos.system('echo from a program')\n"
    text += "print(sys.stdout.fileno(), sys.stdin.fileno(), sys.stdout is sys.__stdout__)\n"
    assert "from a program" in same_as_bare(job(text))


def test_output_that_python_keeps_back_comes_at_the_end(job: Make) -> None:
    text = "import os, sys\nprint('first said')\nprint('then', file=sys.stderr)\nos.write(1, b'at once\\n')\n"
    assert same_as_bare(job(text, env={"PYTHONUNBUFFERED": ""})).endswith("first said\n")


def test_what_imports_say_is_said_by_every_worker(node: Node, job: Make) -> None:
    installed(node, "chatty", "print('hello from an import')\n")
    made = job("import chatty\nprint('script')\n", env=path_of(node), preload=["chatty"])
    ran = made.run(2)
    assert [ran.said(n) for n in (0, 1)] == ["hello from an import\nscript\n"] * 2


def test_variables_that_imports_set_are_set(node: Node, job: Make) -> None:
    installed(node, "setter", "import os\nos.environ['FROM_AN_IMPORT'] = 'yes'\n")
    text = "import os, setter\nprint(os.environ['FROM_AN_IMPORT'], 'FROM_AN' in open('/proc/self/environ').read())\n"
    same_as_bare(job(text, env=path_of(node), preload=["setter"]))


def test_what_is_drawn_by_chance_differs_between_workers(job: Make) -> None:
    text = "import numpy, random, multiprocessing, tempfile, uuid\n"
    text += "print(random.random(), numpy.random.rand(), uuid.uuid4(), next(tempfile._get_candidate_names()))\n"
    text += "print(bytes(multiprocessing.current_process().authkey).hex())\n"
    ran = job(text, preload=["numpy", "random", "multiprocessing", "tempfile", "uuid"]).run(2)
    drawn = [ran.said(n).split() for n in (0, 1)]
    assert len({*drawn[0], *drawn[1]}) == 10


def test_a_seed_of_hashes_that_is_set_holds(job: Make) -> None:
    same_as_bare(
        job("print(hash('name'), sorted({'a', 'b', 'c'}), list({'a', 'b', 'c'}))", env={"PYTHONHASHSEED": "7"})
    )


OPTIONS = {
    "optimised": {"PYTHONOPTIMIZE": "2"},
    "warnings are errors": {"PYTHONWARNINGS": "error::UserWarning"},
    "for developers": {"PYTHONDEVMODE": "1"},
    "safe path": {"PYTHONSAFEPATH": "1"},
    "without bytecode": {"PYTHONDONTWRITEBYTECODE": "1"},
    "another encoding": {"PYTHONIOENCODING": "latin-1:replace"},
    "traced memory": {"PYTHONTRACEMALLOC": "3"},
    "no site of the user": {"PYTHONNOUSERSITE": "1"},
}


@pytest.mark.parametrize("which", OPTIONS)
def test_options_that_the_environment_sets_hold(job: Make, which: str) -> None:
    text = "import sys, tracemalloc, warnings\n'''doc'''\n"
    text += "def f():\n    'its doc'\nprint(f.__doc__, __debug__, sys.flags, sys.stdout.encoding, sys.path[0])\n"
    text += "print(tracemalloc.is_tracing(), sys.warnoptions)\nwarnings.warn('careful')\nassert False, 'asserted'\n"
    same_as_bare(job(text, env=OPTIONS[which]))


def test_faulthandler_tells_of_a_crash(job: Make) -> None:
    text = "import ctypes\ndef deep():\n    ctypes.string_at(0)\ndeep()\n"
    made = job(text, env={"PYTHONFAULTHANDLER": "1"})
    ran, (code, bare) = made.run(), made.bare()
    assert ran.code() == code == -signal.SIGSEGV
    ours = [line for line in ran.said().splitlines() if line.startswith(("Fatal", "  File"))]
    wanted = [line for line in bare.splitlines() if line.startswith(("Fatal", "  File"))]
    assert ours == wanted


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_processes_can_be_started_within(job: Make, how: str) -> None:
    text = "import multiprocessing, os, sys\nPARENT = os.getpid()\n"
    text += "def square(x):\n    return x * x, __name__, os.environ['RANK']\n"
    text += f"if __name__ == '__main__':\n    context = multiprocessing.get_context({how!r})\n"
    text += "    with context.Pool(2) as pool:\n        print(pool.map(square, range(4)))\n"
    text += "    queue = context.Queue()\n    child = context.Process(target=queue.put, args=(5,))\n"
    text += "    child.start()\n    print(queue.get(), child.name)\n    child.join()\n    print(child.exitcode)\n"
    same_as_bare(job(text, preload=["multiprocessing.pool"]))


def test_a_module_of_the_users_is_loaded_by_each_worker(job: Make) -> None:
    made = job("import friend\nprint(friend.RANK)\n", preload=None)
    made.write("friend.py", "import numpy\nimport os\nRANK = os.environ['RANK']\n")
    ran = made.run(2)
    assert [ran.said(n) for n in (0, 1)] == ["0\n", "1\n"]


def test_nobody_looks_for_garbage_among_what_all_workers_share(node: Node) -> None:
    # A fork alone shares it: a fresh start has nothing in common with others.
    text = "import gc\nlooked_at = []\n"
    text += "gc.callbacks.append(lambda phase, told: looked_at.append(told['generation']))\n"
    installed(node, "watching", text + "held = [[] for _ in range(100000)]\n")
    one = Job(node, "fork", "job.py", env=path_of(node), preload=["watching"])
    one.write("job.py", "import gc, watching\nprint(2 in watching.looked_at, gc.get_threshold(), gc.isenabled())\n")
    assert one.run().said() == f"False {gc.get_threshold()} True\n"


def test_the_shim_is_armed_in_each(node: Node, job: Make) -> None:
    text = "import os, sys, time\nimport _clusterctl_shim as shim, clusterctl\n"
    text += "clusterctl.progress(7)\ntime.sleep(1.5)\n"
    text += "print(shim.active_shim is not None, shim.active_shim.counters.step, sorted(shim.active_shim.counters.degraded), 'sitecustomize' in sys.modules)\n"
    text += "print([n for n in sorted(os.listdir(os.environ['CLUSTERCTL_STATUS_DIR'])) if os.environ['RANK'] in n])\n"
    made = job(text)
    made.forked["inject"] = True
    ran = made.run(2, inject=True)
    for rank in (0, 1):
        first, second = ran.said(rank).splitlines()
        assert first == "True 7 [] True"
        assert second == str(
            [f"rank-{rank}.{kind}" for kind in ("claim", "lock", "python", "ready.json", "stacks", "status.json")]
        )


def test_a_limit_of_the_shell_holds(job: Make) -> None:
    text = "import resource\nprint([resource.getrlimit(n) for n in range(16) if n != 10], open('/proc/self/oom_score_adj').read())\n"
    text += "import os\nprint(os.umask(0o22), os.nice(0), os.sched_getaffinity(0))\n"
    made = job(text)
    said, bare = made.run().said(), made.bare()[1]
    # More files may be open than by default: that is so for every worker.
    assert said.split("), (")[0] == bare.split("), (")[0]
    assert said.splitlines()[1:] == bare.splitlines()[1:]


# --- torch


THREADS = """\
import os, json, numpy, torch, threading
from threadpoolctl import threadpool_info
pools = sorted((p["user_api"], p["internal_api"], os.path.basename(p["filepath"]), p["num_threads"]) for p in threadpool_info())
seen = []
threading.Thread(target=lambda: seen.append(torch.get_num_threads())).start()
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
print(json.dumps([torch.get_num_threads(), torch.get_num_interop_threads(), pools, seen]))
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ["1", "3", None])
def test_libraries_have_the_threads_that_are_planned(job: Make, number: str | None) -> None:
    made = job(THREADS, preload=None, env={} if number is None else {"OMP_NUM_THREADS": number})
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        assert name not in os.environ
    ours, bare = json.loads(made.run().said()), json.loads(made.bare()[1])
    assert ours == bare


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_seeds_of_torch_are_drawn_by_each_where_a_fresh_start_draws_them(job: Make) -> None:
    made = job("import torch\nprint(torch.initial_seed(), torch.rand(1).item())\n", preload=None)
    ran = made.run(2)
    ours = {ran.said(n) for n in (0, 1)}
    bare = {made.bare()[1] for _ in range(2)}
    assert len(ours) == len(bare)


LOADER = """\
import os, random, numpy, torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor([i, os.getpid(), torch.utils.data.get_worker_info().id])
if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    for how in ("fork", "spawn"):
        rows = torch.cat(list(DataLoader(Numbers(), num_workers=2, batch_size=2, multiprocessing_context=how)))
        print(how, rows[:, 0].tolist(), len(set(rows[:, 1].tolist())), sorted(set(rows[:, 2].tolist())))
    print(torch.rand(3), model.weight.grad.sum())
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_loader_of_data_has_workers_of_its_own(job: Make) -> None:
    assert "spawn" in same_as_bare(job(LOADER, preload=None, env={"OMP_NUM_THREADS": "2"}))


DDP = """\
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 2), float(dist.get_rank()))).sum().backward()
    optimizer.step()
print(dist.get_world_size(), [round(p, 4) for p in model.module.weight.flatten().tolist()])
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_two_nodes_train_together(nodes: Callable[[], Node], method: str, free_port: int) -> None:
    late = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "WORLD_SIZE": "4"}
    made = []
    for number in range(2):
        one = Job(nodes(), method, "train.py", preload=None, env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
        one.write("train.py", DDP)
        made.append((one, one.node.talk(), number))
    for one, talk, _ in made:
        one.prepare(talk, 2)
        one.node.follow(talk)
    for one, talk, number in made:
        workers = [
            {
                "rank": 2 * number + n,
                "local_rank": n,
                "argv": one.argv,
                "env": {**one.env, **late, "RANK": str(2 * number + n)},
            }
            for n in range(2)
        ]
        from clusterctl.agent.protocol.command_messages import Command

        talk.ask(Command.START, **one.node.where, attempt=0, workers=workers, inject=False)
    logs = []
    for _, talk, _ in made:
        talk.wait_for("swept", seconds=200)
        assert [event["exit_code"] for event in talk.of("exited")] == [0, 0]
        assert ("forked" in [alarm["code"] for alarm in talk.of("alarm")]) == (method == "fork")
        logs += [bytes(data) for name, data in talk.files.items() if name.endswith(".log")]
    assert len(set(logs)) == 1, logs


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- what is installed, for these tests


def installed(node: Node, name: str, text: str) -> Path:
    folder = node.home / "site-packages"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def path_of(node: Node) -> dict[str, str]:
    return {"PYTHONPATH": str(node.home / "site-packages")}
