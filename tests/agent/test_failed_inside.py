"""A Python that fails below a shell is a failure of its rank, whatever the shell ends with."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.command_messages import Command

if TYPE_CHECKING:
    from tests.agent.conftest import Node

USAGE = "import argparse\nargparse.ArgumentParser().parse_args() if len(__import__('sys').argv) > 1 else exit(2)\n"
RAISES = "def f(): raise RuntimeError('boom')\nf()\n"


def end_of(node: Node, shell: str, **files: str) -> dict[str, Any]:
    """How a rank ends that is a shell, beside some Python files."""
    work = node.home / "work"
    work.mkdir(exist_ok=True)
    for name, text in files.items():
        (work / f"{name}.py").write_text(text)
    talk = node.talk()
    node.prepare(talk, 1)
    node.follow(talk)
    shell = shell.replace("python", shlex.quote(sys.executable))
    worker = {"rank": 0, "local_rank": 0, "argv": ["bash", "-c", shell], "env": {"RANK": "0"}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], inject=True)
    talk.wait_for("swept")
    return talk.exits()[0]


@pytest.mark.parametrize(
    ("shell", "script", "message"),
    [
        pytest.param("python train.py | tee out", RAISES, "RuntimeError: boom", id="pipe"),
        pytest.param("python train.py; echo done", RAISES, "RuntimeError: boom", id="later_command"),
        pytest.param("python train.py & wait", RAISES, "RuntimeError: boom", id="background"),
        pytest.param("python -m train; true", RAISES, "RuntimeError: boom", id="module"),
        pytest.param("python train.py; python good.py", RAISES, "RuntimeError: boom", id="another_ends_well"),
        pytest.param("python train.py; true", "import sys\nsys.exit(3)\n", "exit code 3 of train.py", id="exit_code"),
        pytest.param(
            "python train.py; true", "import sys\nsys.exit('no data')\n", "SystemExit: no data", id="exit_text"
        ),
        pytest.param("python train.py; true", "exit(3)\n", "exit code 3 of train.py", id="exit_of_site"),
        pytest.param("python train.py; true", "quit('no data')\n", "SystemExit: no data", id="quit_of_site"),
        pytest.param("python train.py; true", "import os\nos._exit(4)\n", "exit code 4 of train.py", id="quick_exit"),
        pytest.param(
            "python train.py; true", "import os\nos.kill(os.getpid(), 9)\n", "ended without a report", id="killed"
        ),
        pytest.param(
            "python train.py; python good.py",
            "import os\nos.abort()\n",
            "ended without a report",
            id="killed_before_another",
        ),
    ],
)
def test_a_python_that_fails_below_a_shell_that_ends_with_0_is_named(
    node: Node, shell: str, script: str, message: str
) -> None:
    event = end_of(node, shell, train=script, good="print(1)\n")
    assert event["exit_code"] == 0
    assert message in event["error"]["message"]


def test_the_first_of_several_pythons_of_a_script_that_failed_is_told(node: Node) -> None:
    waits = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit('ended'))\ntime.sleep(60)\n"
    shell = "python train.py & sleep 1; python waits.py & wait %1; kill %2; wait; exit 1"
    event = end_of(node, shell, train="import time\ntime.sleep(5)\n" + RAISES, waits=waits)
    assert event["failed_child"]["message"] == "RuntimeError: boom"


def test_what_a_script_says_behind_its_failed_python_is_none_of_its_last_words(node: Node) -> None:
    event = end_of(node, "python train.py; echo EXIT=$?; echo done", train="print('no GPU', flush=True)\nexit(42)\n")
    assert event["tail"] == "no GPU\n"


RESTARTS = "import os, subprocess, sys\nsubprocess.run([sys.executable, 'train.py'], env={**os.environ, 'RANK': '0'})\n"


@pytest.mark.parametrize("script", ["sys.exit(256)", "sys.exit(os.system('exit 2'))", "os._exit(256)"])
def test_an_exit_code_of_which_0_arrives_is_named(node: Node, script: str) -> None:
    event = end_of(node, "exec python train.py", train=f"import os, sys\n{script}\n")
    assert event["exit_code"] == 0
    assert event["error"]["message"] in ("exit code 256 of train.py", "exit code 512 of train.py")


@pytest.mark.parametrize("name", ["torchrun", "deepspeed"])
def test_a_launcher_is_not_the_rank_and_judges_its_workers_itself(node: Node, name: str) -> None:
    launcher = node.home / name
    launcher.write_text(RESTARTS)
    event = end_of(node, f"python {launcher}; true", train=RAISES)
    assert (event["exit_code"], event["error"]) == (0, None)


REDIRECTS = """import os, subprocess, sys
folder = os.path.join(os.path.dirname(__file__), "logs")
os.mkdir(folder)
with open(os.path.join(folder, "stderr.log"), "w") as log:
    env = {**os.environ, "RANK": "0", "TORCHELASTIC_ERROR_FILE": os.path.join(folder, "error.json")}
    subprocess.run([sys.executable, "train.py"], env=env, stderr=log)
