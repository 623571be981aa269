"""Ports that a run reserves for its workers: bound but never listening, from prepare to the end of the run.

They are bound without SO_REUSEADDR, so that another run cannot bind them too. They get it right afterwards, so that a
worker, whose listening socket sets it as well, can bind beside us.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from clusterctl.agent.linux import kernel_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Callable


_TIME_WAIT = "06"
_LISTEN = "0A"
_ROOT_UID = 0
_PAUSE_DIVISOR = 20
"""The pause between two checks is the time since the start, divided by this: checks soon become rare."""


class PortError(Exception):
    """A port cannot be reserved; one line with the port and the reason."""


class ReservedPorts:
    """The ports that a run reserves on this node.

    Attributes:
        numbers: The ports of the present attempt, in the order of the request.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, list[socket.socket]] = {}
        self.numbers: list[int] = []

    def reserve(self, ports: list[int]) -> set[int]:
        """Reserve ports (0: any free one that was not reserved before), in this order; return the new ones.

        Raises:
            PortError: A port is in use. No new port is reserved then.
        """
        new: dict[int, list[socket.socket]] = {}
        numbers = []
        try:
            for port in ports:
                sockets = [] if port in self._sockets else _bind_reserved(port)
                number = int(sockets[0].getsockname()[1]) if sockets else port
                numbers.append(number)
                if sockets:
                    sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    new[number] = sockets
        except BaseException:
            _close_sockets(new)
            raise
        self._sockets.update(new)
        self.numbers = numbers
        return set(new)

    def release(self, numbers: Iterable[int] | None = None) -> None:
        """Release these ports; without an argument, all of them."""
        _close_sockets(
            {number: self._sockets.pop(number) for number in set(self._sockets if numbers is None else numbers)}
        )

    def release_unused(self) -> None:
        """Release the ports that the present attempt does not need."""
        self.release(self._sockets.keys() - set(self.numbers))


def _close_sockets(sockets: dict[int, list[socket.socket]]) -> None:
    for group in sockets.values():
        for sock in group:
            sock.close()


def _bind_name(port: int) -> socket.socket:
    """Bind an abstract socket name for a port in this network namespace.

    If `_bind_reserved` must share a port with a closing connection, the name shows whether another run has reserved the
    port. Any user can bind the name, so it counts in that case only.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(f"\0clusterctl-port-{port}")
    except OSError as error:
        sock.close()
        raise PortError(f"port {port} is reserved by another run") from error
    return sock


def _open_socket() -> tuple[socket.socket, str]:
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), ""
    return sock, "::"


def _bind_reserved(port: int) -> list[socket.socket]:
    """Return the socket that is bound to the port, and the socket that is bound to its name."""
    sock, address = _open_socket()
    names: list[socket.socket] = []
    try:
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # If the name is taken, the port is another run's. If not, connections of the last attempt may still be
            # closing, and these do not keep a worker from listening.
            names.append(_bind_name(port))
            if {state for number, state, _ in list_tcp_sockets() if number == port} != {_TIME_WAIT}:
                raise
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
        else:
            # A plain bind reserves the port, whether or not the name is free.
            with contextlib.suppress(PortError):
                names += [_bind_name(port)] if port else []
    except (OSError, PortError) as error:
        _close_sockets({port: [sock, *names]})
        if isinstance(error, PortError):
            raise
        holder = describe_port_owner("/", port) if error.errno == errno.EADDRINUSE else None
        by = f" by {holder}" if holder else ""
        raise PortError(f"port {port} cannot be reserved: {os.strerror(error.errno or 0)}{by}") from error
    return [sock, *names]


def bind_port(port: int) -> socket.socket:
    """Bind a port on every address, including IPv6 if the kernel has it.

    A port that a supervisor has reserved is refused, as it would be for a run.

    Raises:
        OSError: The port is taken.
    """
    sock, address = _open_socket()
    try:
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def describe_port_owner(root: str, port: int) -> str | None:
    """Return the user of a port, from the kernel's socket table, or `None` if the port is free."""
    description = None
    for number, state, uid in list_tcp_sockets(root):
        if number == port:
            if state == _LISTEN:
                return f"a listener of uid {uid}"
            description = "connections that are still closing"
    return description


def list_tcp_sockets(root: str = "/", *, listening: bool = False) -> Iterator[tuple[int, str, int]]:
    """Yield local port, state (`06` is TIME_WAIT) and uid of each TCP socket in this network namespace.

    Args:
        root: Prefix of /proc.
        listening: Only sockets that listen. The kernel lists them first, so this is fast even with many connections.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(kernel_files.join_root(root, table)) as file:
                next(file, None)
                for line in file:
                    words = line.split()
                    if listening and words[3] != _LISTEN:
                        break
                    yield int(words[1].rpartition(":")[2], 16), words[3], int(words[7])
        except (OSError, IndexError, ValueError):
            continue


class IntruderCheck:
    """Looks for other users who listen on the ports of an attempt.

    Args:
        numbers: The ports.
        list_run_uids: Returns the uids of all processes of the run; called only if another user listens.
        root: Prefix of /proc.
    """

    def __init__(self, numbers: Iterable[int], list_run_uids: Callable[[], set[int | None]], root: str = "/") -> None:
        self._open = set(numbers)
        self._list_run_uids, self._root = list_run_uids, root
        self._since: float | None = None
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether it is time for a check; the first call is the start."""
        self._since = now if self._since is None else self._since
        return bool(self._open) and now >= self._next

    def find_intruder(self, now: float) -> str | None:
        """Return a line about a user outside the run who listens on one of the ports, or `None`.

        Root is never an intruder: it may do everything anyway, and it starts containers for others.
        """
        self._next = now + (now - (now if self._since is None else self._since)) / _PAUSE_DIVISOR
        listening = [(p, uid) for p, _, uid in list_tcp_sockets(self._root, listening=True) if p in self._open]
        self._open -= {port for port, uid in listening if uid == os.getuid()}
        others = [(port, uid) for port, uid in listening if uid not in (os.getuid(), _ROOT_UID)]
        if not others:
            return None
        list_run_uids = self._list_run_uids()
        self._open -= {port for port, uid in others if uid in list_run_uids}
        for port, uid in others:
            if uid not in list_run_uids:
                where = f"uid {uid} listens on port {port}, which is reserved for the workers"
                return f"{where}; no process of the run is of that user"
        return None
