"""The slow link that other tests rely on: its rate, its delay, and what stalling and cutting look like."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.lab.waiting import wait_for
from tests.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE = 15.0


@pytest.fixture(params=["127.0.0.1", "::1"])
def echo(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Address and port of a server that says back what it hears."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    server = socket.create_server((request.param, 0), family=family)

    def serve() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    yield request.param, server.getsockname()[1]
    thread.join(DEADLINE)
    server.close()


def dial(link: Relay) -> socket.socket:
    return socket.create_connection((link.address, link.port), timeout=DEADLINE)


def test_a_byte_takes_the_delay_each_way(echo: tuple[str, int]) -> None:
    with Relay(echo, delay=0.2) as link, dial(link) as sock:
        before = time.monotonic()
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        assert 0.4 <= time.monotonic() - before < 2.0


def test_bytes_pass_at_the_rate_and_the_sender_waits(echo: tuple[str, int]) -> None:
    data = bytes(range(256)) * 4000
    with Relay(echo, rate=1_000_000) as link, dial(link) as sock:
        before = time.monotonic()
        sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        got = b"".join(iter(lambda: sock.recv(65536), b""))
        assert got == data
        assert 1.0 <= time.monotonic() - before < 4.0
        sender.join(DEADLINE)


def test_a_stalled_link_passes_nothing_until_it_goes_on(echo: tuple[str, int]) -> None:
    with Relay(echo) as link, dial(link) as sock:
        link.stall()
        sock.sendall(b"x")
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        link.resume()
        sock.settimeout(DEADLINE)
        assert sock.recv(1) == b"x"
        assert (link.sent, link.received) == (1, 1)


def test_a_cut_link_resets_connections_until_it_is_restored(echo: tuple[str, int]) -> None:
    with Relay(echo) as link:
        with dial(link) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            link.cut()
            wait_for(lambda: _is_reset(sock), what="the connection to be reset")
        with pytest.raises(OSError, match="reset"), dial(link) as sock:
            sock.recv(1)
        link.restore()


def _is_reset(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
