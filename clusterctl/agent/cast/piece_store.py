"""The contents of a cast on this node. Contents that the node lacks grow in a folder on the filesystem of the target.

The folder, the spool, outlives an interruption. The next cast finds the complete pieces in it by their hashes, so it
needs no other state, and a torn or changed file does no harm. Only the owner of the lock in the spool uses the spool.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.pieces import PIECE_BYTES, PieceMap
from clusterctl.agent.workdir.file_tree import get_spool_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.protocol.pieces import CastPlan

_MAX_AGE_S = 7 * 86400.0
"""A content in the spool that no cast has changed for this time is removed."""


class SpoolBusyError(Exception):
    """Another cast uses the spool; `args[0]` is its id, or "" if the id is unknown."""


class PieceStore:
    """Reads and writes pieces.

    Every method may be called by several threads at once, if no two of them write the same piece.

    Args:
        folder: The target folder.
        plan: The plan of the cast.
        present: The paths of the contents that the node has already, by SHA-256.

    Attributes:
        map: The places of the pieces in the contents.
        complete: At the start, the pieces that need not arrive.

    Raises:
        SpoolBusyError: Another cast uses the spool.
        OSError: The spool cannot be made.
    """

    def __init__(self, folder: str, plan: CastPlan, present: Mapping[str, str]) -> None:
        self._plan, self._present = plan, present
        self.map = PieceMap([size for _, size in plan.contents])
        self._spool = get_spool_folder(folder)
        self._taken: set[str] = set()
        self._needed = [digest not in present for digest, _ in plan.contents]
        self._lock = self._lock_spool() if any(self._needed) else None
        self.complete = {piece for piece in range(self.map.count) if self._is_complete(piece)}

    def _lock_spool(self) -> int:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._spool, 0o700)
            info = os.lstat(self._spool)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
                # Whoever can rename files in the spool can change what is put in place.
                raise PermissionError(errno.EACCES, "another user can write to it", self._spool)
            path = f"{self._spool}/lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(lock, 256, 0).decode("ascii", "replace")
                os.close(lock)
                raise SpoolBusyError(owner) from None
            # The last owner may have removed the file after it was opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    break
            os.close(lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, self._plan.cast.encode(), 0)
        known = {digest for digest, _ in self._plan.contents}
        for entry in os.scandir(self._spool):
            if entry.name not in {"lock", *known} and time.time() - entry.stat().st_mtime > _MAX_AGE_S:
                os.unlink(entry.path)
        return lock

    def _is_complete(self, piece: int) -> bool:
        needed = [(number, offset) for number, offset, _ in self.map.list_parts(piece) if self._needed[number]]
        try:
            for number, offset in needed:
                with open(self._find_path(number), "rb") as file:
                    if os.lseek(file.fileno(), offset, os.SEEK_DATA) != offset:
                        return False  # A hole: do not read and hash its zeros.
            return not needed or self.is_correct(piece, self.read(piece))
        except OSError:
            return False

    def _find_path(self, number: int) -> str:
        digest, _ = self._plan.contents[number]
        return self._present.get(digest) or f"{self._spool}/{digest}"

    def is_correct(self, piece: int, data: bytes) -> bool:
        """Return whether these bytes are the piece."""
        return hashlib.sha256(data).digest() == self._plan.piece_hashes[piece]

    def read(self, piece: int) -> bytes:
        """Return a piece.

        Raises:
            OSError: A file cannot be read, or has become shorter.
        """
        parts = self.map.list_parts(piece)
        return b"".join(_read_part(self._find_path(number), offset, length) for number, offset, length in parts)

    def write(self, piece: int, data: bytes) -> None:
        """Write a correct piece to the spool.

        Raises:
            OSError: The piece cannot be written.
        """
        position = 0
        for number, offset, length in self.map.list_parts(piece):
            if self._needed[number]:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(self._find_path(number), flags, 0o600)
                try:
                    with memoryview(data)[position : position + length] as part:
                        written = 0
                        while written < length:
                            written += os.pwrite(fd, part[written:], offset + written)
                finally:
                    os.close(fd)
            position += length

    def take_content(self, digest: str, target: str) -> None:
        """Make the new file `target` with a complete content.

        The file shares the disk space of the spool. A second file of the same content is a copy, and is checked again.

        Raises:
            OSError: The file cannot be made, or the copied file has changed.
        """
        path = self._present.get(digest) or f"{self._spool}/{digest}"
        if digest not in self._present and digest not in self._taken:
            with contextlib.suppress(OSError):  # Some filesystems have no links.
                os.link(path, target, follow_symlinks=False)
                self._taken.add(digest)
                return
        number = next(number for number, content in enumerate(self._plan.contents) if content[0] == digest)
        size, hasher = self._plan.contents[number][1], hashlib.sha256()
        with open(target, "xb") as file:
            for offset in range(0, size, PIECE_BYTES):
                part = _read_part(path, offset, min(PIECE_BYTES, size - offset))
                hasher.update(part)
                file.write(part)
        if hasher.hexdigest() != digest:
            raise OSError(0, "has changed during the cast", path)

    def close(self, *, remove: bool) -> None:
        """Release the spool. With `remove`, first remove the contents of this cast from the spool."""
        if self._lock is None:
            return
        if remove:
            for digest, _ in self._plan.contents:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._spool}/{digest}")
        with contextlib.suppress(OSError):
            if os.listdir(self._spool) == ["lock"]:
                os.unlink(f"{self._spool}/lock")
                os.rmdir(self._spool)
        os.close(self._lock)
        self._lock = None


def _read_part(path: str, offset: int, length: int) -> bytes:
    """Return bytes of a file, or of the target of a link."""
    if os.path.islink(path):
        data = os.fsencode(os.readlink(path))[offset : offset + length]
    else:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = os.pread(fd, length, offset)
        finally:
            os.close(fd)
    if len(data) != length:
        raise OSError(0, "has become shorter", path)
    return data
