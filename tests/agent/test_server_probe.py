"""Whether a server of a role answers, tried at real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from clusterctl.agent.facts.server_probe import find_silence


@contextmanager
def serving(answer: bytes, address: str = "127.0.0.1") -> Iterator[int]:
    """A server that gives one answer to each connection; yields its port."""
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize(
    ("answer", "path", "expected"),
    [
        pytest.param(b"", None, None, id="a connection suffices"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nfine", "/health", None, id="well"),
        pytest.param(b"HTTP/1.0 302 Found\r\n\r\n", "/health", None, id="led elsewhere"),
        pytest.param(b"HTTP/1.1 503 Loading\r\n\r\n", "/health", "answers `HTTP/1.1 503 Loading`", id="loading"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", "/", "answers `SSH-2.0-OpenSSH`", id="another protocol"),
        pytest.param(b"", "/", "closes the connection without an answer", id="nothing said"),
    ],
)
def test_a_server(answer: bytes, path: str | None, expected: str | None) -> None:
    with serving(answer) as port:
        assert find_silence("127.0.0.1", port, path, 5.0) == expected


def test_a_port_without_a_server_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert find_silence("127.0.0.1", port, None, 5.0) == "Connection refused"


def test_a_server_that_only_its_node_can_reach_is_named() -> None:
    with serving(b"") as port:
        found = find_silence("127.0.0.2", port, None, 5.0)

    assert found is not None
    assert "the server listens on 127.0.0.1 alone" in found


def test_a_server_that_says_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert find_silence("127.0.0.1", server.getsockname()[1], "/", 0.2) == "timed out"
