"""Ports of a node that are reached at this machine: each byte arrives, each end is an end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.documented import typed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import LocalHead, MakeHead

BYTES = 3 << 20


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local({"command": "true"}, workers=(1, 1))
    return head


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None], address: str = "127.0.0.1") -> Iterator[int]:
    """A server on the node (which is this machine): `serve` is called in a thread for each connection."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def forwarded(head: LocalHead, *arguments: str) -> Iterator[tuple[list[int], subprocess.Popen[str]]]:
    """`clusterctl forward`, and the ports that it has here, in the order in which they were asked for."""
    words = [sys.executable, "-m", "clusterctl", *arguments]
    with subprocess.Popen(
        words, cwd=head.folder, env=dict(head.env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            wanted = sum(word[0].isdigit() for word in arguments[1:])
            lines = [process.stdout.readline() for _ in range(wanted)]
            yield [int(line.split()[0].rpartition(":")[2]) for line in lines], process
        finally:
            process.kill()


def digest_and_send_back(connection: socket.socket) -> None:
    """Read to the end, then answer with the digest of it, and the same bytes."""
    with connection:
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        connection.sendall(hashlib.sha256(data).digest() + data)


def conversation(port: int, data: bytes) -> bytes:
    def say() -> None:
        # Whoever ends the connection early hears no more of it.
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        threading.Thread(target=say).start()
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_every_byte_arrives_both_ways_and_each_side_may_end_alone(head: LocalHead) -> None:
    data = os.urandom(BYTES)
    with server(digest_and_send_back) as there, forwarded(head, "forward", f"0:{there}") as ((here,), _):
        assert conversation(here, data) == hashlib.sha256(data).digest() + data


def test_many_connections_are_served_at_once(head: LocalHead) -> None:
    parts = [os.urandom(50_000 + n) for n in range(20)]
    answers: dict[int, bytes] = {}

    def talk(number: int) -> None:
        answers[number] = conversation(here, parts[number])

    with server(digest_and_send_back) as there, forwarded(head, "forward", f"0:{there}") as ((here,), _):
        threads = [threading.Thread(target=talk, args=(number,)) for number in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert answers == {n: hashlib.sha256(part).digest() + part for n, part in enumerate(parts)}


def test_one_that_does_not_read_holds_up_no_other(head: LocalHead) -> None:
    def flood(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(bytes(1 << 16))

    with (
        server(flood) as deaf,
        server(digest_and_send_back) as there,
        forwarded(head, "forward", f"0:{deaf}", f"0:localhost:{there}") as ((deaf_here, here), _),
        socket.create_connection(("127.0.0.1", deaf_here), timeout=60),
    ):
        assert conversation(here, b"x" * 100_000)[32:] == b"x" * 100_000


def test_an_address_of_the_nodes_network_may_be_named(head: LocalHead) -> None:
    with (
        server(digest_and_send_back, "::1") as there,
        forwarded(head, "forward", f"0:[::1]:{there}") as ((here,), _),
    ):
        assert conversation(here, b"six")[32:] == b"six"


def test_where_nothing_answers_the_connection_ends_and_a_word_is_said_once(head: LocalHead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()[1]
    with forwarded(head, "forward", f"0:{nobody}") as ((here,), process):
        assert [conversation(here, b"") for _ in range(3)] == [b""] * 3
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)

    assert said.count(f"nothing answers at 127.0.0.1:{nobody}: Connection refused") == 1


def test_ctrl_c_ends_it_well_and_its_connections_with_it(head: LocalHead) -> None:
    ended = threading.Event()

    def wait_for_the_end(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"hello")
            while connection.recv(1):
                pass
        ended.set()

    with (
        server(wait_for_the_end) as there,
        forwarded(head, *typed("clusterctl forward 8080:80 --node NODE", NODE="localhost.1", **{"8080:80": f"0:{there}"}))
        as ((here,), process),
        socket.create_connection(("127.0.0.1", here), timeout=60) as connection,
    ):  # fmt: skip
        assert connection.recv(5) == b"hello"
        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 0
        assert connection.recv(1) == b""
        assert ended.wait(60)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(("x",), 2, "`x` is no port", id="no port"),
        pytest.param(("70000",), 2, "no port between 1 and 65535", id="beyond all ports"),
        pytest.param(("0:0",), 2, "no port between 1 and 65535", id="any port there"),
        pytest.param(("0:gpu01:1",), 2, "`gpu01` in `0:gpu01:1` is no address", id="a name"),
        pytest.param(("0:1", "--node", "nowhere"), 102, "no node `nowhere`", id="no such node"),
        pytest.param(("0:1", "--bind", "192.0.2.1"), 6, "cannot wait at 192.0.2.1:0", id="no address of ours"),
    ],
)
def test_what_cannot_be_forwarded_is_said(head: LocalHead, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = head.run("forward", *arguments)

    assert done.returncode == code
    assert said in done.stderr


def test_a_port_of_this_machine_is_not_forwarded_to_itself(head: LocalHead) -> None:
    done = head.run(*typed("clusterctl forward 6006"))

    assert done.returncode == 6
    assert "localhost.0 is this machine" in done.stderr


def test_a_port_that_is_taken_here_is_named(head: LocalHead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = head.run("forward", f"{port}:1")

    assert done.returncode == 6
    assert f"cannot wait at 127.0.0.1:{port}: Address already in use" in done.stderr
