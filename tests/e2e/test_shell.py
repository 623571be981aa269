"""`shell` on this machine: folder and environment of the job or of a rank. `tests/lab/test_cli.py` has one through ssh."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from tests.documented import typed
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead
    from tests.e2e.terminal import Terminal

WORKER = "import os, time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "train.py").write_text(WORKER)
    head.write_local(
        {"script": "train.py", "grace": "1s", "prologue": "export SAID=before"},
        workers=(1, 2),
        env={"OF_JOB": "yes", "PS1": "there> "},
    )
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    return head.start()


def shell(head: LocalHead, *arguments: str, **options: object) -> Terminal:
    return head.terminal("shell", *arguments, **options)


def say(screen: Terminal, command: str, answer: str) -> None:
    """Type a command at the prompt of a shell, and wait for its answer."""
    wait_for(lambda: screen.shown.endswith(("# ", "$ ")), what="a prompt")
    screen.press(command + "\r")
    screen.expect(answer)


def test_it_begins_in_the_code_folder_with_environment_and_prologue_of_the_job(head: LocalHead) -> None:
    with shell(head, "localhost.1", "--", "/bin/sh") as screen:
        say(screen, 'echo "<$PWD $OF_JOB $SAID>"', f"<{head.folder} yes before>")
        screen.press("exit 7\r")

        assert screen.wait() == 7


def test_without_a_command_it_is_the_shell_of_the_user(head: LocalHead) -> None:
    with head.terminal(*typed("clusterctl shell NODE", NODE="localhost.0")) as screen:
        say(screen, 'echo "<$0 $(tty)>"', "/dev/pts/")
        screen.press("exit\r")

        assert screen.wait() == 0


def test_a_program_runs_instead_of_the_shell(head: LocalHead) -> None:
    with head.terminal(*typed("clusterctl shell NODE -- htop", NODE="localhost.0", htop="stty"), "size") as screen:
        assert screen.wait() == 0
        assert "30 100" in screen.shown


def test_beside_a_rank_are_its_own_folder_and_environment_but_not_what_makes_it_one_of_the_run(
    head: LocalHead, run: str
) -> None:
    with head.terminal(*typed("clusterctl shell --rank 3", **{"3": "2"}), "--run", run, "--", "/bin/sh") as screen:
        say(screen, 'echo "<$RANK $LOCAL_RANK $WORLD_SIZE $OF_JOB $SAID>"', "<2 1 3 yes before>")
        say(screen, 'echo "<$PWD>"', f"<{head.folder}>")
        say(screen, 'echo "<$CLUSTERCTL_NODE$CLUSTERCTL_STATUS_DIR$TORCHELASTIC_ERROR_FILE$PYTHONPATH>"', "<>")
        say(screen, 'echo "<$CLUSTERCTL_RUN_ID>"', f"<{run}>")
        screen.press("exit\r")

        assert screen.wait() == 0


def test_what_is_started_beside_a_rank_is_no_part_of_its_run(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "train.py").write_text(WORKER)
    head.write_local({"script": "train.py", "grace": "1s"})
    run = head.start()
    with shell(head, "--rank", "0", "--", "/bin/sh") as screen:
        say(screen, "nohup sleep 600 > /dev/null 2>&1 & echo pid=$!-", "\npid=")
        wait_for(lambda: "-\n" in screen.shown.partition("\npid=")[2], what="the pid")
        pid = int(screen.shown.partition("\npid=")[2].partition("-")[0])
        screen.press("exit\r")
        assert screen.wait() == 0

    assert head.run("down", run).returncode == 0
    found = proc.read_stat(pid)
    assert found is not None
    assert not found.is_gone
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(("nowhere",), 102, "no node `nowhere`", id="no such node"),
        pytest.param(("--rank", "77"), 102, "has no rank 77", id="no such rank"),
        pytest.param(("localhost.0", "--rank", "0"), 2, "cannot be used together", id="two targets"),
        pytest.param(("--run", "x"), 2, "`--run` needs `--rank`", id="a run alone"),
        pytest.param(("--", "/no/such/program"), 127, "/no/such/program: No such file", id="no such program"),
    ],
)
def test_what_cannot_be_opened_is_said(
    head: LocalHead, run: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    with shell(head, *arguments) as screen:
        assert screen.wait() == code
        assert said in screen.shown


def test_without_a_terminal_it_is_refused(head: LocalHead) -> None:
    done = head.run("shell", "--", "true")

    assert done.returncode == 6
    assert "not a terminal" in done.stderr
    assert "clusterctl exec" in done.stderr
