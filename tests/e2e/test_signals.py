"""Signals that were ignored before a command began, as under `nohup` and in the background of a script: they stay so."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.terminal import CTRL_C
from tests.ignoring import ignored
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

READY = "worker is ready"
JOB = {"command": f"grep SigIgn /proc/self/status; echo {READY}; until test -e go; do sleep 0.1; done", "grace": "1s"}
UP = ("up", "--no-health")


def deaf(head: LocalHead, *arguments: str) -> subprocess.Popen[str]:
    """Start a command as `nohup` does, in the background of a script."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "sh", sys.executable, "-m", "clusterctl", *arguments],
        cwd=head.folder,
        env=dict(head.env),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local(JOB)
    return head


@pytest.mark.parametrize("arguments", [UP, ("attach",), ("logs", "-f")], ids=" ".join)
def test_what_ignores_a_signal_from_the_start_goes_on(head: LocalHead, arguments: tuple[str, ...]) -> None:
    if arguments != UP:
        head.start()
    with deaf(head, *arguments) as following:
        assert following.stdout is not None
        wait_for(lambda: READY in following.stdout.readline(), what="the worker's output")
        following.send_signal(signal.SIGINT)
        following.send_signal(signal.SIGHUP)
        (head.folder / "go").touch()

        assert following.wait(30) == 0
    assert head.json("ps", "-a")[0]["state"] == "succeeded"


def test_what_ignores_ctrl_c_is_stopped_gracefully_by_sigterm(head: LocalHead) -> None:
    with deaf(head, *UP) as up:
        assert up.stdout is not None
        wait_for(lambda: READY in up.stdout.readline(), what="the worker's output")
        up.send_signal(signal.SIGTERM)

        assert up.wait(30) == 103
        assert up.stderr is not None
        assert "Ctrl-C again kills" in up.stderr.read()


def test_what_a_command_ignores_no_worker_does(head: LocalHead) -> None:
    (head.folder / "go").touch()
    with deaf(head, *UP) as up:
        shown, _ = up.communicate(timeout=60)
    with deaf(head, "exec", "--", "grep", "SigIgn", "/proc/self/status") as command:
        answered, _ = command.communicate(timeout=60)

    assert ignored(shown.splitlines()[0]) == set()
    assert ignored(answered) == set()


def test_a_terminal_that_is_closed_leaves_the_run_alone_even_if_nobody_hears_of_it(head: LocalHead) -> None:
    with head.terminal(*UP, ignoring=(signal.SIGHUP,)) as screen:
        screen.expect(READY)
        screen.hang_up()

        assert screen.wait() == 0
    assert head.json("ps")[0]["state"] == "running"
    assert head.run("down").returncode == 0


def test_top_heeds_ctrl_c_only_where_it_is_not_ignored(head: LocalHead) -> None:
    head.start()
    with head.terminal("top", "--interval", "0.1s", ignoring=(signal.SIGINT,)) as screen:
        screen.expect("NODE")
        screen.press(CTRL_C)
        before = screen.shown.count("NODE")
        wait_for(lambda: screen.shown.count("NODE") > before + 2, what="two more pictures")
        screen.press("q")

        assert screen.wait() == 0
