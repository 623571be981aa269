from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from clusterctl.config.spec import HostSpec
from clusterctl.errors import ConnectError
from clusterctl.transport.ssh.ssh_options import get_destination
from clusterctl.transport.ssh.underlying_stream import PreDialer

DEADLINE = 10.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE)
        yield listening


@pytest.fixture
def predialer(tmp_path: Path) -> Iterator[PreDialer]:
    (tmp_path / "config").write_text("")
    with closing(PreDialer(str(tmp_path / "config"))) as made:
        yield made


def host_at(port: int) -> HostSpec:
    return HostSpec(name="gpu1", host="127.0.0.1", port=port)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_an_answer_that_was_asked_for_ahead_is_used_once_and_then_asked_for_anew(tmp_path: Path) -> None:
    config, host = tmp_path / "config", HostSpec(name="gpu1", host="gpu1")
    config.write_text("Host gpu1\n  Port 2201\n  ProxyJump gate\n")
    with closing(PreDialer(str(config))) as predialer:
        predialer.prefetch(host, DEADLINE)
        config.write_text("Host gpu1\n  Port 2202\n")
        assert [predialer.resolve_options("gpu1", get_destination(host)).port for _ in range(2)] == [2201, 2202]


def test_a_connection_that_was_made_ahead_is_the_first_that_is_used(
    predialer: PreDialer, server: socket.socket
) -> None:
    host = host_at(server.getsockname()[1])
    predialer.prefetch(host, DEADLINE)
    peer, _ = server.accept()
    with (
        peer,
        closing(
            predialer.open_predialed_stream("gpu1", predialer.resolve_options("gpu1", get_destination(host)), 0.0)
        ) as wire,
    ):
        peer.sendall(b"SSH-2.0-")
        assert wire.recv(8) == b"SSH-2.0-"


def test_a_second_connection_is_a_new_one(predialer: PreDialer, server: socket.socket) -> None:
    host = host_at(server.getsockname()[1])
    predialer.prefetch(host, DEADLINE)
    options = predialer.resolve_options("gpu1", get_destination(host))
    wires = [predialer.open_predialed_stream("gpu1", options, time.monotonic() + DEADLINE) for _ in range(2)]
    peers = [server.accept()[0] for _ in wires]
    assert len({peer.getpeername() for peer in peers}) == 2
    for wire, peer in zip(wires, peers, strict=True):
        wire.close()
        peer.close()


def test_a_connection_that_nobody_asked_for_is_closed_at_the_end(predialer: PreDialer, server: socket.socket) -> None:
    predialer.prefetch(host_at(server.getsockname()[1]), DEADLINE)
    peer, _ = server.accept()
    peer.settimeout(DEADLINE)
    predialer.close()
    with peer:
        assert peer.recv(1) == b""


def test_a_name_that_cannot_be_one_is_refused_when_it_is_needed(predialer: PreDialer) -> None:
    host = HostSpec(name="bad", host="-oProxyCommand=touch")
    predialer.prefetch(host, DEADLINE)
    with pytest.raises(ConnectError, match="is not a host name"):
        predialer.resolve_options("bad", get_destination(host))


def test_a_refused_connection_is_told_of_when_it_is_needed_and_not_tried_twice(predialer: PreDialer) -> None:
    host = host_at(closed_port())
    predialer.prefetch(host, DEADLINE)
    options = predialer.resolve_options("gpu1", get_destination(host))
    with pytest.raises(ConnectError, match="connection refused"):
        predialer.open_predialed_stream("gpu1", options, 0.0)
