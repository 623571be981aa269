"""The lock of a run's supervisor, and the socket on which it listens.

The lock allows one supervisor for each run. Lock file and socket lie in the directory of the run, which no other user
may enter. An abstract socket name would not be safe: any user could bind the name before the supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir

_BACKLOG = 64
_LOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of fcntl(2): type, whence, start, length, pid."""


class SupervisorLock:
    """The lock and the listening socket of this process, the supervisor of a run.

    The lock belongs to the process (fcntl(2)), so a fork does not inherit it. The process loses the lock when it closes
    any descriptor of the lock file. No other code of this process may therefore open the file.

    Attributes:
        listener: The listening socket.
    """

    def __init__(self, run: RunDir) -> None:
        """Take the lock and listen on the socket.

        Raises:
            BlockingIOError: Another process has the lock.
            OSError: The lock file or the socket cannot be made.
        """
        self._run = run
        self._lock = _open_lock(run)
        self.listener, self._socket = _open_listener(run)

    def restore(self) -> socket.socket | None:
        """Make the lock file and the socket again if another process has removed them.

        If the whole run directory was removed, do nothing: the run is gone.

        Returns:
            The old listener, which the caller has to close, or `None` if there is no new listener.

        Raises:
            BlockingIOError: Another supervisor has locked a new lock file.
            OSError: A file cannot be made.
        """
        if _read_inode(self._run.path) is None:
            return None
        if _read_inode(self._run.lock_file) != _get_inode(os.fstat(self._lock)):
            lock, self._lock = self._lock, _open_lock(self._run)
            os.close(lock)
        if _read_inode(self._run.socket_path) == self._socket:
            return None
        replaced = self.listener
        self.listener, self._socket = _open_listener(self._run)
        return replaced

    def release(self) -> None:
        """Remove the socket and release the lock."""
        if _read_inode(self._run.socket_path) == self._socket:
            with contextlib.suppress(OSError):
                os.unlink(self._run.socket_path)
        self.listener.close()
        os.close(self._lock)


def connect_to_supervisor(run: RunDir) -> socket.socket | None:
    """Return a connection to the supervisor of a run, or `None` if the run has no supervisor.

    Raises:
        BlockingIOError: The supervisor exists, but its queue of new connections is full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with syscalls.short_socket_path(run.path, os.path.basename(run.socket_path)) as name:
            sock.connect(name)
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            raise
        return None
    return sock


def find_lock_owner(run: RunDir) -> int | None:
    """Return the pid of the process that holds the supervisor lock of a run, or `None`.

    The supervisor must not call this function, because the supervisor would lose its lock.
    """
    try:
        fd = os.open(run.lock_file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    except OSError:
        return None
    finally:
        os.close(fd)
    return answer[4] if answer[0] != fcntl.F_UNLCK and answer[4] > 0 else None


def _open_lock(run: RunDir) -> int:
    fd = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _read_inode(run.lock_file) != _get_inode(os.fstat(fd)):
            raise BlockingIOError(f"{run.lock_file} was replaced")
    except PermissionError as error:
        os.close(fd)
        raise BlockingIOError(str(error)) from error
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_listener(run: RunDir) -> tuple[socket.socket, tuple[int, int] | None]:
    """Replace the socket of an earlier supervisor; return the listening socket and its device and inode number."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(run.socket_path)
        with syscalls.short_socket_path(run.path, os.path.basename(run.socket_path)) as name:
            listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener, _read_inode(run.socket_path)


def _get_inode(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _read_inode(path: str) -> tuple[int, int] | None:
    try:
        return _get_inode(os.lstat(path))
    except OSError:
        return None
