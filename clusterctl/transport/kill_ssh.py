"""Kills an `ssh` process so that its unsent data never arrives: the process and the send buffers of the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIDFD_GETFD = 438
"""System call number, the same on all architectures (asm-generic/unistd.h); since Linux 5.6."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LINGER_ZERO = struct.pack("ii", 1, 0)


def kill_and_drop_unsent(leader: int) -> None:
    """Kill the process group of a child and its descendants, and reset their connections.

    After a plain kill the kernel still holds sent but unacknowledged data, and delivers it minutes later if a broken
    link
    recovers. If the kernel denies access to the sockets, that remains possible.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGSTOP)
    for pid in _list_process_tree(leader):
        with contextlib.suppress(OSError, AttributeError):
            _discard_unsent(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _list_process_tree(leader: int) -> Iterator[int]:
    yield leader
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{leader}/task/{leader}/children").read_text().split():
            yield from _list_process_tree(int(child))


def _discard_unsent(pid: int) -> None:
    process = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).startswith("socket:"):
                _reset_when_closed(process, int(link.name))
    finally:
        os.close(process)


def _reset_when_closed(process: int, descriptor: int) -> None:
    copied = _LIBC.syscall(ctypes.c_long(_PIDFD_GETFD), *map(ctypes.c_long, (process, descriptor, 0)))
    if copied >= 0:
        with socket.socket(fileno=copied) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
