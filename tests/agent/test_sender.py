"""What goes out on a connection whose other end takes it, or does not."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.spec import HostSpec, TransportKind
from clusterctl.session.sender import Sender
from clusterctl.transport.local import LocalTransport
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOST = HostSpec(name="here", host="here", transport=TransportKind.LOCAL)
FRAME = 64 * 1024
BULK = b"".join(bytes([number]) * FRAME for number in range(64))


class Peer:
    """A process that writes what it is sent into a file, and can be stopped."""

    def __init__(self, folder: Path) -> None:
        self._file, pid = folder / "taken", folder / "pid"
        self.channel = LocalTransport().open(HOST)
        self.channel.send(f"cd {folder} && echo $$ > pid.new && mv pid.new pid && exec cat > taken\n".encode())
        self._pid = int(wait_for(lambda: pid.read_text() if pid.exists() else None))
        wait_for(self._file.exists)

    @property
    def taken(self) -> bytes:
        return self._file.read_bytes()

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def ended(self) -> bool:
        return not os.path.exists(f"/proc/{self._pid}/fd/0")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    found = Peer(tmp_path)
    yield found
    if not found.ended():
        found.resume()
    found.channel.close()


@pytest.fixture
def sender(peer: Peer) -> Iterator[Sender]:
    started = Sender(peer.channel, lambda: b"<beat>", lambda _error: None)
    started.start("sender-of-test")
    yield started
    started.close()


def fill(sender: Sender) -> threading.Thread:
    """Give bulk to a sender whose peer takes none of it, until the thread that gives it has to wait."""
    progress: list[int] = []

    def give() -> None:
        for start in range(0, len(BULK), FRAME):
            sender.put_bulk(BULK[start : start + FRAME])
            progress.append(start)

    thread = threading.Thread(target=give)
    thread.start()
    seen = -1
    while seen != len(progress):
        seen = len(progress)
        thread.join(0.2)
    assert thread.is_alive()
    return thread


def test_nothing_but_bulk_waits_for_a_peer_that_takes_nothing(peer: Peer, sender: Sender) -> None:
    peer.stop()
    bulk = fill(sender)
    for _ in range(1000):
        sender.put(b"<request>")
        sender.send_heartbeat()
    peer.resume()
    bulk.join()
    wait_for(lambda: peer.taken.count(b"<request>") == 1000, what="all requests to arrive")
    wait_for(lambda: peer.taken.replace(b"<request>", b"").replace(b"<beat>", b"") == BULK, what="all bulk to arrive")


def test_a_sign_of_life_goes_before_all_that_waits(peer: Peer, sender: Sender) -> None:
    peer.stop()
    bulk = fill(sender)
    sender.put(b"<request>")
    sender.send_heartbeat()
    peer.resume()
    bulk.join()
    wait_for(lambda: b"<request>" in peer.taken, what="the request to arrive")
    assert peer.taken.count(b"<beat>") == 1
    assert peer.taken.index(b"<beat>") % FRAME == 0
    assert peer.taken.index(b"<beat>") + 2 * FRAME < peer.taken.index(b"<request>")


def test_what_waits_at_the_end_never_arrives_and_nobody_waits_on(peer: Peer, sender: Sender) -> None:
    peer.stop()
    bulk = fill(sender)
    sender.put(b"<request>")
    sender.close()
    bulk.join(15.0)
    assert not bulk.is_alive()
    sender.put(b"<late>")
    peer.channel.close()
    peer.resume()
    wait_for(peer.ended, what="the peer to have read all there is")
    assert b"<request>" not in peer.taken
    assert b"<late>" not in peer.taken
    assert len(peer.taken) < len(BULK)
