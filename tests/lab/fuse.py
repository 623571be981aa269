"""The side of the FUSE protocol that answers: requests read from /dev/fuse, answers written to it (<linux/fuse.h>, 7.31)."""

from __future__ import annotations

import errno
import os
import select
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

ROOT: Final = 1
MOST_WRITTEN: Final = 1 << 17

# Answers to INIT and to opens.
POSIX_LOCKS: Final = 1 << 1
BIG_WRITES: Final = 1 << 5
FLOCK_LOCKS: Final = 1 << 10
AUTO_INVAL_DATA: Final = 1 << 12
KEEP_CACHE: Final = 1 << 1
CACHE_DIR: Final = 1 << 3

_INVALIDATE_INODE: Final = 2
_IN: Final = struct.Struct("<IIQQIIII")
_OUT: Final = struct.Struct("<IiQ")
_ATTRIBUTES: Final = struct.Struct("<6Q10I")
_VALID: Final = struct.Struct("<QII")
_ENTRY: Final = struct.Struct("<4QII")
_DIRENT: Final = struct.Struct("<QQII")


class Op(IntEnum):
    """What may be asked; what is not here is answered with ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42
    RENAME2 = 45


SILENT: Final = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)
"""What gets no answer."""

UNAWAITED: Final = (*SILENT, Op.INIT, Op.RELEASE, Op.RELEASEDIR)
"""What the kernel says by itself: no process waits for the answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `node` is the number of the file, uid and gid are the caller's."""

    op: int
    unique: int
    node: int
    uid: int
    gid: int
    body: bytes

    @property
    def name(self) -> str:
        """What is asked, as `Op` names it."""
        return Op(self.op).name if self.op in Op.__members__.values() else str(self.op)

    def fields(self, layout: str) -> tuple[int, ...]:
        """The numbers that the body begins with."""
        return struct.unpack_from("<" + layout, self.body)

    def names(self, offset: int) -> list[bytes]:
        """The names that follow them."""
        return self.body[offset:].split(b"\0")[:-1]


class Ended(Exception):
    """The file system is not mounted any more."""


class Connection:
    """A descriptor of /dev/fuse."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._buffer = bytearray(MOST_WRITTEN + 4096)
        os.set_blocking(descriptor, False)

    def mounted(self) -> bool:
        """Whether somebody has mounted it; it must not be read before."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return not any(events & select.POLLERR for _, events in poll.poll(0))

    def read(self) -> Request | None:
        """Return the next request, or None if there is none (any more: who asked may be dead).

        Raises:
            Ended: there will be none.
        """
        try:
            size = os.readv(self.descriptor, [self._buffer])
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                raise Ended from error
            if error.errno in (errno.EAGAIN, errno.ENOENT, errno.EINTR):
                return None
            raise
        _, op, unique, node, uid, gid, _, _ = _IN.unpack_from(self._buffer)
        return Request(op, unique, node, uid, gid, bytes(self._buffer[_IN.size : size]))

    def answer(self, unique: int, data: bytes = b"", error: int = 0) -> None:
        """Answer a request, or fail it with an errno."""
        head = _OUT.pack(_OUT.size + len(data), -error, unique)
        try:
            os.writev(self.descriptor, [head, data])
        except OSError as failure:
            # Who asked is dead, or the mount is gone.
            if failure.errno not in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
                raise

    def begin(self, unique: int, flags: int) -> None:
        """Answer INIT."""
        answer = struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, flags, 12, 9, MOST_WRITTEN, 1, 0, 0, 0)
        self.answer(unique, answer)

    def forget_attributes(self, node: int) -> None:
        """Make the kernel ask again what it knows of a file."""
        body = struct.pack("<Qqq", node, -1, 0)
        try:
            os.writev(self.descriptor, [_OUT.pack(_OUT.size + len(body), _INVALIDATE_INODE, 0), body])
        except OSError as failure:
            if failure.errno not in (errno.ENOENT, errno.ENODEV):
                raise


def attributes(info: os.stat_result) -> bytes:
    """`struct fuse_attr`."""
    times = [(ns // 10**9, ns % 10**9) for ns in (info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns)]
    return _ATTRIBUTES.pack(
        info.st_ino, info.st_size, info.st_blocks, *(s for s, _ in times), *(ns for _, ns in times),
        info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_rdev, info.st_blksize, 0,
    )  # fmt: skip


def attributes_for(info: os.stat_result, seconds: float) -> bytes:
    """`struct fuse_attr_out`: attributes, and how long they may be believed."""
    return _VALID.pack(*_time(seconds), 0) + attributes(info)


def entry(node: int, info: os.stat_result, seconds: float) -> bytes:
    """`struct fuse_entry_out`: the file that a name stands for."""
    whole, rest = _time(seconds)
    return _ENTRY.pack(node, 0, whole, whole, rest, rest) + attributes(info)


def no_entry(seconds: float) -> bytes:
    """The same for a name that stands for none."""
    whole, rest = _time(seconds)
    return _ENTRY.pack(0, 0, whole, 0, rest, 0) + bytes(_ATTRIBUTES.size)


def directory_entry(inode: int, position: int, kind: int, name: bytes) -> bytes:
    """`struct fuse_dirent`: `position` is where to go on after it."""
    return (_DIRENT.pack(inode, position, len(name), kind) + name).ljust(-(-(_DIRENT.size + len(name)) // 8) * 8, b"\0")


def _time(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 10**9)
