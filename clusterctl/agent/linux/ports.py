"""Ports that are kept free for the workers: bound, never listening, from prepare to the end of the run.

They are bound without SO_REUSEADDR, so that a second holder is refused, and get it right after, so that a worker (whose
listening socket sets it too) can bind beside us.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING

from clusterctl.agent.facts import ports as facts

if TYPE_CHECKING:
    from collections.abc import Iterable

_TIME_WAIT = "06"


class PortError(Exception):
    """A port cannot be held; one line that says which and why."""


class Ports:
    """The ports that a run holds on this node.

    Attributes:
        numbers: Those of the present attempt, in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[socket.socket]] = {}
        self.numbers: list[int] = []

    def hold(self, wanted: list[int]) -> set[int]:
        """Hold those ports (0: a free one that was not held before), in that order; return those that are new.

        Raises:
            PortError: One of them is in use. Nothing new is then held.
        """
        new: dict[int, list[socket.socket]] = {}
        numbers = []
        try:
            for port in wanted:
                number, sockets = (port, []) if port in self._held else _hold(port)
                numbers.append(number)
                if sockets:
                    new[number] = sockets
        except BaseException:
            _close(new)
            raise
        self._held.update(new)
        self.numbers = numbers
        return set(new)

    def release(self, numbers: Iterable[int] | None = None) -> None:
        """Let those ports go; without a word, all of them."""
        _close({number: self._held.pop(number) for number in set(self._held if numbers is None else numbers)})

    def release_others(self) -> None:
        """Let those go that the present attempt has no use for."""
        self.release(self._held.keys() - set(self.numbers))


def _close(held: dict[int, list[socket.socket]]) -> None:
    for sockets in held.values():
        for sock in sockets:
            sock.close()


def _hold(port: int) -> tuple[int, list[socket.socket]]:
    held = _bind(port)
    held[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return int(held[0].getsockname()[1]), held


def _name(port: int) -> socket.socket:
    """Hold the name of a port in this network namespace: what `_bind` may have to give up to a worn-out connection.

    Anybody can take such a name, so it counts only where there is no better way.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(f"\0clusterctl-port-{port}")
    except OSError as error:
        sock.close()
        raise PortError(f"port {port} is held by another run") from error
    return sock


def _socket() -> tuple[socket.socket, str]:
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), ""
    return sock, "::"


def _bind(port: int) -> list[socket.socket]:
    """Return a socket that is bound to the port, and what holds its name."""
    sock, address = _socket()
    names: list[socket.socket] = []
    try:
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Without its name the port is another run's. With it, a connection of the attempt before may be on its way
            # out still: that does not keep a worker from listening.
            names.append(_name(port))
            if not _only_time_wait(port):
                raise
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
        else:
            # Whoever can bind like this holds the port, whether he gets the name or somebody else has taken it.
            with contextlib.suppress(PortError):
                names += [_name(port)] if port else []
    except (OSError, PortError) as error:
        _close({port: [sock, *names]})
        if isinstance(error, PortError):
            raise
        owner = facts.owner("/", port) if error.errno == errno.EADDRINUSE else None
        by = f" by {owner}" if owner else ""
        raise PortError(f"port {port} cannot be held: {os.strerror(error.errno or 0)}{by}") from error
    return [sock, *names]


def _only_time_wait(port: int) -> bool:
    return {state for number, state, _ in facts.sockets() if number == port} == {_TIME_WAIT}
