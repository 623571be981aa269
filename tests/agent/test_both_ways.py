"""Terminals and connections of an agent: bytes go both ways, each side is bounded, and each ends with its session."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.commands import WINDOW_BYTES, Command
from tests.agent.conftest import gone
from tests.agent.talk import Refused

if TYPE_CHECKING:
    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

SIZE = {"term": "xterm", "rows": 24, "columns": 80}


def taken(talk: Talk, stream: int) -> int:
    """How many of our bytes the agent has taken in a stream."""
    return sum(push["bytes"] for push in talk.pushes if push["push"] == "taken" and push["stream"] == stream)


def terminal(talk: Talk, command: str, **more: Any) -> int:
    return talk.post(Command.TERMINAL, argv=["/bin/sh", "-c", command], stream=1, **SIZE, **more)


def test_a_program_has_a_terminal_of_its_own_and_its_end_comes_after_its_last_byte(node: Node) -> None:
    talk = node.talk()

    answer = talk.answer(
        terminal(talk, "test -t 0 && test -t 1 && ps -o tty= -p $$ >&2 && stty size; echo $TERM; exit 4")
    )

    assert answer == {"exit_code": 4, "signal": None}
    tty, size, kind = bytes(talk.data[1]).split(b"\r\n")[:3]
    assert tty.startswith(b"pts/")
    assert (size, kind) == (b"24 80", b"xterm")


def test_a_program_that_a_signal_ended_is_told_by_it(node: Node) -> None:
    talk = node.talk()
    assert talk.answer(terminal(talk, "kill -9 $$")) == {"exit_code": None, "signal": signal.SIGKILL}


def test_what_is_typed_arrives_and_is_acknowledged(node: Node) -> None:
    talk = node.talk()
    number = terminal(talk, "stty -echo; echo ready; read line; echo got $line")
    talk.until(lambda: b"ready" in talk.data.get(1, b""))
    talk.data_frame(1, 0, b"a word\n")

    talk.answer(number)

    assert bytes(talk.data[1]).endswith(b"got a word\r\n")
    assert taken(talk, 1) == len(b"a word\n")


def test_no_more_than_a_window_is_sent_until_more_is_taken(node: Node) -> None:
    talk, size = node.talk(), 3 * WINDOW_BYTES
    number = terminal(talk, f"stty -opost; head -c {size} /dev/zero")
    talk.until(lambda: len(talk.data.get(1, b"")) == WINDOW_BYTES)
    talk.beat(1)
    talk.until(lambda: talk.beats)
    assert len(talk.data[1]) == WINDOW_BYTES

    talk.post(Command.TAKEN, stream=1, bytes=size)

    assert talk.answer(number)["exit_code"] == 0
    assert len(talk.data[1]) == size


def test_who_sends_more_than_a_window_loses_the_session(node: Node) -> None:
    talk = node.talk()
    terminal(talk, "stty -icanon -echo; echo $$; exec sleep 1000")
    talk.until(lambda: b"\n" in talk.data.get(1, b""))
    pid = int(talk.data[1])

    with contextlib.suppress(BrokenPipeError):
        for offset in range(0, 2 * WINDOW_BYTES, 1 << 15):
            talk.data_frame(1, offset, bytes(1 << 15))

    talk.eventually(lambda: talk.closed)
    talk.eventually(lambda: gone(pid))


def test_a_child_that_keeps_the_terminal_open_does_not_hold_up_the_end(node: Node) -> None:
    talk = node.talk()
    answer = talk.answer(terminal(talk, "sleep 1000 & echo $!; exit 3"))

    assert answer["exit_code"] == 3
    pid = int(talk.data[1])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_terminal_ends_with_its_session(node: Node) -> None:
    talk, other = node.talk(), node.talk()
    terminal(talk, "echo $$; exec sleep 1000")
    talk.until(lambda: b"\n" in talk.data.get(1, b""))
    pid = int(talk.data[1])

    talk.close()

    other.eventually(lambda: gone(pid))


def test_a_size_of_no_terminal_is_no_matter(node: Node) -> None:
    talk = node.talk()
    talk.post(Command.RESIZE, stream=7, rows=1, columns=1)
    talk.post(Command.TAKEN, stream=7, bytes=1)
    assert talk.ask(Command.HELLO)


@pytest.mark.parametrize(
    ("asked", "code", "place"),
    [
        pytest.param({"argv": ["/no/such/program"]}, 127, b"/no/such/program", id="no such program"),
        pytest.param({"argv": ["true"], "cwd": "/no/such/folder"}, 126, b"/no/such/folder", id="no such folder"),
    ],
)
def test_what_cannot_be_run_is_said_at_the_terminal(node: Node, asked: dict[str, Any], code: int, place: bytes) -> None:
    talk = node.talk()

    assert talk.ask(Command.TERMINAL, stream=1, **SIZE, **asked)["exit_code"] == code

    assert place in talk.data[1]


def test_beside_a_rank_that_is_not_there_is_no_terminal(node: Node) -> None:
    talk = node.talk()
    beside = {"run": "r-none", "node": "n", "rank": 0}
    with pytest.raises(Refused, match="r-none") as refused:
        talk.ask(Command.TERMINAL, stream=1, argv=["true"], beside=beside, **SIZE)
    assert refused.value.kind == "not_found"


# --- connections


def test_bytes_of_a_connection_go_both_ways_and_each_way_has_an_end_of_its_own(node: Node) -> None:
    talk = node.talk()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        talk.ask(Command.TUNNEL, host="127.0.0.1", port=listening.getsockname()[1], stream=3)
        there, _ = listening.accept()
    with there:
        talk.data_frame(3, 0, b"to you")
        talk.data_frame(3, 6, b"")
        assert b"".join(iter(lambda: there.recv(100), b"")) == b"to you"
        there.sendall(b"to me")
    talk.until(lambda: bytes(talk.data.get(3, b"")) == b"to me")
    assert talk.ask(Command.HELLO)


def test_a_connection_ends_with_its_session(node: Node) -> None:
    talk = node.talk()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        talk.ask(Command.TUNNEL, host="127.0.0.1", port=listening.getsockname()[1], stream=3)
        there, _ = listening.accept()
    talk.close()
    with there:
        there.settimeout(30)
        assert there.recv(1) == b""


def test_one_that_reads_nothing_holds_up_no_other_command(node: Node) -> None:
    talk = node.talk()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        talk.ask(Command.TUNNEL, host="127.0.0.1", port=listening.getsockname()[1], stream=3)
        there, _ = listening.accept()
    with there:
        for offset in range(0, WINDOW_BYTES, 1 << 15):
            talk.data_frame(3, offset, bytes(1 << 15))
        assert talk.ask(Command.HELLO)


@pytest.mark.parametrize(
    ("host", "kind", "said"),
    [
        pytest.param("127.0.0.1", "refused", "nothing answers at 127.0.0.1:1: Connection refused", id="nobody"),
        pytest.param("gpu01", "bad_request", "`gpu01` is not an IP address", id="a name"),
    ],
)
def test_a_connection_that_cannot_be_made_is_refused(node: Node, host: str, kind: str, said: str) -> None:
    talk = node.talk()
    with pytest.raises(Refused, match=said) as refused:
        talk.ask(Command.TUNNEL, host=host, port=1, stream=3)
    assert refused.value.kind == kind
