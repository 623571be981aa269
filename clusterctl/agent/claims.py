"""Claims on the GPUs of a machine: one lock file per device, in a folder that all users share.

The lock belongs to the open file, so it lasts as long as a supervisor or a waiter of the run holds the descriptor, and
ends with them, however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from clusterctl.agent import gpus, keeping, proc

if TYPE_CHECKING:
    from collections.abc import Iterable

LOCKS = "/var/tmp/clusterctl-locks"


class ClaimError(Exception):
    """A GPU is held by another run, or cannot be claimed; one line that says which."""


class Claims:
    """The GPUs that a run holds on this node.

    Attributes:
        folder: Descriptors that keep the folder of the locks from who tidies up, while one of them is held.
    """

    def __init__(self, run: str, node: str, folder: str = LOCKS) -> None:
        self._run, self._node, self._place = run, node, folder
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
        names = gpus.lock_names()
        try:
            for index in indices:
                name = names.get(index, f"gpu-{index}")
                if not name.startswith("GPU-"):
                    # An index or a place says which GPU only together with the machine: others may see the same folder.
                    name = f"{name}-{proc.boot_id()}"
                if name not in self._held:
                    self._held[name] = self._lock(name, index)
        except BaseException:
            self.release(set(self._held) - before)
            raise
        if self._held and not self.folder:
            self.folder = keeping.hold(self._place)
        return set(self._held) - before

    def _lock(self, name: str, index: int) -> int:
        fd = _open(self._place, name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _read(fd)
            os.close(fd)
            # After a restart of the supervisor the waiters of this very run still hold the lock.
            if holder.get("run") == self._run and holder.get("node") == self._node:
                return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            raise ClaimError(_held_by(index, holder)) from None
        record = {"run": self._run, "node": self._node, "user": os.getuid(), "pid": os.getpid()}
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(record).encode(), 0)
        return fd

    def release(self, names: Iterable[str] | None = None) -> None:
        """Give those back; without a word, all of them."""
        for name in set(self._held if names is None else names):
            os.close(self._held.pop(name))
        while self.folder and not self._held:
            os.close(self.folder.pop())


def _held_by(index: int, holder: dict[str, Any]) -> str:
    run = holder.get("run", "another run")
    node = f" (node {holder['node']})" if holder.get("node") else ""
    user = holder.get("user")
    other = f" of uid {user}" if user not in (None, os.getuid()) else ""
    return f"GPU {index} is held by run {run}{other}{node}"


def _open(folder: str, name: str) -> int:
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            os.chmod(folder, 0o1777)
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise ClaimError(f"{folder} is not a directory")
        return _open_file(os.path.join(folder, name))
    except OSError as error:
        raise ClaimError(f"cannot claim GPUs in {folder}: {error.strerror}") from error


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