"""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(RAISES, "RuntimeError: boom", id="exception"),
        pytest.param("import sys\nsys.exit(3)\n", "SystemExit: 3; its output is in ", id="exit_code"),
        pytest.param("print(1)\n", None, id="well"),
    ],
)
def test_a_worker_of_torchrun_whose_output_is_in_a_file_tells_torchrun_why_it_ended(
    node: Node, script: str, message: str | None
) -> None:
    launcher = node.home / "torchrun"
    launcher.write_text(REDIRECTS)
    end_of(node, f"python {launcher}; true", train=script)
    path = node.home / "logs" / "error.json"
    assert path.exists() == (message is not None)
    if message is not None:
        assert message in json.loads(path.read_text())["message"]["message"]


PROCESS = """
import concurrent.futures, multiprocessing as m, os, subprocess, sys, time
def dies(): os.kill(os.getpid(), 9)
def fails(): raise RuntimeError('NCCL error')
def ends_so(): sys.exit(3)
def passes_on():
    try: fails()
    except RuntimeError: sys.exit(1)
def works(_): raise ValueError('for the parent')
def saves(mode):
    with open('model.pt', mode) as file:
        while True: file.write(b'x' * (1 << 21)); file.flush(); time.sleep(0.2)
if __name__ == '__main__':
    m.set_start_method('METHOD')
    WORK
