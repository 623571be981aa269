"""Ports of this machine behind which ports of a node are."""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.frames import CHUNK_BYTES
from clusterctl.cli.interactive.waker import Waker
from clusterctl.errors import ClusterctlError, NodeError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from clusterctl.session.session import Session
    from clusterctl.session.streams import Duplex

MOST_CONNECTIONS = 512
"""A browser has tens; beyond it new ones wait in the kernel until another has ended."""
_BACKLOG = 64
_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 5
"""How long the loss of a node may stay unseen while nobody uses a port."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A port here and one there.

    Attributes:
        here: Port of this machine; 0 for any free one.
        there: Port of the node.
        host: Where it is, as the node sees it.
    """

    here: int
    there: int
    host: str = _LOOPBACK

    @property
    def beyond(self) -> bool:
        """It is not the node's own port, but of a machine that the node reaches."""
        return self.host != _LOOPBACK


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that waits for connections at a port of this machine.

    Raises:
        RefusedError: It is taken, or may not be had.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = f"choose another port here: `clusterctl forward 0:{port}` takes any that is free"
        raise RefusedError(f"cannot wait at {address}:{port}: {why}", hint=hint) from error
    listening.setblocking(False)
    return listening


class _Connection:
    """One connection that somebody made to a port of ours."""

    def __init__(self, session: Session, forward: Forward, made: socket.socket, wake: Callable[[], None]) -> None:
        self.socket = made
        made.setblocking(False)
        self._stream: Duplex = session.open_duplex(wake)
        self._waiting = b""
        self._sent_all = self._got_all = self._shut = False
        self._opening: Future[None] = session.call_async(
            Command.TUNNEL, {"host": forward.host, "port": forward.there, "stream": self._stream.number}
        )
        self._opening.add_done_callback(lambda _: wake())

    @property
    def wants(self) -> int:
        """What to wait for, as `poll` has it."""
        opened = self._opening.done()
        reads = opened and not self._sent_all and self._stream.room > 0
        return (select.POLLIN if reads else 0) | (select.POLLOUT if self._waiting else 0)

    @property
    def over(self) -> bool:
        """Both sides have said all."""
        return self._sent_all and self._shut

    def move(self, ready: int) -> None:
        """Move what can be moved.

        Raises:
            OSError: Whoever made the connection has gone.
            NodeError: The node was lost.
            ClusterctlError: Nothing answers there.
        """
        if not self._opening.done():
            return
        self._opening.result()
        if ready & (select.POLLIN | select.POLLHUP | select.POLLERR) and not self._sent_all and self._stream.room > 0:
            self._receive()
        while not self._waiting and not self._got_all and (data := self._stream.read()) is not None:
            self._waiting, self._got_all = data, not data
            self._give()
        if ready & select.POLLOUT:
            self._give()
        if self._got_all and not self._waiting and not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(min(CHUNK_BYTES, self._stream.room))
            self._sent_all = not data
            self._stream.send(data)

    def _give(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                count = self.socket.send(self._waiting)
                self._waiting = self._waiting[count:]
                self._stream.taken(count)

    def close(self) -> None:
        """Have nothing more to do with it, on both sides."""
        with contextlib.suppress(NodeError):
            if not self._sent_all and self._opening.done():
                self._stream.send(b"")
        self._stream.forget()
        self.socket.close()


class Ports:
    """Serves connections to ports of ours until it is interrupted.

    Args:
        session: With the node.
        listening: A waiting socket for each forward.
        tell: Takes a word of what went wrong with a connection, each once.
    """

    def __init__(
        self, session: Session, listening: Mapping[socket.socket, Forward], tell: Callable[[str], None]
    ) -> None:
        self._session, self._listening, self._tell = session, listening, tell
        self._connections: dict[int, _Connection] = {}
        self._told: set[str] = set()

    def serve(self) -> None:
        """Serve. Ends with `KeyboardInterrupt`.

        Raises:
            NodeError: The node was lost.
        """
        with Waker() as waker:
            try:
                while True:
                    self._turn(waker)
            finally:
                for connection in self._connections.values():
                    connection.close()

    def _turn(self, waker: Waker) -> None:
        poll = select.poll()
        poll.register(waker.fd, select.POLLIN)
        waiting = {listening.fileno(): listening for listening in self._listening}
        if len(self._connections) < MOST_CONNECTIONS:
            for fd in waiting:
                poll.register(fd, select.POLLIN)
        for fd, connection in self._connections.items():
            # Who wants nothing would be told of a hang-up without end.
            if connection.wants:
                poll.register(fd, connection.wants)
        ready = dict(poll.poll(_LOOK_SECONDS * 1000))
        if waker.fd in ready:
            waker.heard()
        for fd in waiting.keys() & ready.keys():
            self._accept(waiting[fd], waker)
        for fd, connection in list(self._connections.items()):
            self._serve_one(fd, connection, ready.get(fd, 0))
        if not self._session.alive:
            self._session.call(Command.HELLO)  # raises why it was lost

    def _accept(self, listening: socket.socket, waker: Waker) -> None:
        with contextlib.suppress(OSError):
            made, _ = listening.accept()
            connection = _Connection(self._session, self._listening[listening], made, waker.wake)
            self._connections[made.fileno()] = connection

    def _serve_one(self, fd: int, connection: _Connection, ready: int) -> None:
        try:
            connection.move(ready)
            if not connection.over:
                return
        except ClusterctlError as error:
            if not self._session.alive:
                raise
            self._tell_once(str(error))
        except OSError:
            pass
        del self._connections[fd]
        connection.close()

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def parse(words: Iterable[str]) -> list[Forward]:
    """Return what `[HERE:][HOST:]PORT` means, a forward each; a port alone is the same on both sides.

    Raises:
        ValueError: It is something else, with the word.
    """
    return [_parse(word) for word in words]


def _parse(word: str) -> Forward:
    here, colon, rest = word.partition(":")
    host, _, there = rest.rpartition(":") if colon else ("", "", here)
    try:
        ports = int(here), int(there)
    except ValueError:
        raise ValueError(f"`{word}` is no port, nor HERE:PORT or HERE:ADDRESS:PORT") from None
    if not (0 <= ports[0] <= 65535 and 0 < ports[1] <= 65535):
        raise ValueError(f"`{word}` has no port between 1 and 65535")
    return Forward(ports[0], ports[1], _address(host.removeprefix("[").removesuffix("]"), word))


def _address(host: str, word: str) -> str:
    if host in ("", "localhost"):
        return _LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise ValueError(f"`{host}` in `{word}` is no address; nodes look up no names for you") from None
