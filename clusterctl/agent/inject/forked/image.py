"""What the kernel shows of a process: its command line, its environment, its name."""

from __future__ import annotations

import ctypes
import os
import struct

from .cannot import CannotForkError

_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_PRIVATE_ANONYMOUS, _READ_WRITE = 0x22, 3
_UNCHANGED = 0xFFFFFFFF
_START_CODE, _END_CODE, _START_STACK, _START_DATA, _END_DATA, _START_BRK = 26, 27, 28, 45, 46, 47
"""Fields of /proc/PID/stat (proc(5))."""
_shown: list[tuple[int, int]] = []
"""Where what is shown lies, and its size, unless the kernel itself has put it there."""


def show(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Have the kernel show these as the process's own, as execve(2) would.

    Raises:
        CannotForkError: This kernel does not let us (it is built without CONFIG_CHECKPOINT_RESTORE).
    """
    words = b"".join(word + b"\0" for word in argv)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in env.items())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
    size = max(1, len(words) + len(variables))
    start = libc.mmap(None, ctypes.c_size_t(size), _READ_WRITE, _PRIVATE_ANONYMOUS, -1, ctypes.c_long(0))
    if start in (None, ctypes.c_void_p(-1).value):
        raise CannotForkError("there is no memory left")
    ctypes.memmove(start, words + variables, len(words) + len(variables))
    middle, end = start + len(words), start + len(words) + len(variables)
    fields = _fields()
    known = [fields[n - 3] for n in (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BRK)]
    numbers = [*known, libc.sbrk(0), fields[_START_STACK - 3], start, middle, middle, end, 0]
    image = struct.pack("@12QII", *numbers, 0, _UNCHANGED)
    held = ctypes.create_string_buffer(image, len(image))
    address = ctypes.c_ulong(ctypes.addressof(held))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, address, ctypes.c_ulong(len(image)), ctypes.c_ulong(0)) != 0:
        why = os.strerror(ctypes.get_errno())
        raise CannotForkError(f"this kernel does not let a fork show its own command line and environment: {why}")
    while _shown:
        place, length = _shown.pop()
        libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(length))
    _shown.append((start, size))


def _fields() -> list[int]:
    with open("/proc/self/stat", "rb") as file:
        found = file.read().rpartition(b")")[2].split()
    return [int(field) if field.lstrip(b"-").isdigit() else 0 for field in found]


def name(text: bytes) -> None:
    """Set what `ps -o comm` shows."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text[:15], 0, 0, 0)
