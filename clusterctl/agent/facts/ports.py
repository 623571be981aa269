"""Ports: whether one is free here."""

from __future__ import annotations

import errno
import socket

from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_LISTENS = "0A"


def collect(wanted: list[int], root: str = "/") -> dict[str, Any]:
    """Return the group `ports`: each port is bound for a moment on all addresses."""
    return {"ports": [_free(int(port), root) for port in wanted]}


def _free(port: int, root: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"port": port, "free": True, "error": None, "owner": None}
    try:
        bind(port).close()
    except OSError as error:
        entry.update(free=False, error=error.strerror, owner=owner(root, port))
    return entry


def bind(port: int) -> socket.socket:
    """Bind on every address, IPv6 too where the kernel has it.

    A port that a supervisor merely holds is refused, as it would be to the run.

    Raises:
        OSError: It is taken.
    """
    try:
        return _bound(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bound(socket.AF_INET, "", port)


def _bound(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def owner(root: str, port: int) -> str | None:
    """Name the user who holds `port`, from the kernel's socket table, which everybody may read."""
    seen = None
    for number, state, uid in sockets(root):
        if number == port:
            if state == _LISTENS:
                return f"a listener of uid {uid}"
            seen = "connections that are still closing"
    return seen


def sockets(root: str = "/", *, listening: bool = False) -> Iterator[tuple[int, str, int]]:
    """Yield local port, state (`06` is TIME_WAIT) and user of each TCP socket of this network namespace.

    Args:
        root: Prefix of /proc.
        listening: Only those that listen. The kernel has them first, so that is quick however many there are.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(paths.under(root, table)) as file:
                next(file, None)
                for line in file:
                    words = line.split()
                    if listening and words[3] != _LISTENS:
                        break
                    yield int(words[1].rpartition(":")[2], 16), words[3], int(words[7])
        except (OSError, IndexError, ValueError):
            continue


def listeners(root: str = "/") -> Iterator[tuple[int, int]]:
    """Yield port and user of each TCP socket that listens."""
    return ((port, uid) for port, _, uid in sockets(root, listening=True))
