"""System calls that some Pythons lack, and helpers for processes, sockets, disk space and small files."""

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
"""Numbers of system calls (asm-generic/unistd.h). A Python for an old libc has no functions for these calls."""
_TIMEX_BYTES = 256
"""Size in bytes of a buffer that is larger than any `struct timex` (adjtimex(2))."""
_SIGKILL = 9  # The import of `signal` would take two milliseconds.
_CLONE_NEWUSER = 0x10000000
_KEEP_SIZE = 1
_PUNCH_HOLE = 2


def become_subreaper() -> None:
    """Make this process the new parent of orphaned descendants, so that it can read the exit status of orphans."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_parent_death_signal(signum: int) -> None:
    """Make the kernel send a signal to this process when its parent ends. Do not call this function for workers."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _call_kernel(number: int, *arguments: int) -> int:
    result: int = _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def pidfd_open(pid: int) -> int:
    """Return a pidfd of a process, which becomes readable when the process ends.

    Raises:
        OSError: The process does not exist, or the kernel is older than 5.3 (ENOSYS).
    """
    return _call_kernel(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Send a signal to the process of a pidfd.

    Raises:
        OSError: The process has ended, or belongs to another user.
    """
    _call_kernel(_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def join_namespace(path: str) -> None:
    """Move this process into a namespace, such as `/proc/PID/ns/mnt`.

    Raises:
        OSError: The namespace does not exist, or this user may not join it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(fd, 0) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(fd)


def make_user_namespace() -> None:
    """Move this process into a new user namespace, in which it keeps its user and group, and may change its root.

    Raises:
        OSError: The machine forbids user namespaces to this user.
    """
    uid, gid = os.geteuid(), os.getegid()
    if _LIBC.unshare(_CLONE_NEWUSER) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "wb") as file:
            file.write(text.encode())


def read_boot_time() -> float:
    """Return the seconds since boot, including the time in which the machine was suspended."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError:
        return time.monotonic()


def sleep_interval(seconds: float) -> None:
    """Sleep for an interval. `time.sleep` would sleep until a point in time, which fails with faked clocks in tests."""
    select.select([], [], [], seconds)


def read_clock_error() -> float | None:
    """Return the kernel's estimate of the error of the wall clock in seconds, or `None`.

    Without a time daemon, the estimate grows by 500 ppm, up to 16 s. The flag "unsynchronised" is not usable, because
    chronyd without `rtcsync` leaves the flag set. systemd uses the estimate too (commit bca5a0eacc).
    """
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if _LIBC.adjtimex(timex) < 0:
        return None
    # `struct timex` begins with: unsigned modes; long offset, freq, maxerror
    microseconds: int = struct.unpack_from("@I3l", timex.raw)[3]
    return microseconds / 1e6


def read_peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end of a unix socket.

    Raises:
        OSError: The socket is not a unix socket.
    """
    import socket  # An agent without sockets does not need this import.

    form = struct.Struct("3i")
    pid, uid, _ = form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return pid, uid


def create_memory_file(name: str) -> int:
    """Return a descriptor of a new file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # This Python was built for a libc older than 2.27.
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def fork_with_pipes(count: int = 1) -> tuple[int, ...]:
    """Make `count` pipes and fork; return the pid (0 in the child), then the read end and write end of each pipe.

    Raises:
        OSError: The machine has no free process or descriptor. All new pipes are then closed.
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


def wait_for_exit(pid: int, seconds: float) -> int | None:
    """Reap a child; return its wait status, or `None` if it does not end in time."""
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() >= until:
            return status if ended else None
        sleep_interval(0.002)


def describe_exit(status: int) -> str:
    """Return a wait status in words: `signal 9` or `exit status 1`."""
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"


def set_process_name(name: str) -> None:
    """Set the name of this process that `ps -o comm` shows, at most 15 bytes."""
    _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def set_process_title(title: str) -> None:
    """Set the command line that `ps` shows: overwrite the memory of the arguments, and cut off a longer title."""
    fields = read_or_empty("/proc/self/stat").rpartition(b")")[2].split()
    start, end = (int(fields[45]), int(fields[46])) if len(fields) > 46 else (0, 0)
    if 0 < start < end:
        ctypes.memmove(
            start, title.encode("utf-8", "surrogateescape")[: end - start - 1].ljust(end - start, b"\0"), end - start
        )


@contextlib.contextmanager
def short_socket_path(folder: str, name: str) -> Iterator[str]:
    """Yield a short path of a socket in a folder, because the address of a unix socket has at most 107 bytes.

    Raises:
        OSError: The folder does not exist.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    if _LIBC.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code))


def reserve_blocks(fd: int, offset: int, length: int) -> bool:
    """Reserve disk blocks for `length` bytes from `offset` on, without changing the size of the file.

    Returns:
        False if the filesystem cannot reserve blocks.

    Raises:
        OSError: The disk is full (ENOSPC, EDQUOT) or the file is not writable.
    """
    return _fallocate(fd, _KEEP_SIZE, offset, length)


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Free the disk blocks of a range, which then reads as zeros; return false if the filesystem cannot free blocks."""
    return _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk or the quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomically(path: str, data: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Replace a file, so that readers see the old or the new content; with `durable`, even after a machine crash."""
    # The import of `tempfile` would take long.
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.urandom(6).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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
    """Replace a file by JSON, with `write_atomically`."""
    write_atomically(path, (json.dumps(value, separators=(",", ":")) + "\n").encode())


def read_json(path: str, limit: int = 16 << 20) -> dict[str, Any] | None:
    """Return the JSON object in a file; `None` if the file is missing, invalid, or larger than `limit` bytes."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_or_empty(path: str, limit: int = 1 << 20) -> bytes:
    """Return the first `limit` bytes of a file; no bytes if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def run_program(argv: list[str], timeout_s: float | None = None) -> tuple[int, str, str]:
    """Run a program without input. Return the program's exit code (negative: signal), stdout and stderr.

    `subprocess` is not used, because the import of `subprocess` takes longer than most programs.

    Args:
        argv: The program and its arguments.
        timeout_s: The seconds after which the program is killed; `None` for no limit.

    Raises:
        FileNotFoundError: The program is not on PATH.
    """
    files = [create_memory_file(name) for name in ("stdout", "stderr")]
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(files, 1)),
        ]
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
        status = None if timeout_s is None else wait_for_exit(pid, timeout_s)
        if status is None:
            if timeout_s is not None:
                os.kill(pid, _SIGKILL)
            status = os.waitpid(pid, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        output, errors = (os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace") for fd in files)
        return code, output, errors
    finally:
        for fd in files:
            os.close(fd)