"""
FUTURE = "x = concurrent.futures.ThreadPoolExecutor(2); "
STARTS = "p = m.Process(target={}); p.start(); p.join()"


@pytest.mark.parametrize(
    ("method", "work", "message"),
    [
        pytest.param("fork", STARTS.format("fails"), "RuntimeError: NCCL error", id="fork"),
        pytest.param("spawn", STARTS.format("fails"), "RuntimeError: NCCL error", id="spawn"),
        pytest.param("forkserver", STARTS.format("fails"), "RuntimeError: NCCL error", id="forkserver"),
        pytest.param("fork", STARTS.format("passes_on"), "RuntimeError: NCCL error", id="as_torch_multiprocessing"),
        pytest.param("fork", STARTS.format("ends_so"), "exit code 3", id="an_exit_code"),
        pytest.param("spawn", STARTS.format("dies"), "SIGKILL", id="killed"),
        pytest.param("fork", STARTS.format("dies"), "SIGKILL", id="killed_fork"),
        pytest.param("forkserver", STARTS.format("dies"), "SIGKILL", id="killed_forkserver"),
        pytest.param("fork", "p = m.Process(target=dies); p.start()", "SIGKILL", id="killed_and_never_joined"),
        pytest.param(
            "fork",
            "e = concurrent.futures.ProcessPoolExecutor(2).submit(dies).exception(); print(e)",
            "SIGKILL",
            id="broken_pool",
        ),
        pytest.param(
            "fork",
            "p = m.Pool(2); p.apply_async(dies); time.sleep(1); p.terminate(); p.join()",
            "SIGKILL",
            id="a_pool_that_replaces_its_worker",
        ),
        pytest.param("fork", "p = m.Pool(2); p.map(abs, range(9)); p.close(); p.join()", None, id="pool"),
        pytest.param("fork", "p = m.Pool(2); p.map(abs, range(9))", None, id="pool_left_open"),
        pytest.param("fork", "p = m.Process(target=time.sleep, args=(60,)); p.start(); p.kill()", None, id="by_kill"),
        pytest.param(
            "fork",
            "p = m.Process(target=time.sleep, args=(60,)); p.start(); os.kill(p.pid, 9); p.join()",
            None,
            id="by_os_kill",
        ),
        pytest.param(
            "fork", "p = m.Process(target=time.sleep, args=(60,), daemon=True); p.start()", None, id="daemon_at_exit"
        ),
        pytest.param(
            "fork",
            "p = m.Process(target=saves, args=('wb',), daemon=True); p.start(); time.sleep(1)",
            "SIGTERM at the end of the rank, while writing",
            id="daemon_that_saves",
        ),
        pytest.param(
            "spawn",
            "p = m.Process(target=saves, args=('ab',), daemon=True); p.start(); time.sleep(1)",
            None,
            id="daemon_that_appends",
        ),
        pytest.param("fork", "with m.Manager() as manager: manager.list([1])", None, id="manager"),
        pytest.param("fork", FUTURE + "x.submit(works, 1)", "future: ValueError: for the parent", id="a_future"),
        pytest.param(
            "fork",
            FUTURE + "y = x.submit(works, 1); x.submit(works, 2); print(y.exception())",
            None,
            id="a_future_that_was_asked_for",
        ),
        pytest.param("fork", "subprocess.run([sys.executable, 'raises.py'])", "ValueError: no data", id="script"),
        pytest.param("fork", "subprocess.run([sys.executable, 'killed.py'])", "SIGKILL", id="script_killed"),
        pytest.param("fork", "subprocess.call('python killed.py || exit 3', shell=True)", "exit code 3", id="text"),
        pytest.param(
            "fork", "subprocess.call('python raises.py | cat', shell=True)", "ValueError: no data", id="below_a_pipe"
        ),
        pytest.param("fork", "os.system('python raises.py')", "ValueError: no data", id="os_system"),
        pytest.param("fork", "os.system('cd . && python usage.py || exit 1')", "SystemExit: 2", id="os_system_usage"),
        pytest.param("fork", "os.system('python good.py')", None, id="os_system_ends_well"),
        pytest.param("fork", "os.system('python usage.py --help >/dev/null')", None, id="os_system_asks_for_help"),
        pytest.param("fork", "subprocess.run([sys.executable, '-c', '1/0'])", None, id="a_question"),
        pytest.param("fork", "subprocess.run(['false'])", None, id="no_python"),
        pytest.param("fork", "subprocess.run([sys.executable, 'good.py'])", None, id="script_ends_well"),
        pytest.param("fork", STARTS.format("print"), None, id="well"),
        pytest.param("spawn", "p = m.Process(target=ends_so); p.start(); p.terminate(); p.join()", None, id="ended"),
        pytest.param(
            "fork",
            "e = concurrent.futures.ProcessPoolExecutor(1).submit(works, 1).exception(); print(e)",
            None,
            id="executor",
        ),
    ],
)
def test_a_process_that_failed_below_a_python_that_ended_with_0_is_told(
    node: Node, method: str, work: str, message: str | None
) -> None:
    train = PROCESS.replace("METHOD", method).replace("WORK", work)
    killed, raises = "import os\nos.kill(os.getpid(), 9)\n", "raise ValueError('no data')\n"
    train = train.replace("python ", f"{sys.executable} ")
    event = end_of(node, "exec python train.py", train=train, killed=killed, raises=raises, usage=USAGE, good="")
    assert (event["exit_code"], event["error"]) == (0, None)
    assert (event["failed_child"] and event["failed_child"]["message"].partition(" /")[0]) == message


def test_the_groups_of_workers_are_told(node: Node) -> None:
    script = (
        "import os\nfor rank in (0, 1):\n"
        "    open(os.environ['CLUSTERCTL_STATUS_DIR'] + f'/rank-{rank}.group.json', 'w').write("
        'f\'{{"address": null, "world_size": 2, "rank": {rank}, "is_joined": true}}\')\n'
    )
    talk = node.launch([sys.executable, "-c", script])
    talk.wait_for("swept")
    assert [(event["ranks"], event["size"]) for event in talk.of("grouped")] == [([0, 1], 2)]


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        pytest.param("python train.py | tee out", "print(1)\n", id="well"),
        pytest.param("python -c 'import no_such_module'; python train.py; true", "print(1)\n", id="a_question_before"),
        pytest.param("python train.py; true", "import sys\nsys.exit(0)\n", id="exit_0"),
        pytest.param("python train.py; true", "exit()\n", id="exit_of_site"),
        pytest.param("python train.py; true", "import os\nos._exit(0)\n", id="quick_exit_0"),
        pytest.param("python train.py; true", "import os\nos.execvp('true', ['true'])\n", id="becomes_another"),
        pytest.param("python train.py; true", "try: raise OSError\nexcept OSError: pass\n", id="caught"),
        pytest.param(
            "python train.py; true",
            "import multiprocessing as m, os\nif __name__ == '__main__':\n"
            " p = m.Process(target=os._exit, args=(5,)); p.start(); p.join()\n",
            id="a_child_that_fails",
        ),
    ],
)
def test_a_python_that_ends_well_below_a_shell_is_no_failure(node: Node, shell: str, script: str) -> None:
    event = end_of(node, shell, train=script)
    assert (event["exit_code"], event["error"]) == (0, None)


IN_A_THREAD = (
    "import threading\ndef f(): raise {}('no such bucket')\nt = threading.Thread(target=f); t.start(); t.join()\n"
)
WORDS = {
    "hydra": (
        "import sys\nprint(\"Could not override 'trainer'.\\nCould not find 'trainer/typo'\\n\\n"
        'Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")\nsys.exit(1)\n'
    ),
    "thread": IN_A_THREAD.format("ValueError") + "print('done')\n",
    "pipe": IN_A_THREAD.format("EOFError") + "print('done')\n",
    "task": (
        "import asyncio\nasync def f(): raise ValueError('no such bucket')\n"
        "async def main(): asyncio.create_task(f()); await asyncio.sleep(0.1)\nasyncio.run(main())\nprint('done')\n"
    ),
    "words": "print('step 1')\nprint('Error during training: CUDA out of memory')\nprint('bye')\n",
    "empty": "print('Found 0 images in /data/val')\nprint('Found 0 images in /data/train')\nprint('step 0')\n",
    "no_data_left": (
        "import warnings\nwarnings.warn('Your input ran out of data; interrupting training. ' + 'x' * 300)\n"
        "for i in range(9): print('Epoch', i)\n"
    ),
    "nan": "print('Loss is nan, stopping training')\nfor i in range(9): print('saved', i)\n",
    "logged": (
        "import logging\nlogging.basicConfig(format='%(asctime)s \\x1b[31m%(levelname)s\\x1b[0m %(message)s')\n"
        "try: raise RuntimeError('CUDA out of memory')\n"
        "except Exception: logging.exception('the loop ended')\nprint('wrote deploy.zip')\n"
    ),
    "fatal": (
        "import traceback\ntry: raise RuntimeError('CUDA error: unspecified launch failure')\n"
        "except Exception: traceback.print_exc()\nprint('saved')\n"
    ),
    "logged_long_ago": (
        "import logging\ntry: 1/0\nexcept Exception: logging.exception('no upload')\n"
        "for i in range(9): print('step', i)\n"
    ),
    "json_log": 'print(\'{"time": "12:00", "level": "error", "message": "no memory"}\')\nprint(\'bye\')\n',
    "metric": "print('Error: 0.12')\nprint('mean error: 1e-3 (0 errors)')\nprint('done')\n",
}
WITH_A_SCRIPT = "bash run.sh"


@pytest.mark.parametrize(
    ("shell", "script", "shell_error", "lacks_python"),
    [
        pytest.param(
            WITH_A_SCRIPT, "torchrun-x train.py\necho done\n", "torchrun-x: command not found", False, id="name"
        ),
        pytest.param(
            WITH_A_SCRIPT,
            "pythonx train.py\npython good.py\n",
            "run.sh: line 1: pythonx: command not found",
            False,
            id="one",
        ),
        pytest.param(
            WITH_A_SCRIPT,
            "/nowhere/torchrun a.py\necho done\n",
            "/nowhere/torchrun: No such file or directory",
            True,
            id="path",
        ),
        pytest.param(WITH_A_SCRIPT, "./data.sh\npython good.py\n", "./data.sh: Permission denied", False, id="mode"),
        pytest.param(WITH_A_SCRIPT, "cd nowhere\npython good.py\n", "cd: nowhere: No such file", False, id="cd"),
        pytest.param(
            WITH_A_SCRIPT, "bash -c 'kill -11 $$'\npython good.py\n", "Segmentation fault", False, id="segfault"
        ),
        pytest.param(WITH_A_SCRIPT, "python no.py\necho done\n", "can't open file", False, id="no_file"),
        pytest.param("exec python asks.py", "", "./nowhere: ", False, id="by_a_wrapper"),
        pytest.param(
            WITH_A_SCRIPT,
            "export PYTHONPATH=$PWD\npython raises.py\necho done\n",
            "RuntimeError: boom",
            False,
            id="an_exception_of_a_python_without_our_shim",
        ),
        pytest.param(
            WITH_A_SCRIPT,
            "python good.py\nPYTHONPATH=. python raises.py | tee log\necho done\n",
            "RuntimeError: boom",
            False,
            id="an_exception_behind_a_python_with_our_shim",
        ),
        pytest.param(
            WITH_A_SCRIPT,
            "PYTHONPATH=. python usage.py --lr 1 | tee log\necho done\n",
            "usage.py: error: unrecognized arguments: --lr 1",
            False,
            id="a_usage_error_of_a_python_without_our_shim",
        ),
        pytest.param(
            WITH_A_SCRIPT,
            "PYTHONPATH=. python hydra.py | tee log\necho uploading\n",
            "Could not override 'trainer'.",
            False,
            id="a_hydra_error_of_a_python_without_our_shim",
        ),
        pytest.param("python thread.py; true", "", "ValueError: no such bucket", False, id="a_thread"),
        pytest.param("python task.py; true", "", "ValueError: no such bucket", False, id="a_task_that_nobody_awaits"),
        pytest.param("python pipe.py; true", "", "", False, id="a_thread_that_lost_its_pipe"),
        pytest.param("python words.py; true", "", "Error during training: CUDA", False, id="an_error_as_last_words"),
        pytest.param("python no_data_left.py; true", "", "Your input ran out of data", False, id="data_ran_out"),
        pytest.param("python nan.py; true", "", "Loss is nan, stopping training", False, id="the_loss_is_nan"),
        pytest.param(
            "python logged.py; true",
            "",
            "the loop ended: RuntimeError: CUDA out of memory",
            False,
            id="logged_at_the_end",
        ),
        pytest.param("python fatal.py; true", "", "RuntimeError: CUDA error", False, id="a_fatal_traceback_at_the_end"),
        pytest.param("python logged_long_ago.py; true", "", "", False, id="logged_long_before_the_end"),
        pytest.param("python json_log.py; true", "", "no memory", False, id="an_error_as_json"),
        pytest.param("python metric.py; true", "", "", False, id="a_metric_as_last_words"),
        pytest.param(
            "python untrained.py; true", "", "`Trainer.fit` stopped: No training batches.", False, id="trained_nothing"
        ),
        pytest.param("python empty.py; true", "", "Found 0 images in /data/train", False, id="no_data"),
        pytest.param("python caught.py; true", "", "", False, id="an_exception_that_was_caught"),
        pytest.param("true || python good.py", "", "", True, id="no_python"),
        pytest.param("ulimit -c 0 X=1 python", "", "", True, id="swallowed"),
        pytest.param(WITH_A_SCRIPT, "true || python good.py\n", "", True, id="no_python_in_the_script"),
        pytest.param(WITH_A_SCRIPT, "python good.py\n", "", False, id="well"),
        pytest.param(
            WITH_A_SCRIPT, "nvidia-smi-x >&2\nmodule load x\npython good.py\n", "nvidia-smi-x", False, id="other"
        ),
        pytest.param(
            WITH_A_SCRIPT, "module load x\nlspci-x || true\npython good.py\n", "lspci-x", False, id="not_asked"
        ),
        pytest.param(WITH_A_SCRIPT, "module load x\nnvtop\npython good.py\n", "", False, id="optional_programs"),
        pytest.param(
            WITH_A_SCRIPT, "sleep 60 &\nkill -9 $!\nwait\npython good.py\n", "", False, id="ended_by_the_script"
        ),
        pytest.param("true # docker run x python a.py", "", "", False, id="python_elsewhere"),
        pytest.param("env -u RANK python good.py", "", "", False, id="python_without_a_rank"),
        pytest.param("echo all done", "", "", False, id="wants_none"),
    ],
)
def test_what_a_shell_said_and_that_no_python_began_is_told_of_a_rank_that_ended_with_0(
    node: Node, shell: str, script: str, shell_error: str, lacks_python: bool
) -> None:
    (node.home / "work").mkdir()
    (node.home / "work/run.sh").write_text(script.replace("python ", f"{shlex.quote(sys.executable)} "))
    (node.home / "work/data.sh").write_text("")
    by_shell = "import os\nos.system('sh -c \"./nowhere a.py; lspci-y\"')\n"
    untrained = "print('`Trainer.fit` stopped: No training batches.')\n"
    caught = "import traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()\nprint('going on')\n"
    files = {**WORDS, "good": "", "asks": by_shell, "raises": RAISES, "untrained": untrained, "caught": caught}
    event = end_of(node, shell, usage=USAGE, **files)
    assert event["exit_code"] == 0
    said = event["shell_error"] or event["output_failure"]
    assert (shell_error in said, bool(said)) == (True, bool(shell_error))
    assert event["lacks_python"] is lacks_python
