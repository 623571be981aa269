"""A terminal on a node: what a person types arrives, what is shown comes back, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from tests.documented import typed
from tests.e2e.terminal import CTRL_C
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


def test_ctrl_c_is_for_the_program_there(head: LocalHead) -> None:
    with shell(head, "--", "/bin/sh") as screen:
        say(screen, "echo ready; sleep 600", "\nready")
        screen.press(CTRL_C)
        say(screen, "echo 'after'", "\nafter")
        screen.press("exit\r")

        assert screen.wait() in (0, 130)


def test_the_terminal_there_has_the_size_of_the_one_here_and_follows_it(head: LocalHead) -> None:
    with shell(head, "--", "/bin/sh", columns=90, rows=20) as screen:
        say(screen, "stty size", "\n20 90\n")
        screen.resize(columns=120, rows=33)
        say(screen, "stty size", "\n33 120\n")
        screen.press("exit\r")

        assert screen.wait() == 0


def test_a_megabyte_is_shown_byte_by_byte(head: LocalHead) -> None:
    with shell(head, "--", "sh", "-c", "stty -opost; seq 150000") as screen:
        assert screen.wait() == 0
        assert screen.written.split() == [str(number) for number in range(1, 150001)]


def test_what_is_typed_while_nobody_reads_waits(head: LocalHead) -> None:
    with shell(head, "--", "sh", "-c", "stty -icanon -echo; echo ready; sleep 1; head -c 3000 | wc -c") as screen:
        screen.expect("ready")
        screen.press("x" * 3000)

        assert screen.wait() == 0
        assert "3000" in screen.shown


def test_tilde_and_a_dot_leave_and_end_what_runs_there(head: LocalHead) -> None:
    with shell(head, "--", "/bin/sh") as screen:
        say(screen, "echo pid=$$-; sleep 600", "pid=")
        wait_for(lambda: "-\n" in screen.shown.partition("\npid=")[2], what="the pid")
        pid = int(screen.shown.partition("\npid=")[2].partition("-")[0])
        screen.press("\r~.")

        assert screen.wait() == 130
        assert "localhost.0: left" in screen.shown
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), what="the end of the shell")


def test_a_terminal_that_is_closed_ends_what_runs_there(head: LocalHead) -> None:
    with shell(head, "--", "/bin/sh") as screen:
        say(screen, "echo pid=$$-", "\npid=")
        wait_for(lambda: "-\n" in screen.shown.partition("\npid=")[2], what="the pid")
        pid = int(screen.shown.partition("\npid=")[2].partition("-")[0])
        screen.hang_up()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), what="the end of the shell")


def test_our_terminal_is_as_it_was(head: LocalHead) -> None:
    with shell(head, "--", "true") as screen:
        before = screen.modes
        assert screen.wait() == 0
        assert screen.modes == before


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
        pytest.param(("localhost.0", "--rank", "0"), 2, "only one can be used", id="two targets"),
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
    assert "no terminal" in done.stderr
    assert "clusterctl exec" in done.stderr
