"""An exception becomes the same refusal of a request in whichever process of a node it was raised."""

from __future__ import annotations

import select
import socket
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import helper_process
from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.protocol import command_messages, frames
from clusterctl.agent.serve.agent_session import AgentSession
from clusterctl.agent.supervisor.control_server import ControlServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Asked = Callable[[Exception, Path], dict[str, Any]]


def refusal_in(sent: bytes) -> dict[str, Any]:
    (message,) = frames.FrameDecoder().feed(sent)
    assert isinstance(message, dict)
    error: dict[str, Any] = message["error"]
    return error


def in_serve(error: Exception, _place: Path) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    with theirs:

        def fail(*_: object) -> None:
            raise error

        request = command_messages.make_request(1, command_messages.Command.RUNS, {}, None)
        theirs.sendall(frames.encode_message(request))
        theirs.shutdown(socket.SHUT_WR)
        descriptor = ours.detach()
        AgentSession(descriptor, descriptor, 60.0, [lambda _: {command_messages.Command.RUNS: fail}]).loop.run()
        return refusal_in(theirs.recv(1 << 16))


def aside_of_serve(error: Exception, _place: Path) -> dict[str, Any]:
    def fail(_out: object) -> dict[str, Any]:
        raise error

    outcome = helper_process.parse_result(helper_process.run_in_helper(fail, 10.0))
    assert isinstance(outcome, command_messages.RequestError)
    answer: dict[str, Any] = outcome.make_answer(1)["error"]
    return answer


def in_the_supervisor(error: Exception, place: Path) -> dict[str, Any]:
    loop = EventLoop()

    def fail(_frame: dict[str, Any]) -> dict[str, Any]:
        loop.call_later(0.05, loop.stop)
        raise error

    path = str(place / "socket")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as peer:
        listener.bind(path)
        listener.listen()
        ControlServer(loop, fail, lambda _text: None).listen(listener)
        peer.connect(path)
        peer.sendall(frames.encode_message({"id": 1}))
        loop.run()
        assert select.select([peer], [], [], 5.0)[0]
        return refusal_in(peer.recv(1 << 16))


@pytest.mark.parametrize("ask", [in_serve, aside_of_serve, in_the_supervisor])
@pytest.mark.parametrize(
    ("error", "kind", "message", "hint"),
    [
        pytest.param(
            command_messages.make_refused_error("no", "try another"), "refused", "no", "try another", id="a refusal"
        ),
        pytest.param(
            command_messages.make_refused_error("no place", "make one"), "refused", "no place", "make one", id="no root"
        ),
        pytest.param(KeyError("workdir"), "bad_request", "missing 'workdir'", None, id="a name is missing"),
        pytest.param(ValueError("no number"), "bad_request", "no number", None, id="a wrong value"),
        pytest.param(TypeError("no list"), "bad_request", "no list", None, id="a wrong type"),
        pytest.param(frames.FrameError("no frame"), "bad_request", "no frame", None, id="not ours"),
        pytest.param(
            frames.FrameTooLargeError("17 MiB"),
            "failed",
            "the answer cannot be sent: 17 MiB",
            "request less data at once",
            id="big",
        ),
        pytest.param(OSError(28, "No space", "/x"), "failed", "/x: No space", None, id="the system says no"),
        pytest.param(
            AssertionError("oh"), "failed", "the agent failed: AssertionError('oh')", None, id="a mistake of ours"
        ),
    ],
)
def test_an_exception_becomes_the_same_refusal_wherever_it_is_raised(
    ask: Asked, error: Exception, kind: str, message: str, hint: str | None, tmp_path: Path
) -> None:
    assert ask(error, tmp_path) == {"kind": kind, "message": message, "hint": hint}
