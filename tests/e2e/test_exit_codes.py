"""Every exit code that starting, watching and ending a run can have, each by what leads to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.faulty import controller_pid
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

FOREVER: dict[str, Any] = {"command": ["sleep", "600"], "grace": "1s"}
UP = ("up", "--no-health")
UNREACHABLE = ("--set", "hosts=127.0.0.1", "--set", "defaults.port=1")


@pytest.fixture(scope="module")
def idle(make_head: MakeHead) -> LocalHead:
    """A head that nothing runs on when a test is over."""
    head = make_head()
    head.write_local(FOREVER)
    return head


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        pytest.param(0, (*UP, "--command", "true"), "succeeded", id="0-a-run-that-ends-well"),
        pytest.param(0, ("up", "--dry-run"), "", id="0-a-plan"),
        pytest.param(0, ("down",), "nothing to end", id="0-down-without-a-run"),
        pytest.param(2, ("up", "--nonsense"), "No such option", id="2-unknown-option"),
        pytest.param(2, ("wait", "--timeout", "soon"), "--timeout", id="2-no-duration"),
        pytest.param(2, ("up", "--json"), "`--json` needs `-d`", id="2-json-of-a-run-that-goes-on"),
        pytest.param(2, ("logs", "--grep", "("), "is not a regular expression", id="2-no-pattern"),
        pytest.param(3, (*UP, "--set", "job.grace=soon"), "job.grace", id="3-up-with-a-mistake-in-the-file"),
        pytest.param(3, (*UP, "missing.yaml"), "missing.yaml", id="3-up-without-its-file"),
        pytest.param(4, (*UP, *UNREACHABLE), "connection refused", id="4-up-with-a-node-that-refuses"),
        pytest.param(4, (*UP, "-d", *UNREACHABLE), "connection refused", id="4-up-detached-there"),
        pytest.param(4, ("exec", *UNREACHABLE, "--", "true"), "connection refused", id="4-exec-there"),
        pytest.param(5, ("health", *UNREACHABLE), "connection refused", id="5-health-there"),
        pytest.param(
            5, ("up", "--set", "health.expect={python: '2.7'}"), "expected 2.7", id="5-up-with-a-failing-check"
        ),
        pytest.param(7, ("exec", "--", "sh", "-c", "exit 7"), "exit code 7", id="exec-has-the-code-of-the-command"),
        pytest.param(100, (*UP, "--command", "exit 3"), "exit code 3", id="100-a-worker-fails"),
        pytest.param(100, (*UP, "--command", "kill -9 $$"), "SIGKILL", id="100-a-worker-is-killed"),
        pytest.param(102, ("status", "nobody"), "nobody", id="102-status-of-an-unknown-run"),
        pytest.param(102, ("attach",), "no run is active", id="102-attach-without-an-active-run"),
        pytest.param(102, ("attach", "nobody"), "nobody", id="102-attach-to-an-unknown-run"),
        pytest.param(102, ("wait", "nobody"), "nobody", id="102-wait-for-an-unknown-run"),
        pytest.param(102, ("logs", "nobody"), "nobody", id="102-logs-of-an-unknown-run"),
        pytest.param(102, ("down", "nobody"), "nobody", id="102-down-of-an-unknown-run"),
        pytest.param(106, (*UP, "--set", "job.max_duration=1s"), "max_duration of 1 s", id="106-the-time-is-over"),
    ],
)
def test_a_command_ends_with_its_code_and_says_why(
    idle: LocalHead, code: int, arguments: tuple[str, ...], said: str
) -> None:
    if arguments[0] in ("attach", "logs", "wait"):
        assert idle.run(*UP, "--command", "true").returncode == 0

    done = idle.run(*arguments)

    assert done.returncode == code, done.stderr
    assert said in done.stderr + done.stdout


def test_a_bug_of_ours_is_1_and_its_traceback_is_kept(idle: LocalHead) -> None:
    broken = (
        "import sys, types, click\n"
        "from clusterctl.cli import main\n"
        "def fail(): raise ZeroDivisionError('a mistake of ours')\n"
        "module = types.ModuleType('clusterctl.cli.commands.broken')\n"
        "module.command = click.Command('broken', callback=fail)\n"
        "module.__spec__ = __import__('importlib.machinery').machinery.ModuleSpec(module.__name__, None)\n"
        "sys.modules[module.__name__] = module\n"
        "main.COMMANDS['broken'] = main.COMMANDS['ps']\n"
        "main.main(['broken'])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", broken], env=dict(idle.env), capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "a bug of clusterctl: ZeroDivisionError: a mistake of ours" in done.stderr
    log = Path(done.stderr.rpartition("the traceback is in ")[2].strip())
    assert "in fail" in log.read_text()


def test_a_state_folder_that_cannot_be_made_is_refused_in_one_line(idle: LocalHead) -> None:
    done = idle.__class__(idle.folder, {**idle.env, "XDG_STATE_HOME": "/dev/null"}).run(*UP)

    assert done.returncode == 6
    assert done.stderr.startswith("error: ")
    assert "XDG_STATE_HOME" in done.stderr


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_without_a_controller_what_waits_ends_with_101_and_adopting_helps(head: LocalHead) -> None:
    head.write_local(FOREVER)
    run = head.start()
    with head.terminal("attach", run) as attached, head.terminal("logs", "-f", run) as followed:
        os.kill(controller_pid(head, run), signal.SIGKILL)
        wait_for(lambda: not head.json("status", run)["attended"], what="the controller to be gone", every=0.2)
        codes = {
            "attach": attached.wait(),
            "logs -f": followed.wait(),
            "wait": head.run("wait", run).returncode,
            "logs": head.run("logs", run).returncode,
        }
    adopted = head.terminal("attach", "--adopt", run)
    with adopted:
        wait_for(lambda: head.json("status", run)["attended"], what="a new controller", every=0.2)
        ended = head.run("down", run)

        assert adopted.wait() == 103
    assert codes == {"attach": 101, "logs -f": 101, "wait": 101, "logs": 0}
    assert ended.returncode == 0
    assert head.run("wait", run).returncode == 103


def test_a_worker_whose_end_nobody_saw_makes_the_run_lost(head: LocalHead) -> None:
    head.write_local({"command": "exec sleep 600", "grace": "1s"})
    run = head.start()
    worker = int(head.json("status", run)["workers"][0]["pid"])
    waiter = parent(worker)
    supervisor = parent(waiter)

    # While both stand still nobody can see the end; then nobody is left who could have.
    for pid in (supervisor, waiter):
        os.kill(pid, signal.SIGSTOP)
    for pid in (worker, waiter, supervisor):
        os.kill(pid, signal.SIGKILL)
    waited = head.run("wait", run)

    assert waited.returncode == 105, head.run("status", run).stdout
    assert head.json("status", run)["workers"][0]["exit_code"] is None


def test_where_no_rank_runs_any_more_stacks_say_so_and_how_to_close_the_run(head: LocalHead) -> None:
    head.write_local(FOREVER)
    run = head.start()
    worker = int(head.json("status", run)["workers"][0]["pid"])
    os.kill(controller_pid(head, run), signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), what="the worker to be gone")

    done = head.run("stacks", run)

    assert (done.returncode, done.stdout) == (102, "")
    assert f"{run}: no rank runs any more" in done.stderr
    assert f"`clusterctl attach --adopt {run}`" in done.stderr
