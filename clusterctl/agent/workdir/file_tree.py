"""Folders and files of users, gone into step by step: no link leads out of the folder of the code."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import math
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import request_errors
from clusterctl.agent.protocol.commands import ErrorKind
from clusterctl.agent.protocol.file_list import LINK_MODE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Callable

    Note = Callable[[list[list[Any]], dict[str, Any]], None]

_CHUNK_BYTES = 1 << 20


def check_relative_path(path: str) -> str:
    """Return a path of a manifest, which must lie inside the workdir.

    Raises:
        RequestError: It is absolute, empty, or leads outside.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"not a path inside the workdir: {path!r}")
    return path


_DATA_DIR = "~/.local/share/clusterctl"
"""Below it lies the code of files that name no `workdir`: what was synced is for its user alone."""

DEFAULT_WORKDIRS = f"{_DATA_DIR}/work"
"""The folder of the workdirs that nobody chose."""


def make_workdir(folder: str) -> None:
    """Make the folder that the code goes to, where it is not there.

    Raises:
        RequestError: It cannot be made, as in the home of a root who is nobody on its server.
    """
    ours = os.path.expanduser(_DATA_DIR)
    try:
        if folder.startswith(ours + "/"):
            os.makedirs(ours, 0o700, exist_ok=True)
            os.chmod(ours, 0o700)
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise request_errors.make_failed_error(
            f"cannot make the workdir {folder}: {error.strerror or error}",
            "set `workdir` of this host to a folder that its user can make there",
        ) from error


def refuse_without_space(folder: str, coming: Iterable[tuple[str, int]]) -> None:
    """Refuse files for which a folder has no space, before any of them is sent.

    Args:
        folder: Where they go.
        coming: Path and size of each; a file that is there already gives its own space back.

    Raises:
        RequestError: The file system has less than they need.
    """
    needed = largest = 0
    for path, size in coming:
        largest = max(largest, size)
        needed += size
        with contextlib.suppress(OSError):
            needed -= os.lstat(os.path.join(folder, path)).st_size
    free = _read_free_bytes(folder)
    if free is not None and max(needed, largest) > free:
        text = f"{folder} has {_format_mib(free)} free, and {_format_mib(max(needed, largest))} are to come"
        raise request_errors.make_refused_error(text, _FREE_SPACE_HINT)


_FREE_SPACE_HINT = "free space there, or set `workdir` to a folder on another disk"


def _read_free_bytes(folder: str) -> int | None:
    """Return how many bytes may be written to the file system of a folder; `None` where it does not say."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize if disk.f_blocks else None


def _format_mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def make_write_error(folder: str, path: str, error: OSError, left: int = 0) -> request_errors.RequestError:
    """Return what to say of a file that cannot be written.

    Args:
        folder: Where it was to be.
        path: Relative to it.
        error: Why.
        left: Bytes that are still to come.
    """
    text = f"`{path}` cannot be written to {folder}: {error.strerror}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return request_errors.make_failed_error(text)
    free = _read_free_bytes(folder)
    room = "" if free is None else f"{_format_mib(free)} free, "
    return request_errors.make_refused_error(f"{text} ({room}{_format_mib(left)} still to come)", _FREE_SPACE_HINT)


def remove_file(name: str, parent: int) -> None:
    """Remove a file of an open folder, where it is there."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=parent)


def open_folder(name: str, parent: int, *, make: bool) -> int:
    """Open a folder of an open folder, never through a link.

    Raises:
        OSError: It is not there and not to be made, or it is none.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def remove_empty_folder(name: str, parent: int) -> None:
    """Remove an empty folder where a file is to be; one with something in it stays, and the sync fails."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=parent)


def find_matches(workdir: str, pattern: str, *, links: bool = False) -> Iterator[tuple[str, str]]:
    """Yield `(path as the pattern wrote it, absolute path)` of what is inside the workdir and matches.

    With `links` also where a link leads elsewhere.

    Raises:
        RequestError: The pattern leads outside.
    """
    if os.path.isabs(pattern) or ".." in pattern.split("/"):
        raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"not a pattern inside the workdir: {pattern!r}")
    top = os.path.realpath(workdir)
    for path in sorted(glob.glob(os.path.join(glob.escape(top), pattern), recursive=True)):
        if links or os.path.realpath(path).startswith(top.rstrip("/") + "/"):
            yield os.path.relpath(path, top), path


