"""Connections to jump hosts: each is opened once and shared.

Any number of connections may be opened at once: with a limit, dead machines that run into their timeout would delay the
others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """A connection that may break."""

    @property
    def alive(self) -> bool:
        """Whether the connection is usable."""

    def close(self) -> None:
        """Close the connection."""


C = TypeVar("C", bound=Closable)


class ConnectionPool(Generic[C]):
    """Connections by name. The first caller connects; later callers wait for the result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Future[C]] = {}
        self._closed = False

    def get(self, name: str, connect: Callable[[], C], deadline: float) -> C:
        """Return the live connection called `name`.

        Args:
            name: Name of the whole chain up to the host.
            connect: Opens the connection. Its exception is raised in all waiting callers; the next caller tries again.
            deadline: On the monotonic clock.

        Raises:
            TimeoutError: The attempt of another caller did not end before `deadline`.
        """
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            future = self._found.get(name)
            mine = future is None or (future.done() and not _live_connection(future))
            if mine:
                future = self._found[name] = Future()
        assert future is not None
        if mine:
            try:
                future.set_result(connect())
            except BaseException as error:  # All waiting callers get this exception.
                future.set_exception(error)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:
            raise TimeoutError from error

    def close(self) -> None:
        """Close all connections and refuse new ones."""
        with self._lock:
            self._closed = True
            hops = list(self._found.values())
        for future in hops:
            if future.done() and _live_connection(future):
                future.result().close()


def _live_connection(future: Future[C]) -> bool:
    return future.exception() is None and future.result().alive
