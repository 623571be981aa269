"""The handles of a client: the files it knows, and those it has open."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from dataclasses import dataclass

from tests.lab import fuse


class Failure(Exception):
    """A request is refused, with an errno."""

    def __init__(self, number: int) -> None:
        super().__init__(os.strerror(number))
        self.number = number

    @classmethod
    def named(cls, name: str) -> Failure:
        return cls(getattr(errno, name))


@dataclass(slots=True)
class File:
    """A file that the client knows: a handle. `handles` is the `Handles.count` that it is from."""

    descriptor: int
    handles: int
    lookups: int = 0
    opened: int = 0
    hidden: tuple[int, bytes] | None = None

    @property
    def path(self) -> str:
        """A path that is the file itself, whatever became of its name."""
        return f"/proc/self/fd/{self.descriptor}"


@dataclass(slots=True)
class Opened:
    """A file or folder that a process of the client has open."""

    descriptor: int
    node: int
    handles: int
    writable: bool = False
    names: list[tuple[bytes, int, int]] | None = None


class Handles:
    """The handles of one client.

    Attributes:
        count: Counted up, each handle that the client has is stale, but for the folder's itself.
    """

    def __init__(self, folder: str, cache_s: float) -> None:
        self.count = 0
        self._cache = cache_s
        self._files = {fuse.ROOT: File(os.open(folder, os.O_PATH), 0, lookups=1)}
        self._numbers: dict[tuple[int, int], int] = {}
        self._opened: dict[int, Opened] = {}
        self._next = fuse.ROOT

    def file(self, number: int) -> File:
        """Return a file by its handle.

        Raises:
            Failure: it is stale: removed by somebody else, or forgotten by the server.
        """
        file = self._files[number]
        if number != fuse.ROOT and (file.handles != self.count or os.fstat(file.descriptor).st_nlink == 0):
            raise Failure(errno.ESTALE)
        return file

    def opened(self, number: int) -> Opened:
        """The same for an open file."""
        opened = self._opened[number]
        if opened.handles != self.count or os.fstat(opened.descriptor).st_nlink == 0:
            raise Failure(errno.ESTALE)
        return opened

    def known(self, parent: File, name: bytes) -> File | None:
        """The client's handle of a name, if it has one."""
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=parent.descriptor, follow_symlinks=False)
            return self._files.get(self._numbers.get((info.st_dev, info.st_ino), 0))
        return None

    def entry(self, parent: File, name: bytes) -> bytes:
        """Return what the client is told of a name, and count that it was told."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.descriptor)
        info = os.fstat(descriptor)
        number = self._numbers.get((info.st_dev, info.st_ino))
        if number is not None and self._files[number].handles == self.count:
            os.close(descriptor)
        else:
            self._next += 1
            number = self._numbers[info.st_dev, info.st_ino] = self._next
            self._files[number] = File(descriptor, self.count)
        self._files[number].lookups += 1
        return fuse.entry(number, info, self._cache)

    def drop(self, number: int, lookups: int) -> None:
        """Forget what the client does not need any more."""
        file = self._files[number]
        file.lookups -= lookups
        if file.lookups <= 0 and number != fuse.ROOT:
            info = os.fstat(file.descriptor)
            if self._numbers.get((info.st_dev, info.st_ino)) == number:
                del self._numbers[info.st_dev, info.st_ino]
            os.close(self._files.pop(number).descriptor)

    def hide(self, parent: File, name: bytes) -> bool:
        """Rename a file that this client has open instead of removing it, as NFS's clients do, until it is closed."""
        file = self.known(parent, name)
        if file is None or not file.opened or file.hidden:
            return False
        hidden = b".nfs%024x" % os.fstat(file.descriptor).st_ino
        os.rename(name, hidden, src_dir_fd=parent.descriptor, dst_dir_fd=parent.descriptor)
        file.hidden = (os.dup(parent.descriptor), hidden)
        return True

    def open(self, node: int, descriptor: int, flags: int, answer: int = 0) -> bytes:
        """Keep what was opened; return what the client is told."""
        self._opened[descriptor] = Opened(descriptor, node, self.count, writable=bool(flags & os.O_ACCMODE))
        self._files[node].opened += 1
        return struct.pack("<QII", descriptor, answer, 0)

    def close(self, number: int) -> None:
        """Close it, and remove the file if that was put off until now."""
        opened = self._opened.pop(number)
        os.close(opened.descriptor)
        file = self._files[opened.node]
        file.opened -= 1
        if file.hidden and not file.opened:
            folder, name = file.hidden
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            os.close(folder)
            file.hidden = None