def find_matching_files(workdir: str, pattern: str, *, links: bool = False) -> list[tuple[str, str]]:
    """Return every regular file that a pattern means: matches, and all that lies in matching folders.

    With `links` also files that links lead to; links to folders are gone into where they match themselves.
    """
    files: dict[str, str] = {}
    for name, path in find_matches(workdir, pattern, links=links):
        if os.path.isdir(path):
            for place, _, names in os.walk(path):
                for inner in names:
                    whole = os.path.join(place, inner)
                    files[os.path.join(name, os.path.relpath(whole, path))] = whole
        else:
            files[name] = path
    return [(name, path) for name, path in sorted(files.items()) if _is_regular_file(path, links=links)]


def filter_changed_since(files: list[tuple[str, str]], moment: float, folder: str) -> list[tuple[str, str]]:
    """Return the files that were written, moved here or given other permissions after a moment (wall clock, seconds).

    The clock of a file system may be that of a server: it is looked at by a file of ours in `folder`.
    """
    ahead = 0.0
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        ahead = os.fstat(probe.fileno()).st_ctime - time.time()
    return [(name, path) for name, path in files if _read_change_time(path) >= moment + ahead]


def _read_change_time(path: str) -> float:
    """Return when a file was changed; of one that is gone by now, long ago."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return -math.inf


def _is_regular_file(path: str, *, links: bool) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=links).st_mode)
    except OSError:
        return False


def has_same_content(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    """Return whether two entries (size, mode, hash) are files of the same content, or links to the same place."""
    return (one[0], one[2], one[1] == LINK_MODE) == (other[0], other[2], other[1] == LINK_MODE)


@dataclass
class FileTree:
    """A folder and what lies in it.

    Attributes:
        folder: Where it is; links on the way there are followed, links in it are not.
    """

    folder: str

    def open_parent(self, path: str, *, make: bool) -> tuple[int, str]:
        """Return a descriptor of the folder that holds `path`, and its last name; no symbolic link is followed below.

        Raises:
            OSError: A folder on the way is missing or is a symbolic link.
        """
        *folders, name = path.split("/")
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                inner = open_folder(folder, fd, make=make)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd, name

    def read_entry(
        self, path: str, hashes: dict[str, Any], fresh: dict[str, Any], of_size: int | None = None
    ) -> tuple[int, int, str] | None:
        """Return size, mode and hash of a file or link as it is, or `None` where there is none.

        Args:
            path: Inside the folder.
            hashes: Size, time, inode and hash of files when they were last read.
            fresh: Takes the same, of this file now.
            of_size: One of another size is not read, and has no hash.
        """
        try:
            parent, name = self.open_parent(path, make=False)
        except OSError:
            return None
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
        except OSError:
            return _read_link_entry(name, parent)
        finally:
            os.close(parent)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return None
            if of_size is not None and info.st_size != of_size:
                return info.st_size, stat.S_IMODE(info.st_mode), ""
            key = [info.st_size, info.st_mtime_ns, info.st_ino]
            cached = hashes.get(path)
            digest = cached[3] if cached is not None and cached[:3] == key else _hash_file(fd)
            fresh[path] = [*key, digest]
            return info.st_size, stat.S_IMODE(info.st_mode), digest
        finally:
            os.close(fd)

    def chmod(self, path: str, mode: int) -> None:
        """Give a file these permissions."""
        parent, name = self.open_parent(path, make=False)
        try:
            os.chmod(name, mode & 0o777, dir_fd=parent)
        finally:
            os.close(parent)

    def create_temporary(self, path: str) -> tuple[int, int, str, str]:
        """Open a new file beside where `path` will lie: its descriptor, the folder's, its name there, the last name."""
        parent, name = self.open_parent(path, make=True)
        temporary = f".{name[:100]}.{os.getpid()}.{os.urandom(4).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(temporary, flags, 0o600, dir_fd=parent), parent, temporary, name
        except BaseException:
            os.close(parent)
            raise


