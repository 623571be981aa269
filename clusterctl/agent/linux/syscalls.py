"""System calls that Python 3.9 does not wrap, or not on every build, and small files written whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
"""Numbers of calls, equal on all machines (asm-generic/unistd.h): Pythons built for an old libc do not wrap them."""
_TIMEX_BYTES = 256
"""More than any `struct timex` (adjtimex(2)); `modes` 0 only reads, for which nobody needs a right."""
_KEEP_SIZE = 1
_PUNCH_HOLE = 2


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it sees how they end."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_parent_death_signal(signum: int) -> None:
    """Ask the kernel for `signum` when the parent of this process ends. For our own helpers only, never for workers."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _call_kernel(number: int, *arguments: int) -> int:
    result: int = _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process, closed on exec; readable once it has ended.

    Raises:
        OSError: There is no such process, or the kernel is older than 5.3 (ENOSYS).
    """
    return _call_kernel(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Send a signal to the process of a descriptor.

    Raises:
        OSError: It is gone, or may not be signalled.
    """
    _call_kernel(_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def read_boot_time() -> float:
    """Return the seconds since boot, those in which the machine slept too; without them where a libc does not tell."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError:
        return time.monotonic()


def sleep_interval(seconds: float) -> None:
    """Do nothing for a while: not `time.sleep`, which sleeps until a moment, and fails where the clocks are faked."""
    select.select([], [], [], seconds)


def read_clock_error() -> float | None:
    """Return by how much the wall clock may be wrong, in seconds, as the kernel has it; `None` where it does not say.

    It grows by 500 ppm up to 16 s, which means that nobody keeps the clock. systemd goes by this number too: chronyd
    without `rtcsync` keeps a clock that has the flag of an unsynchronised one (systemd, commit bca5a0eacc).
    """
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if _LIBC.adjtimex(timex) < 0:
        return None
    # unsigned modes; long offset, freq, maxerror
    microseconds: int = struct.unpack_from("@I3l", timex.raw)[3]
    return microseconds / 1e6


def read_peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid (as it is called here) and uid of the process at the other end of a unix socket.

    Raises:
        OSError: It is no unix socket.
    """
    import socket  # whoever holds one has imported it; a start of an agent need not

    form = struct.Struct("3i")
    pid, uid, _ = form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return pid, uid


def create_memory_file(name: str) -> int:
    """Return a descriptor of a new file that has no place and is closed on exec."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # A Python that was built for a libc older than 2.27, whatever runs here.
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def fork_with_pipes(count: int = 1) -> tuple[int, ...]:
    """Fork, with pipes to the child; return the pid (0 in the child), and each pipe's end to read and end to write.

    Raises:
        OSError: No process or no descriptor is to be had. Nothing then stays open.
    """
    ends: list[int] = []
    try:
        for _ in range(count):
            ends += os.pipe2(os.O_CLOEXEC)
        return (os.fork(), *ends)
    except OSError:
        for fd in ends:
            os.close(fd)
        raise


def set_process_name(name: str) -> None:
    """Set what `ps -o comm` shows (15 bytes)."""
    _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def set_process_title(title: str) -> None:
    """Set what `ps` shows as command line: the memory that held our arguments is overwritten, as far as it goes."""
    fields = read_bytes("/proc/self/stat").rpartition(b")")[2].split()
    start, end = (int(fields[45]), int(fields[46])) if len(fields) > 46 else (0, 0)
    if 0 < start < end:
        ctypes.memmove(
            start, title.encode("utf-8", "surrogateescape")[: end - start - 1].ljust(end - start, b"\0"), end - start
        )


@contextlib.contextmanager
def short_socket_path(folder: str, name: str) -> Iterator[str]:
    """Yield a short name of a socket in a folder: an address has room for 107 bytes, whatever a path has.

    Raises:
        OSError: There is no such folder.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    result = _LIBC.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def reserve_blocks(fd: int, offset: int, length: int) -> bool:
    """Reserve disk blocks for `length` bytes from `offset` on, without changing the size of the file.

    Returns:
        False where the filesystem cannot do that.

    Raises:
        OSError: The disk is full (ENOSPC, EDQUOT) or the file is not writable.
    """
    try:
        _fallocate(fd, _KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give the blocks of a range back to the filesystem; it then reads as zeros. False where that is not possible."""
    try:
        _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def is_disk_full(error: OSError) -> bool:
    """Whether an error means that no space is left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomically(path: str, data: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Put a file in place so that a reader sees all of it or what was there before; `durable`: after a crash too."""
    import tempfile  # which imports half of the standard library

    fd, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
    try:
        try:
            os.fchmod(fd, mode)
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str, value: Any) -> None:
    """Put a JSON file in place as a whole."""
    write_atomically(path, (json.dumps(value, separators=(",", ":")) + "\n").encode())


def read_json(path: str, limit: int = 16 << 20) -> dict[str, Any] | None:
    """Return the object in a file, or `None` where there is none that can be read, or it has over `limit` bytes."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_bytes(path: str, limit: int = 1 << 20) -> bytes:
    """Return the start of a file, or nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""
