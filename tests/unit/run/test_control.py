"""A controller that ends while it is asked: whoever asks hears that there is none, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.run.controller.control_socket import ChangeSubscription, NoControllerError, send_request
from clusterctl.run.record.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# More than a socket's buffer takes: whoever sends it is still at it when the other end goes.
MUCH = {"places": "x" * 4_000_000}
# A process of its own: closing and sending must be able to happen at the same moment.
SERVER = """\
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
words = sys.argv[2].encode()
print(flush=True)
while True:
    peer, _ = listener.accept()
    if words:
        peer.send(words)
    peer.close()
"""


@pytest.fixture
def ending(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A run whose controller ends whenever it is asked, with these last words."""
    run = RunDir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(run.control_address())
        listener.listen(64)
        argv = [sys.executable, "-c", SERVER, str(listener.fileno()), request.param]
        with subprocess.Popen(argv, pass_fds=[listener.fileno()], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            yield run
            server.kill()


@pytest.mark.parametrize("ending", ["", '{"ok": tr'], indirect=True, ids=["no answer", "half an answer"])
@pytest.mark.parametrize("arguments", [{}, MUCH], ids=["short", "long"])
def test_a_controller_that_goes_while_it_is_asked_is_none(ending: RunDir, arguments: dict[str, str]) -> None:
    for _ in range(50):
        with pytest.raises(NoControllerError):
            send_request(ending, "down", arguments)


@pytest.mark.parametrize("ending", [""], indirect=True, ids=["no answer"])
def test_a_bell_whose_controller_goes_is_silent(ending: RunDir) -> None:
    for _ in range(1000):
        bell = ChangeSubscription(ending)
        assert bell.read_notifications() is False or bell.fileno() is not None
        bell.close()


AS_NOBODY = """\
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
os.setuid(65534)
listener.bind(sys.argv[1].replace("@", chr(0)))
listener.listen()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_name_that_another_user_has_taken_is_no_controller(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    argv = [sys.executable, "-c", AS_NOBODY, run.control_address().replace("\0", "@")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(NoControllerError):
            send_request(run, "down")


def test_the_name_of_a_controller_is_another_each_time_and_those_who_may_read_its_run_know_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    names = [run.create_control_address(), run.create_control_address()]
    assert len({*names, RunDir(tmp_path / "other").control_address()}) == 3
    assert RunDir(tmp_path).control_address() == names[1]
    assert run.control.stat().st_mode & 0o077 == 0