class FileReceiver:
    """Takes bytes in and makes files of them, each put in place as a whole once its hash is right.

    Args:
        tree: Where they go.
        files: Path, size, mode and hash of each, in the order in which they come; the paths have been looked at.
        note: Called once all have come, with these files, and with size, time, inode and hash of each as it lies there.
        check: Raises `RequestError` where a file must not be put in place; called just before that.

    Attributes:
        done: Everything that was announced has come.
        written: How many files are in place.
    """

    def __init__(
        self,
        tree: FileTree,
        files: list[list[Any]],
        note: Note | None = None,
        check: Callable[[str], None] = lambda _path: None,
    ) -> None:
        self._tree, self._files, self._on_complete, self._check = tree, files, note, check
        self._number = -1
        self._remaining_bytes = 0
        self._open: tuple[int, int, str, str] | None = None
        self._digest = hashlib.sha256()
        self._total_digest = hashlib.sha256()
        self._hashes: dict[str, Any] = {}
        self.is_complete = False
        self.written = 0
        self._next()

    @property
    def hash(self) -> str:
        """One hash over the paths, modes and contents that came."""
        return self._total_digest.hexdigest()

    def feed(self, data: bytes) -> None:
        """Take in the next bytes.

        Raises:
            RequestError: More than was announced, other content, or it cannot be written.
        """
        view = memoryview(data)
        while view:
            if self.is_complete or self._open is None:
                raise request_errors.RequestError(ErrorKind.BAD_REQUEST, "more data than the files announced")
            part = view[: self._remaining_bytes]
            try:
                syscalls.write_all(self._open[0], bytes(part))
            except OSError as error:
                raise self._not_written(error) from error
            self._digest.update(part)
            self._remaining_bytes -= len(part)
            view = view[len(part) :]
            if self._remaining_bytes == 0:
                self._finish()
                self._next()

    def _next(self) -> None:
        """Begin the next file; empty ones are finished at once."""
        while True:
            self._number += 1
            if self._number >= len(self._files):
                self.is_complete = True
                if self._on_complete is not None:
                    self._on_complete(self._files, self._hashes)
                return
            path, size, _, _ = self._files[self._number]
            self._remaining_bytes = int(size)
            try:
                self._open = self._tree.create_temporary(path)
            except OSError as error:
                raise self._not_written(error) from error
            self._digest = hashlib.sha256()
            if self._remaining_bytes:
                return
            self._finish()

    def _not_written(self, error: OSError) -> request_errors.RequestError:
        path = self._files[self._number][0]
        left = self._remaining_bytes + sum(int(size) for _, size, *_ in self._files[self._number + 1 :])
        return make_write_error(self._tree.folder, path, error, left)

    def _finish(self) -> None:
        path, size, mode, digest = self._files[self._number]
        if self._open is None:
            return
        if self._digest.hexdigest() != digest:
            self.abandon()
            raise request_errors.make_failed_error(f"`{path}` arrived with another content than announced")
        (fd, parent, temporary, name), self._open = self._open, None
        try:
            try:
                target = os.pread(fd, int(size), 0) if stat.S_ISLNK(mode) else None
                os.fchmod(fd, int(mode) & 0o777)
                info = os.fstat(fd)
            finally:
                # Before it is put in place: a network file system may say only now that it has no space.
                os.close(fd)
            if target is not None:
                os.unlink(temporary, dir_fd=parent)
                os.symlink(_check_link_target(path, target), temporary, dir_fd=parent)
            self._check(path)
            remove_empty_folder(name, parent)
            os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            self._hashes[path] = [info.st_size, info.st_mtime_ns, info.st_ino, digest]
        except request_errors.RequestError:
            remove_file(temporary, parent)
            raise
        except OSError as error:
            remove_file(temporary, parent)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._not_written(error) from error
            raise request_errors.make_failed_error(f"`{path}` cannot be put in place: {error.strerror}") from error
        finally:
            os.close(parent)
        self._total_digest.update(f"{path}\0{mode}\0{digest}\n".encode("utf-8", "surrogateescape"))
        self.written += 1

    def abandon(self) -> None:
        """Leave nothing half-written behind."""
        if self._open is not None:
            (fd, parent, temporary, _), self._open = self._open, None
            os.close(fd)
            remove_file(temporary, parent)
            os.close(parent)


def _read_link_entry(name: str, parent: int) -> tuple[int, int, str] | None:
    try:
        target = os.fsencode(os.readlink(name, dir_fd=parent))
    except OSError:
        return None
    return len(target), LINK_MODE, hashlib.sha256(target).hexdigest()


def _check_link_target(path: str, target: bytes) -> bytes:
    """Return where a link leads, which must be inside the workdir.

    Raises:
        RequestError: It leads outside.
    """
    reached = os.path.normpath(os.path.join(os.path.dirname(os.fsencode(path)), target))
    if reached.startswith(b"/") or f"{os.fsdecode(reached)}/".startswith("../") or not target:
        raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"`{path}` is a link that leads out of the workdir")
    return target


def _hash_file(fd: int) -> str:
    digest = hashlib.sha256()
    while True:
        data = os.read(fd, _CHUNK_BYTES)
        if not data:
            return digest.hexdigest()
        digest.update(data)
