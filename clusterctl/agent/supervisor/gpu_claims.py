"""Claims on the GPUs of a machine: each run has a folder in /var/tmp, with a locked file for each device that it holds.

/var/tmp is root's and sticky on every machine: nobody can make it first, and only its owner, or root, can remove what
lies there, or lock such a file for writing. So a file of another user takes a GPU only as long as a process of that
user holds its lock, and what else lies there under such a name takes none. Containers and namespaces that see the same
/var/tmp see the same claims, whatever they see of /proc and /sys.

The lock belongs to the open file, so it lasts as long as a supervisor or a waiter of the run holds the descriptor, and
ends with them, however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import secrets
import stat
import struct
import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import gpus, proc
from clusterctl.agent.node_state import tmpfiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SHARED = "/var/tmp"
PREFIX = "clusterctl-gpus-"
_ROOT = 0
_MAX_NAME_LENGTH = 100
_TRIES = 5
_PAUSE_S = 0.02
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class GpuClaimError(Exception):
    """A GPU is held by another run, or cannot be claimed; one line that says which."""


class GpuClaims:
    """The GPUs that a run holds on this node.

    Args:
        run: The run, as others are told.
        node: Its node.
        shared: Where the folders of all runs lie.
        guards: Return the pids of the run's waiters, which keep claims when a supervisor has died.
        root: Prefix of /dev, /proc and /sys.
    """

    def __init__(
        self, run: str, node: str, shared: str = SHARED, guards: Callable[[], Iterable[int]] = tuple, root: str = ""
    ) -> None:
        self._run, self._node, self._shared = run, node, shared
        self._guards, self._root = guards, root
        self._held: dict[str, int] = {}
        self._folder = ""
        self._folder_locks: list[int] = []

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that hold the locks, for a waiter to keep."""
        return [*self._held.values(), *self._folder_locks]

    @property
    def paths(self) -> list[str]:
        """The lock files that are held."""
        return [os.path.join(self._folder, name) for name in self._held]

    def take(self, indices: Iterable[int]) -> set[str]:
        """Claim devices by index; those that this object holds already stay claimed. Return what is new, for `release`.

        Raises:
            ClaimError: Another run, or another node of this one, holds one of them. Nothing new is then held.
        """
        before = set(self._held)
        names = gpus.list_lock_names(self._root)
        try:
            for index in indices:
                # A place says which GPU only together with the machine: others may see the same folder.
                name = f"{names.get(index, f'gpu-{index}')}-{proc.read_boot_id()}"
                if name not in self._held:
                    self._claim(name, index)
        except OSError as error:
            self.release(set(self._held) - before)
            raise GpuClaimError(f"cannot claim GPUs in {self._shared}: {error.strerror}") from error
        except BaseException:
            self.release(set(self._held) - before)
            raise
        return set(self._held) - before

    def _claim(self, name: str, index: int) -> None:
        """Lock a file of our own first and look at the others then: of two runs at once, one at most gets the GPU."""
        _check_folder(self._shared)
        holder: str | None = None
        for tries in range(_TRIES):
            if not self._folder:
                self._make_folder()
            self._held[name] = self._lock_file(os.path.join(self._folder, name))
            holder = self._holder(name, index)
            if holder is None:
                return
            self.release([name])
            # Two that come at once refuse each other; the first to come again gets it.
            time.sleep(random.uniform(0, _PAUSE_S * (tries + 1)))
        raise GpuClaimError(holder)

    def _make_folder(self) -> None:
        """Make the folder of this run; others see it once it is locked: without, it is one that a run has left."""
        name = f"{PREFIX}{secrets.token_hex(8)}"
        hidden, self._folder = os.path.join(self._shared, f".{name}"), os.path.join(self._shared, name)
        os.mkdir(hidden, 0o700)
        self._folder_locks = tmpfiles.lock_against_cleanup(hidden)
        os.chmod(hidden, 0o711)
        os.rename(hidden, self._folder)

    def _lock_file(self, path: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            with contextlib.suppress(OSError):
                claim = {"run": self._run, "node": self._node, "pid": os.getpid()}
                os.pwrite(fd, json.dumps(claim).encode(), 0)
            os.fchmod(fd, 0o644)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _holder(self, name: str, index: int) -> str | None:
        """Say who else has locked a GPU; what earlier runs of this user left is removed."""
        for entry in sorted(os.listdir(self._shared)):
            folder = os.path.join(self._shared, entry)
            if not entry.startswith(PREFIX) or folder == self._folder or _remove_own(folder):
                continue
            with _open_claim(folder, name) as fd:
                # After a restart of the supervisor the waiters of this very run still hold a lock.
                if fd is not None and _is_locked(fd) and not any(_has_file_open(pid, fd) for pid in self._guards()):
                    return _describe_holder(index, fd, os.path.join(folder, name))
        return None

    def release(self, names: Iterable[str] | None = None) -> None:
        """Give those back; without a word, all of them. What a waiter holds stays its own."""
        for name in set(self._held if names is None else names):
            os.close(self._held.pop(name))
            with _open_claim(self._folder, name) as fd:
                if fd is not None and not _is_locked(fd):
                    os.unlink(os.path.join(self._folder, name))
        if not self._held:
            self._close_folder()

    def _close_folder(self) -> None:
        while self._folder_locks:
            os.close(self._folder_locks.pop())
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
        self._folder = ""


@contextlib.contextmanager
def _open_claim(folder: str, name: str) -> Iterator[int | None]:
    """Open a claim; `None` where there is none: no plain file, one that its owner lets nobody read, or links."""
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        file, above = os.fstat(fd), os.lstat(folder)
        plain = stat.S_ISREG(file.st_mode) and stat.S_ISDIR(above.st_mode) and file.st_uid == above.st_uid
        yield fd if plain else None
    finally:
        os.close(fd)


def _remove_own(folder: str) -> bool:
    """Remove the folder of a run of this user that has ended without doing so."""
    with contextlib.suppress(OSError):
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return False
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
            os.rmdir(folder)
        finally:
            os.close(fd)
        return True
    return False


def _is_locked(fd: int) -> bool:
    """Whether somebody else holds the lock for writing, which nobody but the owner of the file can."""
    asked = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind: int = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _has_file_open(pid: int, fd: int) -> bool:
    """Whether a process has the same file open."""
    wanted, base = os.fstat(fd), f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"{base}/{name}"), wanted):
                    return True
    return False


