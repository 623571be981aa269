"""TCP ports: ports that a run reserves for its workers, and the sockets of this machine.

For each reserved port, a run holds a socket that is bound but does not listen, from `prepare` to the end of the run.
The bind is without SO_REUSEADDR, so that it fails if another run has bound the port. The socket gets SO_REUSEADDR after
the bind, so that a worker can bind the port too: its listening socket also has SO_REUSEADDR.
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
"""The pause between two checks is the time since the first check divided by this number, so later checks are rarer."""


class PortError(Exception):
    """A port cannot be reserved; the message is one line with the port and the reason."""


class ReservedPorts:
    """The ports that a run reserves on this node.

    Attributes:
        attempt_ports: The ports of the present attempt, in the order of the request.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, list[socket.socket]] = {}
        self.attempt_ports: list[int] = []

    def reserve(self, ports: list[int]) -> set[int]:
        """Reserve ports for the present attempt; return those that the run had not reserved before.

        Args:
            ports: Port numbers; 0 stands for any free port.

        Raises:
            PortError: A port is in use. All new ports are released.
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
        self.attempt_ports = numbers
        return set(new)

    def release(self, ports: Iterable[int] | None = None) -> None:
        """Release these ports, by default all."""
        _close_sockets({port: self._sockets.pop(port) for port in set(self._sockets if ports is None else ports)})

    def release_unused(self) -> None:
        """Release the ports that the present attempt does not need."""
        self.release(self._sockets.keys() - set(self.attempt_ports))


def _close_sockets(sockets: dict[int, list[socket.socket]]) -> None:
    for group in sockets.values():
        for sock in group:
            sock.close()


def _bind_name(port: int) -> socket.socket:
    """Bind an abstract socket name, which shows other runs in this network namespace that the port is reserved.

    The name matters only if `_bind_reserved` must share a port with a closing connection. Any user can bind the name.
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
    """Bind a port and its abstract socket name; return both sockets, or only the first if the name is taken."""
    sock, address = _open_socket()
    names: list[socket.socket] = []
    try:
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # If the name is taken, another run has reserved the port. If not, connections of the last attempt may still
            # be closing; a worker can listen in spite of them.
            names.append(_bind_name(port))
            if {state for number, state, _ in list_tcp_sockets() if number == port} != {_TIME_WAIT}:
                raise
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
        else:
            # The port is reserved, even if another user has taken the name.
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
    """Bind a port on all addresses, including IPv6 if the kernel has it.

    Raises:
        OSError: The port is in use, or a supervisor has reserved it.
    """
    sock, address = _open_socket()
    try:
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def describe_port_owner(root: str, port: int) -> str | None:
    """Describe the listener or the connections of a port, from the kernel's socket table; `None` if there is none."""
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
        listening: Yield only listening sockets, which is fast because the kernel lists them first.
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


class PortIntruderCheck:
    """Checks whether users outside the run listen on the ports of an attempt.

    Args:
        ports: Ports to check. If a process of the run listens on a port, later checks skip this port.
        list_run_uids: Returns the uids of all processes of the run; called only if another user listens.
        root: Prefix of /proc.
    """

    def __init__(self, ports: Iterable[int], list_run_uids: Callable[[], set[int | None]], root: str = "/") -> None:
        self._unused = set(ports)
        self._list_run_uids, self._root = list_run_uids, root
        self._since: float | None = None
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether it is time for the next check; `now` is in monotonic seconds."""
        self._since = now if self._since is None else self._since
        return bool(self._unused) and now >= self._next

    def find_intruder(self, now: float) -> str | None:
        """Return a line about a user outside the run who listens on one of the ports, or `None`.

        Root is no intruder, because root starts containers for other users.
        """
        self._next = now + (now - (now if self._since is None else self._since)) / _PAUSE_DIVISOR
        listening = [(p, uid) for p, _, uid in list_tcp_sockets(self._root, listening=True) if p in self._unused]
        self._unused -= {port for port, uid in listening if uid == os.getuid()}
        others = [(port, uid) for port, uid in listening if uid not in (os.getuid(), _ROOT_UID)]
        if not others:
            return None
        run_uids = self._list_run_uids()
        self._unused -= {port for port, uid in others if uid in run_uids}
        for port, uid in others:
            if uid not in run_uids:
                where = f"uid {uid} listens on port {port}, which is reserved for the workers"
                return f"{where}; no process of the run belongs to that user"
        return None
