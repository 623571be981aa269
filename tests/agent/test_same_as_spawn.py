"""What a package does when it is imported means the same in a forked rank as in one that starts anew, or the fork says why not.

Each package is played twice: as a module of the user's that the script imports, and as an installed one of `job.preload`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.agent.started import Job, Ran
from tests.agent.test_start_methods import installed, path_of

if TYPE_CHECKING:
    from tests.agent.conftest import Node

RANKS = 2


class Package(NamedTuple):
    """A package and a script that tells what it makes of it.

    Attributes:
        differs: What ranks tell differs from rank to rank, and from run to run.
        forks: Why it is not forked where it is preloaded; `None` where it is.
    """

    text: str
    script: str
    why: str | None = None
    differs: bool = False


SHARE = "which ranks would share"
CHANCE = "`package` has drawn a random value"
PACKAGES = {
    "an open file": Package("FILE = open('/etc/services', 'rb')", "print(package.FILE.read(64))", SHARE),
    "an archive": Package(
        "import os, zipfile\nwith zipfile.ZipFile(str(os.getppid()) + '.zip', 'w') as file:\n    file.writestr('a', 'x' * 9)\n"
        "FILE = zipfile.ZipFile(file.filename)",
        "print(package.FILE.read('a'))",
        "has read the id of its process",
    ),
    "a database": Package(
        "import sqlite3\nBASE = sqlite3.connect('/tmp/package.sqlite')\nBASE.execute('create table if not exists t (x)')",
        "print(package.BASE.execute('select count(*) from t').fetchall())",
        SHARE,
    ),
    "a pipe": Package(
        "import os\nREAD, WRITE = os.pipe()",
        "import os\nos.write(package.WRITE, os.environ['RANK'].encode())\nprint(os.read(package.READ, 8) == os.environ['RANK'].encode())",
        SHARE,
    ),
    "an epoll": Package("import select\nPOLL = select.epoll()", "print(package.POLL.poll(0))", SHARE),
    "an eventfd": Package(
        "import ctypes\nEVENT = ctypes.CDLL(None).eventfd(0, 0o4000)",
        "import os\nos.write(package.EVENT, (5).to_bytes(8, 'little'))\nprint(os.read(package.EVENT, 8))",
        SHARE,
    ),
    "a directory": Package("import os\nFOLDER = os.open('/', os.O_RDONLY)", "print(package.FOLDER > 2)", SHARE),
    "a lock": Package(
        "import fcntl, tempfile\nFILE = open('lock', 'w')\ntry:\n    fcntl.lockf(FILE, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError:\n    pass",
        "print('done')",
        SHARE,
    ),
    "its output turned away": Package("import os\nos.dup2(2, 1)\nos.close(0)", "print('x')", "has changed its output"),
    "a seed": Package("import random\nrandom.seed(7)", "import random\nprint(random.random())", "has seeded `random`"),
    "a state": Package(
        "import random\nrandom.setstate(random.Random(7).getstate())",
        "import random\nprint(random.random())",
        "`package`",
    ),
    "a generator": Package(
        "import random\nRNG = random.Random()", "print(package.RNG.random())", "random number generator", True
    ),
    "a seeded generator": Package("import random\nRNG = random.Random(3)", "print(package.RNG.random())"),
    "a number": Package("import random\nVALUE = random.random()", "print(package.VALUE)", CHANCE, True),
    "a choice": Package(
        "from random import randint\nVALUE = randint(0, 1 << 60)", "print(package.VALUE)", CHANCE, True
    ),
    "a number of numpy": Package(
        "import numpy\nVALUE = numpy.random.rand()", "print(package.VALUE)", "numpy.random", differs=True
    ),
    "a seed of numpy": Package(
        "import numpy\nnumpy.random.seed(7)", "import numpy\nprint(numpy.random.rand())", "has seeded `numpy.random`"
    ),
    "a generator of numpy": Package(
        "import numpy\nRNG = numpy.random.default_rng()", "print(package.RNG.random())", CHANCE, differs=True
    ),
    "a seeded generator of numpy": Package(
        "import numpy\nRNG = numpy.random.default_rng(3)", "print(package.RNG.random())"
    ),
    "numpy": Package("import numpy", "import numpy\nprint(numpy.random.rand())", differs=True),
    "a number of the system": Package(
        "import random\nVALUE = random.SystemRandom().random()", "print(package.VALUE)", CHANCE, differs=True
    ),
    "an identifier": Package("import uuid\nVALUE = uuid.uuid4()", "print(package.VALUE)", CHANCE, True),
    "a token": Package("import secrets\nVALUE = secrets.token_hex()", "print(package.VALUE)", CHANCE, True),
    "a thread": Package(
        "import threading\nONE = threading.Thread(target=threading.Event().wait, daemon=True)\nONE.start()",
        "print(package.ONE.is_alive())",
        "runs 1 threads",
    ),
    "a child": Package(
        "import subprocess\nONE = subprocess.Popen(['sleep', '60'])",
        "print(package.ONE.poll())\npackage.ONE.kill()",
        "has started",
    ),
    "shared memory": Package(
        "import mmap\nMEMORY = mmap.mmap(-1, 4096)",
        "import os\npackage.MEMORY[0] += 1\nprint(package.MEMORY[0])",
        "shares memory",
    ),
    "a temporary folder": Package(
        "import tempfile\nPLACE = tempfile.mkdtemp()",
        "import os\nprint(package.PLACE)\nos.rmdir(package.PLACE)",
        "temporary",
        True,
    ),
    "its pid": Package(
        "import os\nPID = os.getpid()", "import os\nprint(package.PID == os.getpid())", "id of its process"
    ),
    "its pid by name": Package(
        "from os import getpid\nPID = getpid()",
        "import os\nprint(package.PID == os.getpid(), package.getpid() == os.getpid())",
        "id of its process",
    ),
    "a variable": Package("import os\nos.environ['NEW'] = '1'", "import os\nprint(os.environ['NEW'])"),
    "a variable removed": Package("import os\ndel os.environ['KIND']", "import os\nprint(os.environ.get('KIND'))"),
    "a variable set as it was": Package("import os\nos.environ['KIND'] = 'x'", "import os\nprint(os.environ['KIND'])"),
    "a variable of a rank": Package(
        "import os\nos.environ['MASTER_PORT'] = '1'", "import os\nprint(os.environ['MASTER_PORT'])", "MASTER_PORT"
    ),
    "the rank": Package("import os\nRANK = os.environ.get('RANK')", "print(package.RANK)", "has read RANK"),
    "all variables": Package("import os\nALL = dict(os.environ)", "print(package.ALL['KIND'])"),
    "an argument": Package("import sys\nsys.argv.append('--more')", "import sys\nprint(sys.argv)", "its arguments"),
    "the arguments": Package("import sys\nARGV = list(sys.argv)", "print(package.ARGV)"),
    "a folder": Package("import os\nos.chdir('/')", "import os\nprint(os.getcwd())", "has changed its folder"),
    "the folder": Package("import os\nWHERE = os.getcwd()", "import os\nprint(package.WHERE == os.getcwd())"),
    "the script": Package("import sys\nMAIN = sys.modules['__main__'].__file__", "print(package.MAIN)"),
    "a timer": Package(
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 1000)",
        "import signal\nprint(signal.getitimer(0)[0] > 0)",
        "a timer",
    ),
    "a handler": Package(
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "import signal\nprint(signal.getsignal(signal.SIGUSR1))",
    ),
    "a blocked signal": Package(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        "import signal\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ),
    "a umask": Package("import os\nos.umask(0o77)", "import os\nprint(oct(os.umask(0)))"),
    "a locale": Package(
        "import locale\nlocale.setlocale(locale.LC_ALL, 'C')", "import locale\nprint(locale.setlocale(locale.LC_ALL))"
    ),
    "something for the end": Package("import atexit\natexit.register(print, 'bye')", "print('main')"),
    "a limit": Package(
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (10000, 10000))",
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))",
        "its limits",
    ),
    "a path": Package("import sys\nsys.path.insert(0, '/srv')", "import sys\nprint(sys.path[0])", "sys.path"),
    "a tracer": Package(
        "import sys\nsys.settrace(lambda *_: None)", "import sys\nprint(bool(sys.gettrace()))", "tracer"
    ),
    "words": Package("print('hello')", "print('main')"),
}


def play(node: Node, method: str, *, preloaded: bool, text: str, script: str) -> tuple[list[str], list[str]]:
    """What each rank says, and why ranks were not forked."""
    job = Job(
        node, method, "train.py", env={**path_of(node), "KIND": "x"}, preload=["package" if preloaded else "decimal"]
    )
    if preloaded:
        installed(node, "package", text)
    else:
        job.write("package.py", text)
    job.write("train.py", f"import package\n{script}\n")
    talk = node.talk()
    job.prepare(talk, RANKS)
    node.follow(talk)
    job.begin(talk, RANKS, late={"MASTER_PORT": "29500"})
    talk.wait_for("swept")
    ran = Ran(talk, node.folder)
    assert [ran.code(n) for n in range(RANKS)] == [0] * RANKS, ran.said()
    return [ran.said(n) for n in range(RANKS)], [a["message"] for a in talk.of("alarm") if a["code"] == "not_forked"]


@pytest.mark.parametrize("how", ["preloaded", "the user's"])
@pytest.mark.parametrize("what", PACKAGES)
def test_a_package_means_the_same(node: Node, what: str, how: str) -> None:
    text, script, why, differs = PACKAGES[what]
    preloaded = how == "preloaded"
    forked, reasons = play(node, "fork", preloaded=preloaded, text=text, script=script)
    if preloaded and why is not None:
        assert len(reasons) == 1
        assert why in reasons[0]
    else:
        assert reasons == []
    if differs:
        assert len(set(forked)) == RANKS
        return
    bare = Job(node, "spawn", "train.py", env={**path_of(node), "KIND": "x"})
    wanted = [bare.bare(MASTER_PORT="29500", RANK=str(n))[1] for n in (range(RANKS) if "RANK" in text else [0])]
    assert forked == (wanted if len(wanted) == RANKS else wanted * RANKS)


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", ["torch.manual_seed(7)", "torch.rand(1)"])
def test_a_seed_of_torch_that_an_import_sets_holds(node: Node, text: str) -> None:
    script = "import torch\nprint(torch.initial_seed() if torch.initial_seed() == 7 else 'drawn')"
    forked, reasons = play(node, "fork", preloaded=True, text=f"import torch\n{text}\n", script=script)
    assert ["has seeded torch, or drawn" in reason for reason in reasons] == [True]
    assert forked == ["7\n" if "seed" in text else "drawn\n"] * RANKS
