"""Claims on the GPUs of a machine: a lock for each device, on what the kernel shows of it.

That is a folder of root's: no user can make it first, or remove it under who has it. Where the kernel shows none, it is
a file in a folder that all users share. There every claim is also written down, for whoever is refused to read; what
stands there can be anybody's, and nothing follows from it.

The lock belongs to the open file, so it lasts as long as a supervisor or a waiter of the run holds the descriptor, and
ends with them, however they end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import gpus, proc
from clusterctl.agent.linux.syscalls import read_bytes
from clusterctl.agent.record import keeping

if TYPE_CHECKING:
    from collections.abc import Iterable

LOCKS = "/var/tmp/clusterctl-locks"
_ROOT = 0
_MOST_SHOWN = 100


class ClaimError(Exception):
    """A GPU is held by another run, or cannot be claimed; one line that says which."""


class Claims:
    """The GPUs that a run holds on this node.

    Args:
        run: The run, as others are told.
        node: Its node.
        folder: Where claims are written down.
        guards: Return the pids of the run's waiters, which keep claims when a supervisor has died.
        root: Prefix of /dev, /proc and /sys.

    Attributes:
        folder: Descriptors that keep the folder of the locks from who tidies up, while one of them is held.
    """

    def __init__(
        self, run: str, node: str, folder: str = LOCKS, guards: Callable[[], Iterable[int]] = tuple, root: str = ""
    ) -> None:
        self._run, self._node, self._place = run, node, folder
        self._guards, self._root = guards, root
        self._held: dict[str, int] = {}
        self.folder: list[int] = []

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that hold the locks, for a waiter to keep."""
        return list(self._held.values())

    @property
    def paths(self) -> list[str]:
        """The lock files that are held."""
        return [os.path.join(self._place, name) for name in self._held]

    def take(self, indices: Iterable[int]) -> set[str]:
        """Claim devices by index; those that this object holds already stay claimed. Return what is new, for `release`.

        Raises:
            ClaimError: Another run, or another node of this one, holds one of them. Nothing new is then held.
        """
        before = set(self._held)
        names, places = gpus.lock_names(self._root), gpus.lock_places(self._root)
        try:
            for index in indices:
                name = names.get(index, f"gpu-{index}")
                if not name.startswith("GPU-"):
                    # An index or a place says which GPU only together with the machine: others may see the same folder.
                    name = f"{name}-{proc.boot_id()}"
                if name not in self._held:
                    self._held[name] = self._claim(name, index, places.get(index))
        except BaseException:
            self.release(set(self._held) - before)
            raise
        if self._held and not self.folder:
            self.folder = keeping.hold(self._place)
        return set(self._held) - before

    def _claim(self, name: str, index: int, place: str | None) -> int:
        """Return a descriptor that holds a device."""
        holder = None if place is None else _locked(place)
        try:
            record = _open(self._place, name, common=holder is None)
        except ClaimError:
            if holder is None:
                raise
            record = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        fd, free = holder or (record, _lock(record))
        try:
            if free:
                with contextlib.suppress(OSError):
                    os.ftruncate(record, 0)
                    claim = {"run": self._run, "node": self._node, "user": os.getuid(), "pid": os.getpid()}
                    os.pwrite(record, json.dumps(claim).encode(), 0)
                return os.dup(fd)
            if any(_has(pid, fd) for pid in self._guards()):
                # After a restart of the supervisor the waiters of this very run still hold the lock.
                return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            raise ClaimError(_held_by(index, _holder(fd), _read(record)))
        finally:
            for one in {fd, record}:
                os.close(one)

    def release(self, names: Iterable[str] | None = None) -> None:
        """Give those back; without a word, all of them."""
        for name in set(self._held if names is None else names):
            os.close(self._held.pop(name))
        while self.folder and not self._held:
            os.close(self.folder.pop())


def _locked(place: str) -> tuple[int, bool] | None:
    """Return a descriptor of a folder of the kernel's and whether it is ours now; `None` where it takes no lock."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return fd, _lock(fd)
    except OSError:
        os.close(fd)
        return None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _has(pid: int, fd: int) -> bool:
    """Whether a process has the same file open."""
    wanted, base = os.fstat(fd), f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"{base}/{name}"), wanted):
                    return True
    return False


def _holder(fd: int) -> int | None:
    """Return the pid of who has locked a file, or `None`: it may have ended and left the lock to a child."""
    info = os.fstat(fd)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in read_bytes("/proc/locks", 4 << 20).decode().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5] == place and int(words[4]) > 0 and proc.owner(int(words[4])) is not None:
            return int(words[4])
    return None


def _held_by(index: int, pid: int | None, record: dict[str, Any]) -> str:
    """Say who holds a GPU: the run that says so, if the lock is of that user; else whom the kernel names."""
    user = None if pid is None else proc.owner(pid)
    if not record.get("run") or user not in (None, record.get("user")):
        who, remedy = ("", "") if pid is None else (f" by pid {pid} of uid {user}", ": ending that process frees it")
        return f"GPU {index} is locked{who}, and no run says that it holds it{remedy}"
    node = f" (node {_shown(record['node'])})" if record.get("node") else ""
    other = f" of uid {_shown(record['user'])}" if record.get("user") not in (None, os.getuid()) else ""
    return f"GPU {index} is held by run {_shown(record['run'])}{other}{node}"


def _shown(value: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:_MOST_SHOWN])


def _open(folder: str, name: str, *, common: bool) -> int:
    """Open the file of a device; `common`: it is what is locked, so nobody else may be able to remove it."""
    path = os.path.join(folder, name)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            os.chmod(folder, 0o1777)
        if common:
            _check(folder)
        fd = _open_file(path)
    except OSError as error:
        raise ClaimError(f"cannot claim GPUs in {folder}: {error.strerror}{_whose(path)}") from error
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        os.close(fd)
        raise ClaimError(f"{path} is no plain file with one name{_whose(path)}")
    return fd


def _whose(path: str) -> str:
    """Say to whom what lies in the place of a claim belongs and what mends it; nothing where nothing lies there."""
    try:
        user = os.lstat(path).st_uid
    except OSError:
        return ""
    return f"; it belongs to uid {user}: as root, `rm {path}` mends it"


def _check(folder: str) -> None:
    """See to it that nobody can take a claim away."""
    info = os.lstat(folder)
    remedy = f"as root, `rm -r {folder}; install -d -m 1777 {folder}` mends it"
    if not stat.S_ISDIR(info.st_mode):
        raise ClaimError(f"{folder} is not a directory: {remedy}")
    if info.st_uid not in (_ROOT, os.getuid()):
        raise ClaimError(f"{folder} belongs to uid {info.st_uid}, who could take claims away: {remedy}")
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise ClaimError(f"everybody could take claims away in {folder}: {remedy}")


def _open_file(path: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    # With O_CREAT the kernel refuses another user's file in a sticky folder (fs.protected_regular), so it comes second.
    for _ in range(10):
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            pass
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(fd, 0o666)
            return fd
    raise FileNotFoundError(2, "the lock file comes and goes", path)


def _read(fd: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(os.pread(fd, 4096, 0))
        if isinstance(value, dict):
            return value
    return {}
