"""Reads and writes files in a user's folder. Symbolic links below this folder are not followed."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import stat
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import command_messages
from clusterctl.agent.protocol.command_messages import ErrorKind
from clusterctl.agent.protocol.file_list import FOLDER_MODE, LINK_MODE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Callable

    OnComplete = Callable[[list[list[Any]], dict[str, Any]], None]

_CHUNK_BYTES = 1 << 20
_HASH_OF_NOTHING = hashlib.sha256().hexdigest()


def check_relative_path(path: str) -> str:
    """Check that a path of a manifest lies inside the workdir, and return the path.

    Raises:
        RequestError: The path is absolute or empty, or leads out of the workdir.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise command_messages.RequestError(ErrorKind.BAD_REQUEST, f"not a path inside the workdir: {path!r}")
    return path


_DATA_DIR = "~/.local/share/clusterctl"
"""The parent folder of `DEFAULT_WORKDIRS`, which only the user may enter."""

DEFAULT_WORKDIRS = f"{_DATA_DIR}/work"
"""The folder that contains the workdirs of all cluster files without the key `workdir`."""


def make_workdir(folder: str) -> None:
    """Create the code folder if it is missing.

    Raises:
        RequestError: The folder cannot be created, for example in a home on a server that does not accept root.
    """
    data_dir = os.path.expanduser(_DATA_DIR)
    try:
        if folder.startswith(data_dir + "/"):
            os.makedirs(data_dir, 0o700, exist_ok=True)
            os.chmod(data_dir, 0o700)
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise command_messages.make_failed_error(
            f"cannot create the workdir {folder}: {error.strerror or error}",
            "set `workdir` of this host to a folder that the user can create there",
        ) from error


def get_spool_folder(folder: str) -> str:
    """Return the path of the folder in which a cast to `folder` collects contents."""
    return os.path.join(os.path.realpath(folder), f".clusterctl-cast-{os.getuid()}")


def refuse_without_space(folder: str, files: Iterable[tuple[str, int, str]]) -> None:
    """Refuse a transfer before any file is sent, if the filesystem of the folder has too little space.

    Args:
        folder: The target folder.
        files: The path, size and hash of each file. The space of a file that will be replaced counts as free, and so
            do the pieces of a file that an interrupted cast has left.

    Raises:
        RequestError: The filesystem has too little space.
    """
    needed = largest = 0
    spool = get_spool_folder(folder)
    for path, size, digest in files:
        new_bytes = size
        with contextlib.suppress(OSError):
            new_bytes = max(0, size - os.lstat(f"{spool}/{digest}").st_blocks * _BLOCK_BYTES)
        largest = max(largest, new_bytes)
        needed += new_bytes
        with contextlib.suppress(OSError):
            needed -= os.lstat(os.path.join(folder, path)).st_size
    free = _read_free_bytes(folder)
    if free is not None and max(needed, largest) > free:
        text = f"{folder} has {_format_mib(free)} free, and the files need {_format_mib(max(needed, largest))}"
        raise command_messages.make_refused_error(text, _FREE_SPACE_HINT)


_BLOCK_BYTES = 512
"""The unit of `st_blocks`, on every filesystem."""
_FREE_SPACE_HINT = "free space there, or set `workdir` to a folder on another disk"


