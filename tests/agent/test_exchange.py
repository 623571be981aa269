"""What two nodes find out about the way between them: idle strangers, data both ways, and a way that swallows it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Final

import pytest

from clusterctl.agent.facts import link_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB: Final = 1024
RING: Final = 256 * KIB


class Serving:
    """A listener that serves in a thread."""

    def __init__(self, payload: int = 0, enough: int | None = None) -> None:
        self.listener = link_probe.Listener(0, "secret", payload)
        self.served: list[int] = []
        self._thread = threading.Thread(target=lambda: self.served.append(self.listener.serve(60.0, enough)))
        self._thread.start()

    def end(self) -> int:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.served[0]


def try_it(port: int, payload: int = 0, timeout: float = 20.0) -> dict[str, object]:
    return link_probe.probe_connection("127.0.0.1", port, "secret", timeout, payload)


@contextlib.contextmanager
def strangers(port: int, count: int, say: bytes = b"") -> Iterator[None]:
    """Connections of somebody who knows no nonce and stays."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(say)
        yield


@pytest.mark.parametrize("say", [b"", b"secre"], ids=["silent", "half a line"])
def test_connections_that_say_nothing_keep_no_node_waiting(say: bytes) -> None:
    serving = Serving(enough=3)
    with strangers(serving.listener.port, 6, say):
        found = [try_it(serving.listener.port, timeout=2.0) for _ in range(3)]
    assert [seen["ok"] for seen in found] == [True] * 3, found
    assert serving.end() == 3


def test_more_strangers_than_a_node_has_descriptors_for_do_not_end_it() -> None:
    serving = Serving(enough=1)
    with strangers(serving.listener.port, link_probe.MAX_PEERS + 5):
        assert try_it(serving.listener.port)["ok"]
    assert serving.end() == 1


def test_data_gets_through_both_ways_and_is_counted() -> None:
    serving = Serving(RING, enough=2)
    found = [try_it(serving.listener.port, RING) for _ in range(2)]
    assert [(f["ok"], f["sent"], f["received"], f["source"]) for f in found] == [(True, RING, RING, "127.0.0.1")] * 2
    assert serving.end() == 2


def answering(then: Callable[[socket.socket], object]) -> tuple[int, threading.Thread]:
    """A peer that knows the nonce and then does as it likes."""
    sock = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with sock, sock.accept()[0] as peer:
            peer.recv(100)
            peer.sendall(b"secret\n")
            then(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    return sock.getsockname()[1], thread


def test_what_has_arrived_is_known_even_where_nothing_comes_back() -> None:
    over = threading.Event()

    def swallow(peer: socket.socket) -> None:
        taken = 0
        while taken < RING:
            taken += len(peer.recv(RING))
        over.wait(30)

    port, thread = answering(swallow)
    found = try_it(port, RING, timeout=1.0)
    over.set()
    thread.join(30)

    assert (found["ok"], found["error"], found["sent"], found["received"]) == (False, "timeout", RING, 0)
    assert 0.3 < float(str(found["still"])) <= 1.0


def test_a_peer_that_hangs_up_in_the_middle_is_told_apart_from_a_way_that_is_slow() -> None:
    port, thread = answering(lambda peer: peer.recv(KIB))
    found = try_it(port, RING)
    thread.join(30)
    assert found["error"] == "hung up"
