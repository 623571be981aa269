"""What a file server has: each request of one client carried out on the server's folder, with the client's rights."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from tests.lab import fuse
from tests.lab.fuse import Op
from tests.lab.handles import Failure, Handles

if TYPE_CHECKING:
    from tests.lab.fuse import Connection, Request

NOBODY: Final = 65534
_OF_NOBODY: Final = (Op.INIT, Op.RELEASE, Op.RELEASEDIR, Op.FORGET, Op.BATCH_FORGET)
"""What the client's kernel asks for by itself."""
_libc = ctypes.CDLL(None)


class Export:
    """A folder, as one client sees it."""

    def __init__(self, connection: Connection, folder: str, cache_s: float, locks: str, root_squash: bool) -> None:
        self.handles = Handles(folder, cache_s)
        self._connection = connection
        self._cache = cache_s
        self._locks = locks
        self._squash = root_squash
        self._operations: dict[int, Callable[[Request], bytes | None]] = {
            op: getattr(self, f"_{op.name.lower()}") for op in Op if op != Op.INTERRUPT
        }

    def answer(self, request: Request) -> bytes | None:
        """Carry out a request.

        Returns:
            The answer; None: not yet, a lock is held by somebody else.

        Raises:
            Failure: it is refused.
        """
        operation = self._operations.get(request.op)
        if operation is None:
            raise Failure(errno.ENOSYS)
        with self._as_caller(request):
            try:
                return operation(request)
            except OSError as error:
                raise Failure(error.errno or errno.EIO) from error

    @contextlib.contextmanager
    def _as_caller(self, request: Request) -> Iterator[None]:
        if request.op in _OF_NOBODY:
            yield
            return
        squashed = self._squash and request.uid == 0
        _libc.setfsgid(NOBODY if squashed else request.gid)
        _libc.setfsuid(NOBODY if squashed else request.uid)
        try:
            yield
        finally:
            _libc.setfsuid(0)
            _libc.setfsgid(0)

    # --- handles

    def _forget(self, request: Request) -> bytes:
        self.handles.drop(request.node, request.fields("Q")[0])
        return b""

    def _batch_forget(self, request: Request) -> bytes:
        (count, _) = request.fields("II")
        for number, lookups in struct.iter_unpack("<QQ", request.body[8 : 8 + 16 * count]):
            self.handles.drop(number, lookups)
        return b""

    # --- names

    def _init(self, request: Request) -> bytes:
        locks = {"local": 0, "shared": fuse.FLOCK_LOCKS}.get(self._locks, fuse.FLOCK_LOCKS | fuse.POSIX_LOCKS)
        self._connection.begin(request.unique, fuse.BIG_WRITES | fuse.AUTO_INVAL_DATA | locks)
        return b""

    def _lookup(self, request: Request) -> bytes:
        (name,) = request.names(0)
        try:
            return self.handles.entry(self.handles.file(request.node), name)
        except FileNotFoundError:
            if self._cache:
                return fuse.no_entry(self._cache)
            raise

    def _made(self, request: Request, name: bytes) -> bytes:
        return self.handles.entry(self.handles.file(request.node), name)

    def _mknod(self, request: Request) -> bytes:
        (name,) = request.names(16)
        mode, device, _, _ = request.fields("IIII")
        os.mknod(name, mode, device, dir_fd=self.handles.file(request.node).descriptor)
        return self._made(request, name)

    def _mkdir(self, request: Request) -> bytes:
        (name,) = request.names(8)
        os.mkdir(name, request.fields("I")[0], dir_fd=self.handles.file(request.node).descriptor)
        return self._made(request, name)

    def _symlink(self, request: Request) -> bytes:
        name, target = request.names(0)
        os.symlink(target, name, dir_fd=self.handles.file(request.node).descriptor)
        return self._made(request, name)

    def _link(self, request: Request) -> bytes:
        (name,) = request.names(8)
        old = self.handles.file(request.fields("Q")[0])
        os.link(old.path, name, dst_dir_fd=self.handles.file(request.node).descriptor, follow_symlinks=True)
        return self._made(request, name)

    def _unlink(self, request: Request) -> bytes:
        (name,) = request.names(0)
        parent = self.handles.file(request.node)
        if not self.handles.hide(parent, name):
            os.unlink(name, dir_fd=parent.descriptor)
        return b""

    def _rmdir(self, request: Request) -> bytes:
        (name,) = request.names(0)
        os.rmdir(name, dir_fd=self.handles.file(request.node).descriptor)
        return b""

    def _rename(self, request: Request) -> bytes:
        return self._moved(request, 8)

    def _rename2(self, request: Request) -> bytes:
        if request.fields("QI")[1]:
            raise Failure(errno.EINVAL)
        return self._moved(request, 16)

    def _moved(self, request: Request, head: int) -> bytes:
        old, new = request.names(head)
        source, target = self.handles.file(request.node), self.handles.file(request.fields("Q")[0])
        self.handles.hide(target, new)
        os.rename(old, new, src_dir_fd=source.descriptor, dst_dir_fd=target.descriptor)
        return b""

    # --- attributes

    def _getattr(self, request: Request) -> bytes:
        with_file, _, opened = request.fields("IIQ")
        if with_file & 1:
            return fuse.attributes_for(os.fstat(self.handles.opened(opened).descriptor), self._cache)
        return fuse.attributes_for(os.fstat(self.handles.file(request.node).descriptor), self._cache)

    def _setattr(self, request: Request) -> bytes:
        (valid, _, opened, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _) = request.fields(
            "IIQQQQQQIIIIIIII"
        )
        file = self.handles.file(request.node)
        if valid & 8 and valid & 64:
            os.ftruncate(self.handles.opened(opened).descriptor, size)
        elif valid & 8:
            os.truncate(file.path, size)
        if valid & 6:
            os.chown(file.path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 1:
            os.chmod(file.path, stat.S_IMODE(mode))
        if valid & 48:
            info = os.fstat(file.descriptor)
            old = (info.st_atime_ns, info.st_mtime_ns)
            new = (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            os.utime(file.path, ns=(new[0] if valid & 16 else old[0], new[1] if valid & 32 else old[1]))
        return fuse.attributes_for(os.fstat(file.descriptor), self._cache)

    def _readlink(self, request: Request) -> bytes:
        return os.readlink(b"", dir_fd=self.handles.file(request.node).descriptor)

    def _access(self, request: Request) -> bytes:
        if not os.access(self.handles.file(request.node).path, request.fields("I")[0], effective_ids=True):
            raise Failure(errno.EACCES)
        return b""

    def _statfs(self, request: Request) -> bytes:
        space = os.statvfs(self.handles.file(fuse.ROOT).path)
        numbers = (space.f_blocks, space.f_bfree, space.f_bavail, space.f_files, space.f_ffree)
        return struct.pack("<5Q4I24x", *numbers, space.f_bsize, space.f_namemax, space.f_frsize, 0)

    # --- contents

    def _open(self, request: Request) -> bytes:
        flags = request.fields("I")[0] & os.O_ACCMODE
        answer = self.handles.open(request.node, os.open(self.handles.file(request.node).path, flags), flags)
        # Close-to-open: whoever opens a file sees what was written before it was last closed elsewhere.
        self._connection.forget_attributes(request.node)
        return answer

    def _create(self, request: Request) -> bytes:
        (name,) = request.names(16)
        flags, mode = request.fields("II")
        kept = flags & (os.O_ACCMODE | os.O_EXCL | os.O_TRUNC) | os.O_CREAT
        descriptor = os.open(name, kept, mode, dir_fd=self.handles.file(request.node).descriptor)
        entry = self._made(request, name)
        return entry + self.handles.open(struct.unpack_from("<Q", entry)[0], descriptor, flags)

    def _release(self, request: Request) -> bytes:
        self.handles.close(request.fields("Q")[0])
        return b""

    _releasedir = _release

    def _read(self, request: Request) -> bytes:
        opened, offset, size = request.fields("QQI")
        return os.pread(self.handles.opened(opened).descriptor, size, offset)

    def _write(self, request: Request) -> bytes:
        opened, offset, size = request.fields("QQI")
        written = os.pwrite(self.handles.opened(opened).descriptor, request.body[40 : 40 + size], offset)
        return struct.pack("<II", written, 0)

    def _fsync(self, request: Request) -> bytes:
        self.handles.opened(request.fields("Q")[0])
        return b""

    _flush = _fsyncdir = _fsync

    def _opendir(self, request: Request) -> bytes:
        descriptor = os.open(self.handles.file(request.node).path, os.O_RDONLY | os.O_DIRECTORY)
        keep = fuse.CACHE_DIR | fuse.KEEP_CACHE if self._cache else 0
        return self.handles.open(request.node, descriptor, 0, keep)

    def _readdir(self, request: Request) -> bytes:
        number, offset, size = request.fields("QQI")
        opened = self.handles.opened(number)
        if opened.names is None or offset == 0:
            with os.scandir(opened.descriptor) as entries:
                opened.names = [(os.fsencode(e.name), e.inode(), _kind(e)) for e in entries]
        answer = b""
        for position, (name, inode, kind) in enumerate(opened.names[offset:], offset + 1):
            one = fuse.directory_entry(inode, position, kind, name)
            if len(answer) + len(one) > size:
                break
            answer += one
        return answer

    # --- locks

    def _setlk(self, request: Request) -> bytes:
        answer = self._setlkw(request)
        if answer is None:
            raise Failure(errno.EAGAIN)
        return answer

    def _setlkw(self, request: Request) -> bytes | None:
        number, _, _, _, kind, _, _, _ = request.fields("QQQQIIII")
        if self._locks != "shared":
            raise Failure.named(self._locks)
        opened = self.handles.opened(number)
        if kind == fcntl.F_WRLCK and not opened.writable:
            # As NFS, which makes a lock of byte ranges of it.
            raise Failure(errno.EBADF)
        operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}[kind]
        try:
            fcntl.flock(opened.descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return b""


def _kind(entry: os.DirEntry[str]) -> int:
    """The kind of file as `d_type` has it: four bits of the mode."""
    return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
