"""A slow link for tests: it passes on TCP connections at a bounded rate, late, and stalls or breaks when it is told to.

with Relay((node.address, 22), rate=500_000, delay=0.15) as link:
    ...  # connect to `link.address`, `link.port`
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_CHUNK = 4096
_BUFFER = 64 * 1024
"""Bytes that a socket of the link may hold; as with a real link, most of what waits does so at the sender."""


class _Way:
    """One direction of a link, which all its connections share."""

    def __init__(self, rate: float | None, delay: float) -> None:
        self.delay = delay
        self.passed = 0
        self.going = asyncio.Event()
        self._rate = rate
        self._free_at = 0.0

    def departure(self, size: int, now: float) -> float:
        """Return when the last of `size` bytes has left, after all that came before."""
        self._free_at = max(now, self._free_at) + (size / self._rate if self._rate else 0.0)
        return self._free_at


class Relay:
    """One link: listens on a free port and passes on to `target`. A context manager.

    Args:
        target: Address (IPv4 or IPv6) and port to pass connections on to.
        rate: Bytes per second each way, over all connections; `None`: as fast as can be.
        delay: Seconds that each byte is under way, each way.
        listen: Address to listen on.

    Attributes:
        address: Where it listens.
        port: Where it listens.
    """

    def __init__(
        self, target: tuple[str, int], *, rate: float | None = None, delay: float = 0.0, listen: str = "127.0.0.1"
    ) -> None:
        self._target = target
        self._there, self._back = _Way(rate, delay), _Way(rate, delay)
        self._refusing = False
        self._connections: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server((listen, 0), family=_family(listen))
        _prepare(self._listener)
        self.address = listen
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    @property
    def sent(self) -> int:
        """Bytes that were passed on to the target so far."""
        return self._there.passed

    @property
    def received(self) -> int:
        """Bytes that were passed on from the target so far."""
        return self._back.passed

    def stall(self) -> None:
        """Pass on nothing, either way, and let connections look alive."""
        self._do(self._there.going.clear, self._back.going.clear)

    def resume(self) -> None:
        """Undo `stall`."""
        self._do(self._there.going.set, self._back.going.set)

    def cut(self) -> None:
        """Reset all connections, and every new one until `restore`."""
        self._refusing = True
        self._do(self._end_connections)

    def restore(self) -> None:
        """Take connections again."""
        self._refusing = False

    def __enter__(self) -> Relay:
        self._thread.start()
        self.resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()

    def _do(self, *actions: Callable[[], object]) -> None:
        done = threading.Event()
        for action in (*actions, done.set):
            self._loop.call_soon_threadsafe(action)
        done.wait()

    # --- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        tasks = [accepting, *self._connections]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _end_connections(self) -> None:
        for task in self._connections:
            task.cancel()

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._connection(near))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _connection(self, near: socket.socket) -> None:
        far = socket.socket(_family(self._target[0]))
        try:
            _prepare(near)
            _prepare(far)
            if self._refusing:
                return
            await self._loop.sock_connect(far, self._target)
            await asyncio.gather(self._pass(near, far, self._there), self._pass(far, near, self._back))
        except OSError:
            pass
        finally:
            for sock in (near, far):
                if self._refusing:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()

    async def _pass(self, source: socket.socket, sink: socket.socket, way: _Way) -> None:
        """Read no faster than the link is, and hand on in order what has been under way long enough."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = self._loop.create_task(self._deliver(under_way, sink, way))
        try:
            with contextlib.suppress(OSError):
                while data := await self._loop.sock_recv(source, _CHUNK):
                    await way.going.wait()
                    departure = way.departure(len(data), self._loop.time())
                    under_way.put_nowait((departure + way.delay, data))
                    await asyncio.sleep(departure - self._loop.time())
            under_way.put_nowait((0.0, b""))
            await delivering
        finally:
            delivering.cancel()

    async def _deliver(self, under_way: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, way: _Way) -> None:
        with contextlib.suppress(OSError):
            while True:
                moment, data = await under_way.get()
                await asyncio.sleep(moment - self._loop.time())
                await way.going.wait()
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                way.passed += len(data)
                await self._loop.sock_sendall(sink, data)


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER)