def _read_free_bytes(folder: str) -> int | None:
    """Return the free bytes of a folder's filesystem; `None` if it does not report them."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return (disk.f_bavail if os.geteuid() else disk.f_bfree) * disk.f_frsize if disk.f_blocks else None


def _format_mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def make_write_error(folder: str, path: str, error: OSError, remaining_bytes: int = 0) -> command_messages.RequestError:
    """Return the error for a file that cannot be written.

    Args:
        folder: The target folder.
        path: The path relative to the folder.
        error: The cause.
        remaining_bytes: The bytes of the transfer that are not yet written.
    """
    text = f"`{path}` cannot be written to {folder}: {error.strerror}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return command_messages.make_failed_error(text)
    free = _read_free_bytes(folder)
    room = "" if free is None else f"{_format_mib(free)} free, "
    return command_messages.make_refused_error(
        f"{text} ({room}{_format_mib(remaining_bytes)} more needed)", _FREE_SPACE_HINT
    )


def find_matching_files(workdir: str, pattern: str, *, links: bool = False) -> list[tuple[str, str]]:
    """Return relative and absolute path of each regular file that matches the pattern or lies in a matching folder.

    With `links`, the result also has links to files, even if they lead out of the workdir. Links to folders are
    followed only if the link itself matches.

    Raises:
        RequestError: The pattern leads out of the workdir.
    """
    if os.path.isabs(pattern) or ".." in pattern.split("/"):
        raise command_messages.RequestError(ErrorKind.BAD_REQUEST, f"not a pattern inside the workdir: {pattern!r}")
    top = os.path.realpath(workdir)
    files: dict[str, str] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(top), pattern), recursive=True)):
        if not links and not os.path.realpath(path).startswith(top.rstrip("/") + "/"):
            continue
        inside = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
        for whole in inside if os.path.isdir(path) else [path]:
            files[os.path.relpath(whole, top)] = whole
    return [(name, path) for name, path in sorted(files.items()) if _is_regular_file(path, links=links)]


def filter_changed_since(files: list[tuple[str, str]], moment: float, folder: str) -> list[tuple[str, str]]:
    """Return the files whose content, name or permissions have changed after `moment` (wall time in seconds).

    The times of files may come from the clock of a file server. To correct for this clock, the function compares the
    time of a new file in `folder` with the clock of the node.
    """
    ahead = 0.0
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        ahead = os.fstat(probe.fileno()).st_ctime - time.time()
    changed = []
    for name, path in files:
        # Skip a file that was removed after it was listed.
        with contextlib.suppress(OSError):
            if os.stat(path).st_ctime >= moment + ahead:
                changed.append((name, path))
    return changed


def _is_regular_file(path: str, *, links: bool) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=links).st_mode)
    except OSError:
        return False


def has_same_content(first: tuple[int, int, str], second: tuple[int, int, str]) -> bool:
    """Return whether two entries (size, mode, hash) are files of equal content, links of equal target, or folders."""
    return (first[0], first[2], stat.S_IFMT(first[1])) == (second[0], second[2], stat.S_IFMT(second[1]))


@dataclass
class FileTree:
    """A folder and its files.

    Attributes:
        folder: The path of the folder. Links in this path are followed, but links below the folder are not.
    """

    folder: str
    _folders: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The real path of each checked folder. An object of this class exists for one request only."""

    def resolve(self, path: str, *, make: bool = False) -> str:
        """Return the absolute path of a file. With `make`, create the folder of the file.

        Raises:
            OSError: A folder in the path is a symbolic link, or the folder cannot be created.
        """
        inner, _, name = path.rpartition("/")
        folder = self._folders.get(inner)
        if folder is None:
            folder = os.path.join(os.path.realpath(self.folder), inner).rstrip("/")
            if os.path.realpath(folder) != folder:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
            self._folders[inner] = folder
        if make:
            os.makedirs(folder, exist_ok=True)
        return f"{folder}/{name}"

    def read_fingerprint(
        self, path: str, hashes: dict[str, Any], fresh: dict[str, Any], expected_size: int | None = None
    ) -> tuple[int, int, str] | None:
        """Return size, mode and hash of a file, link or folder; `None` if the path does not exist.

        Args:
            path: The path relative to the folder.
            hashes: The cache: size, time, inode and hash of each file when it was last read.
            fresh: The new cache, to which this function adds the entry of the file.
            expected_size: A file of another size is not read, and gets the hash "".
        """
        try:
            place = self.resolve(path)
            if os.path.islink(place):
                target = os.fsencode(os.readlink(place))
                return len(target), LINK_MODE, hashlib.sha256(target).hexdigest()
            fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            info = os.fstat(fd)
            if stat.S_ISDIR(info.st_mode):
                return 0, FOLDER_MODE, _HASH_OF_NOTHING
            if not stat.S_ISREG(info.st_mode):
                return None
            if expected_size is not None and info.st_size != expected_size:
                return info.st_size, stat.S_IMODE(info.st_mode), ""
            key = [info.st_size, info.st_mtime_ns, info.st_ino]
            cached = hashes.get(path)
            digest = cached[3] if cached is not None and cached[:3] == key else _hash_file(fd)
            fresh[path] = [*key, digest]
            return info.st_size, stat.S_IMODE(info.st_mode), digest
        finally:
            os.close(fd)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permissions of a file."""
        os.chmod(self.resolve(path), mode & 0o777)

    def make_folder(self, path: str) -> None:
        """Create a folder, and before that remove a file or link at the same path.

        Raises:
            OSError: The folder cannot be created.
        """
        place = self.resolve(path, make=True)
        with contextlib.suppress(OSError):
            os.unlink(place)
        os.makedirs(place, exist_ok=True)

    def create_temporary(self, path: str) -> tuple[int, str, str]:
        """Create a temporary file beside `path`; return its descriptor, its path, and the absolute `path`."""
        place = self.resolve(path, make=True)
        folder, name = os.path.split(place)
        temporary = f"{folder}/.{name[:100]}.{os.getpid()}.{os.urandom(4).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(temporary, flags, 0o600), temporary, place


class FileReceiver:
    """Writes received bytes to temporary files, and renames each file to its path if its hash is correct.

    Args:
        tree: The target folder.
        files: The path, size, mode and hash of each file, in the order of arrival. The caller has checked the paths.
        on_complete: Called at the end with `files`, and with the size, time, inode and hash of each file on disk.

    Attributes:
        is_complete: Whether all announced files have arrived.
        written: The number of files that have been written and renamed.
    """

    def __init__(
        self,
        tree: FileTree,
        files: list[list[Any]],
        on_complete: OnComplete | None = None,
    ) -> None:
        self._tree, self._files, self._on_complete = tree, files, on_complete
        self._number = -1
        self._remaining_bytes = 0
        self._open: tuple[int, str, str] | None = None
        self._digest = hashlib.sha256()
        self._total_digest = hashlib.sha256()
        self._hashes: dict[str, Any] = {}
        self.is_complete = False
        self.written = 0
        self._next()

    @property
    def hash(self) -> str:
        """One hash over the paths, modes and contents of all received files."""
        return self._total_digest.hexdigest()

    def feed(self, data: bytes) -> None:
        """Write the next received bytes.

        Raises:
            RequestError: More bytes than announced have arrived, a hash is wrong, or a write has failed.
        """
        view = memoryview(data)
        while view:
            if self.is_complete or self._open is None:
                raise command_messages.RequestError(ErrorKind.BAD_REQUEST, "more data has arrived than announced")
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

    def take_files(self, take_content: Callable[[str, str], None]) -> None:
        """Complete the transfer with contents that this machine has and has checked.

        Args:
            take_content: A function that makes a new file (second argument) with the content of a hash.

        Raises:
            RequestError: A file cannot be written or renamed.
        """
        while self._open is not None:
            fd, temporary, place = self._open
            os.close(fd)
            os.unlink(temporary)
            try:
                take_content(self._files[self._number][3], temporary)
                fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                self._open = None
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise self._not_written(error) from error
            self._open = fd, temporary, place
            self._finish(is_checked=True)
            self._next()

    def _next(self) -> None:
        """Create the next file. If the file is empty, finish it at once."""
        while True:
            self._number += 1
            if self._number >= len(self._files):
                self.is_complete = True
                if self._on_complete is not None:
                    self._on_complete(self._files, self._hashes)
                return
            path, size, mode, _ = self._files[self._number]
            self._remaining_bytes = int(size)
            try:
                if mode == FOLDER_MODE:
                    self._tree.make_folder(path)
                    self._count(path, mode, _HASH_OF_NOTHING)
                    continue
                self._open = self._tree.create_temporary(path)
            except OSError as error:
                raise self._not_written(error) from error
            self._digest = hashlib.sha256()
            if self._remaining_bytes:
                return
            self._finish()

    def _not_written(self, error: OSError) -> command_messages.RequestError:
        path = self._files[self._number][0]
        remaining_bytes = self._remaining_bytes + sum(int(size) for _, size, *_ in self._files[self._number + 1 :])
        return make_write_error(self._tree.folder, path, error, remaining_bytes)

    def _finish(self, *, is_checked: bool = False) -> None:
        path, size, mode, digest = self._files[self._number]
        if self._open is None:
            return
        if not is_checked and self._digest.hexdigest() != digest:
            self.abandon()
            raise command_messages.make_failed_error(f"the content of `{path}` differs from the announced content")
        (fd, temporary, place), self._open = self._open, None
        try:
            try:
                target = os.pread(fd, int(size), 0) if stat.S_ISLNK(mode) else None
                os.fchmod(fd, int(mode) & 0o777)
                info = os.fstat(fd)
            finally:
                # Close the file before the rename, because a network filesystem may report a lack of space only here.
                os.close(fd)
            if target is not None:
                os.unlink(temporary)
                os.symlink(_check_link_target(path, target), temporary)
            if os.path.isdir(place) and not os.path.islink(place):
                # Try to remove an empty folder at this path. If the folder has content, the rename below fails.
                with contextlib.suppress(OSError):
                    os.rmdir(place)
            os.replace(temporary, place)
            self._hashes[path] = [info.st_size, info.st_mtime_ns, info.st_ino, digest]
        except (command_messages.RequestError, OSError) as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, command_messages.RequestError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._not_written(error) from error
            raise command_messages.make_failed_error(f"`{path}` cannot be put in place: {error.strerror}") from error
        self._count(path, mode, digest)

    def _count(self, path: str, mode: int, digest: str) -> None:
        self._total_digest.update(f"{path}\0{mode}\0{digest}\n".encode("utf-8", "surrogateescape"))
        self.written += 1

    def abandon(self) -> None:
        """Remove the temporary file of an incomplete transfer."""
        if self._open is not None:
            (fd, temporary, _), self._open = self._open, None
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _check_link_target(path: str, target: bytes) -> bytes:
    """Check that the target of a link lies inside the workdir, and return the target.

    Raises:
        RequestError: The target is empty or lies outside the workdir.
    """
    reached = os.path.normpath(os.path.join(os.path.dirname(os.fsencode(path)), target))
    if reached.startswith(b"/") or f"{os.fsdecode(reached)}/".startswith("../") or not target:
        raise command_messages.RequestError(ErrorKind.BAD_REQUEST, f"`{path}` is a link that leads out of the workdir")
    return target


def _hash_file(fd: int) -> str:
    digest = hashlib.sha256()
    while True:
        data = os.read(fd, _CHUNK_BYTES)
        if not data:
            return digest.hexdigest()
        digest.update(data)