def _describe_holder(index: int, fd: int, path: str) -> str:
    """Say who holds a GPU: the user whose file is locked, and the run which that user names in it."""
    user, record = os.fstat(fd).st_uid, _read_claim(fd)
    if not record.get("run"):
        owner = proc.find_user_name(user)
        return f"GPU {index} is locked by {owner}, who names no run: as root, `fuser -k {path}` frees it"
    node = f" (node {_format_name(record['node'])})" if record.get("node") else ""
    other = f" of {proc.find_user_name(user)}" if user != os.geteuid() else ""
    return f"GPU {index} is held by run {_format_name(record['run'])}{other}{node}"


def _format_name(value: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:_MAX_NAME_LENGTH])


def _check_folder(folder: str) -> None:
    """See to it that nobody can take a claim away."""
    info = os.lstat(folder)
    remedy = f"as root, `chown root {folder}; chmod 1777 {folder}` mends it"
    if not stat.S_ISDIR(info.st_mode):
        raise GpuClaimError(f"{folder} is not a directory")
    if info.st_uid not in (_ROOT, os.getuid()):
        raise GpuClaimError(f"{folder} belongs to uid {info.st_uid}, who could take claims away: {remedy}")
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise GpuClaimError(f"everybody could take claims away in {folder}: {remedy}")


def _read_claim(fd: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(os.pread(fd, 4096, 0))
        if isinstance(value, dict):
            return value
    return {}
