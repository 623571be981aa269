"""A person before a terminal: keys, a closed terminal, and what the screen shows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.terminal import CTRL_C
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

READY = "worker is ready"
STUBBORN = """\
import signal, sys, time

signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
print("worker is ready", flush=True)
while True:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "stubborn.py").write_text(STUBBORN)
    head.write_local({"command": f"echo {READY}; exec sleep 600", "grace": "1s"})
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    """A run that was started on a terminal and left by `d`."""
    with head.terminal("up", "--no-health") as screen:
        screen.expect(READY)
        screen.expect("following rank 0 of 1")
        screen.press("d")

        assert screen.wait() == 0
        assert "continues" in screen.shown
    (found,) = head.json("ps")
    assert (found["state"], found["attended"]) == ("running", True)
    return str(found["run"])


@pytest.mark.parametrize(
    ("arguments", "shown", "keys", "code"),
    [
        pytest.param(("attach",), READY, "d", 0, id="d-leaves-attach"),
        pytest.param(("attach",), READY, CTRL_C, 0, id="ctrl-c-leaves-attach"),
        pytest.param(("logs", "-f"), READY, CTRL_C, 0, id="ctrl-c-leaves-logs"),
        pytest.param(("wait",), "to end", CTRL_C, 130, id="ctrl-c-interrupts-wait"),
        pytest.param(
            ("exec", "--stream", "--", "sh", "-c", "echo there; sleep 600"),
            "there",
            CTRL_C,
            130,
            id="ctrl-c-interrupts-exec",
        ),
    ],
)
def test_a_key_leaves_what_watches_and_the_run_goes_on(
    head: LocalHead, run: str, arguments: tuple[str, ...], shown: str, keys: str, code: int
) -> None:
    with head.terminal(*arguments) as screen:
        screen.expect(shown)
        screen.press(keys)

        assert screen.wait() == code, screen.shown
    assert head.json("status", run)["state"] == "running"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        pytest.param(("attach",), "following rank 0 of 1", id="attach"),
        pytest.param(("logs", "-f"), READY, id="logs"),
        pytest.param(("top",), "RANK", id="top"),
        pytest.param(("wait",), "to end", id="wait"),
    ],
)
def test_a_terminal_that_is_not_the_controlling_one_is_no_error(
    head: LocalHead, run: str, arguments: tuple[str, ...], shown: str
) -> None:
    with head.terminal(*arguments, is_controlling=False) as screen:
        screen.expect(shown)

        assert "bug" not in screen.shown


def test_up_on_a_terminal_that_is_not_the_controlling_one_follows_the_run_to_its_end(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": f"echo {READY}"})
    with head.terminal("up", "--no-health", is_controlling=False) as screen:
        assert screen.wait() == 0, screen.shown
        assert READY in screen.shown


def test_up_whose_output_cannot_be_shown_names_the_run_that_goes_on(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": f"echo {READY}; exec sleep 600"})
    with open("/dev/full", "w") as full:
        up = subprocess.run(
            [sys.executable, "-m", "clusterctl", "up", "--no-health"],
            cwd=head.folder, env=dict(head.env), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip

    (found,) = head.json("ps")
    assert f"clusterctl down {found['run']}" in up.stderr
    assert "error: cannot write to standard output: No space left on device\nhint: " in up.stderr
    assert up.returncode == 6


def test_wait_gives_up_after_its_timeout(head: LocalHead, run: str) -> None:
    assert head.run("wait", run, "--timeout", "0.1s").returncode == 124


def test_a_terminal_that_is_closed_leaves_the_run_alone(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": f"echo {READY}; exec sleep 600", "grace": "1s"})
    with head.terminal("up", "--no-health") as screen:
        screen.expect(READY)
        screen.hang_up()

        assert screen.wait() == 0
    (found,) = head.json("ps")
    assert (found["state"], found["attended"]) == ("running", True)
    assert not (Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "bug.log").exists()
    assert head.run("down").returncode == 0


def test_the_first_ctrl_c_stops_gracefully_and_the_second_kills(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "stubborn.py").write_text(STUBBORN)
    head.write_local({"script": "stubborn.py", "grace": "100s"})
    with head.terminal("up", "--no-health") as screen:
        screen.expect(READY)
        screen.press(CTRL_C)
        screen.expect("Ctrl-C again kills")
        screen.expect("not yet")
        pressed = time.monotonic()
        screen.press(CTRL_C)

        assert screen.wait() == 103, screen.shown
        assert time.monotonic() - pressed < 20
        assert "killing now" in screen.shown
    assert head.json("ps", "-a")[0]["state"] == "cancelled"


def test_ctrl_c_during_the_start_says_what_it_waited_for_and_leaves_nothing(make_head: MakeHead) -> None:
    head = make_head()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        head.write({"127.0.0.1": 1}, {"command": ["true"]}, defaults={"port": port}, ssh={"connect_timeout": "60s"})
        with head.terminal("up", "--no-health") as screen:
            screen.expect("127.0.0.1  connecting")
            screen.press(CTRL_C)

            assert screen.wait() == 103, screen.shown


def test_a_step_that_is_drawn_again_and_again_leaves_one_line_in_the_history_of_tmux(make_head: MakeHead) -> None:
    head = make_head()
    done = head.folder / "done"
    tmux = ["tmux", "-L", f"clusterctl-{os.getpid()}-{time.monotonic_ns()}", "-f", "/dev/null"]
    # At the top of the screen, as after `clear`.
    shell = f"{sys.executable} -m clusterctl up --no-health; touch {done}; exec sleep 600"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        head.write({"127.0.0.1": 1}, {"command": ["true"]}, defaults={"port": port}, ssh={"connect_timeout": "3s"})
        subprocess.run(
            [*tmux, "new-session", "-d", "-x", "100", "-y", "20", shell],
            cwd=head.folder,
            env=dict(head.env),
            check=True,
        )
        try:
            wait_for(done.exists, what="the end of the start")
            pane = subprocess.run([*tmux, "capture-pane", "-p", "-S", "-"], capture_output=True, text=True, check=True)
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)

    assert sum(" connect " in line for line in pane.stdout.splitlines()) == 1, pane.stdout
