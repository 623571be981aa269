"""Reads a process's TCP connections from the kernel's tables, and finds the connection for which the process waits."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import TYPE_CHECKING

from clusterctl.agent.linux.syscalls import read_or_empty

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def list_tcp_connections(pid: int) -> list[TcpConnection]:
    """Return the open connections of a process, with the connection for whose data it waits first.

    Sockets on which the process listens are included. Connections with unanswered retransmissions follow, then
    connections with unacknowledged bytes. The result is incomplete if the agent must not trace the process, because
    the kernel then hides the descriptors.
    """
    inodes = _list_socket_inodes(pid)
    if not inodes:
        return []
    waits = _find_awaited_descriptor(f"/proc/{pid}")
    thread_waits = _list_descriptors_awaited_by_threads(pid)
    sockets: list[TcpConnection] = []
    for line in _read_tcp_lines(pid):
        words = line.split()
        fd, state = inodes.get(words[9]), _STATES.get(int(words[3], 16))
        if fd is None or state is None:
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
            "awaited": fd == waits,
        }
        if fd in thread_waits:
            connection["awaited_by_thread"] = True
        sockets.append(connection)
    return sorted(
        sockets, key=lambda one: (not one["awaited"], "awaited_by_thread" not in one, -one["lost"], -one["unacked"])
    )[:_MAX_CONNECTIONS]


def _list_socket_inodes(pid: int) -> dict[str, int]:
    inodes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd")[:_MAX_DESCRIPTORS]:
            with contextlib.suppress(OSError):
                match = _SOCKET_LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}"))
                if match:
                    inodes[match[1]] = int(name)
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


def _list_descriptors_awaited_by_threads(pid: int) -> set[int | None]:
    """Return the descriptors from which threads of a process wait to read, apart from its main thread."""
    threads: list[str] = []
    with contextlib.suppress(OSError):
        threads = [name for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
    return {_find_awaited_descriptor(f"/proc/{pid}/task/{name}") for name in threads[:_MAX_THREADS]}


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
