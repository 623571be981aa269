"""Reads the TCP connections of a process and its children from the kernel, and finds those that a thread reads."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import TYPE_CHECKING

from clusterctl.agent.linux.syscalls import read_or_empty

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.agent.protocol.record_types import TcpConnection

_STATES = {
    1: "established",
    2: "syn-sent",
    3: "syn-recv",
    4: "fin-wait",
    5: "fin-wait",
    8: "close-wait",
    9: "last-ack",
    10: "listen",
}
_MAX_DESCRIPTORS, _MAX_TABLE_LINES, _MAX_CONNECTIONS, _MAX_THREADS = 4096, 65536, 128, 256
_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")
_READ_SYSCALLS = {"x86_64": frozenset({0, 19, 45, 47}), "aarch64": frozenset({63, 65, 207, 212})}
"""The numbers of the system calls read, readv, recvfrom and recvmsg, which wait for the descriptor in their first
argument.
"""


def list_tcp_connections(pid: int, children: Iterable[int] = ()) -> list[TcpConnection]:
    """Return the open connections of a process and its children, with the connection for whose data it waits first.

    Sockets on which the processes listen are included. Connections with unanswered retransmissions follow, then
    connections with unacknowledged bytes. The result is incomplete if the agent must not trace a process, because the
    kernel then hides the descriptors.
    """
    inodes = {one: _list_socket_inodes(one) for one in (pid, *children)}
    every = {inode for own in inodes.values() for inode in own.values()}
    if not every:
        return []
    awaited = inodes[pid].get(_find_awaited_descriptor(f"/proc/{pid}"))
    # A child that serves its clients in its main thread counts as a thread of the rank.
    awaited_by_threads = {
        own.get(_find_awaited_descriptor(thread))
        for one, own in inodes.items()
        for thread in _list_threads(one)
        if own and thread != f"/proc/{pid}/task/{pid}"
    }
    sockets: list[TcpConnection] = []
    for line in _read_tcp_lines(pid):
        words = line.split()
        inode, state = words[9], _STATES.get(int(words[3], 16))
        if inode not in every or state is None:
            continue
        (address, port), (peer, peer_port) = _parse_address(words[1]), _parse_address(words[2])
        unacked, unread = (int(part, 16) for part in words[4].split(":"))
        connection: TcpConnection = {
            "address": address,
            "port": port,
            "peer": peer,
            "peer_port": peer_port,
            "state": state,
            "unacked": unacked,
            "unread": unread,
            # Timer 1 runs until a segment is acknowledged. This field counts the expiries of the timer.
            "lost": int(words[6], 16) if words[5].startswith("01") else 0,
            "awaited": inode == awaited,
        }
        if inode in awaited_by_threads:
            connection["awaited_by_thread"] = True
        sockets.append(connection)
    return sorted(
        sockets, key=lambda one: (not one["awaited"], "awaited_by_thread" not in one, -one["lost"], -one["unacked"])
    )[:_MAX_CONNECTIONS]


def _list_socket_inodes(pid: int) -> dict[int | None, str]:
    """Return the inode of each descriptor of a process that is a socket."""
    inodes: dict[int | None, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd")[:_MAX_DESCRIPTORS]:
            with contextlib.suppress(OSError):
                match = _SOCKET_LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}"))
                if match:
                    inodes[int(name)] = match[1]
    return inodes


def _read_tcp_lines(pid: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as file:
            next(file, None)
            for _, line in zip(range(_MAX_TABLE_LINES), file):
                yield line


def _parse_address(text: str) -> tuple[str, int]:
    """Parse an address and port of the kernel's table, which has words of four bytes in the machine's byte order."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    found = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return found[found.rfind(":") + 1 :] if found.startswith("::ffff:") and "." in found else found, int(port, 16)


def _list_threads(pid: int) -> list[str]:
    """Return the folders of the threads of a process in `/proc`."""
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")[:_MAX_THREADS]]
    return []


def _find_awaited_descriptor(thread: str) -> int | None:
    """Return the descriptor from which a thread waits to read; `None` in any other call.

    Args:
        thread: The folder of the thread in `/proc`.
    """
    words = read_or_empty(f"{thread}/syscall", 256).split()
    with contextlib.suppress(ValueError, IndexError):
        if int(words[0]) in _READ_SYSCALLS.get(os.uname().machine, ()):
            return int(words[1], 16)
    return None
