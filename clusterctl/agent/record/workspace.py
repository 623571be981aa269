"""Code that comes from the head: what is there, what is needed, and nothing touched that did not come from there.

Per workdir it is written down in the state root what a sync brought (`manifest`), and the hashes of files as they were
when last read (by size, time and inode). For a sync both are hints: a file that differs is simply sent again. An
attempt is prepared only where the workdir is what its own sync brought.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import refusals
from clusterctl.agent.protocol.commands import ErrorKind
from clusterctl.agent.record.folders import check_path, make_way, make_workdir, open_folder, unlink

if TYPE_CHECKING:
    from collections.abc import Iterable

Entry = "tuple[int, int, str]"
_CHUNK = 1 << 20
_PRIVATE = 0o700


@dataclass
class Workspace:
    """One workdir and what is known of it.

    Attributes:
        folder: The workdir.
        root: The state root.
        lock_file: A file whose lock stands for the workdir (`holds`).
    """

    folder: str
    root: str

    def __post_init__(self) -> None:
        name = hashlib.sha256(os.fsencode(os.path.realpath(self.folder))).hexdigest()[:32]
        place = os.path.join(self.root, "sync")
        os.makedirs(place, mode=_PRIVATE, exist_ok=True)
        self._file = os.path.join(place, f"{name}.json")
        self.lock_file = os.path.join(place, f"{name}.lock")

    def _known(self) -> dict[str, Any]:
        record = syscalls.read_json(self._file) or {}
        return {"workdir": self.folder, "files": record.get("files", {}), "hashes": record.get("hashes", {})}

    # --- looking

    def _open_parent(self, path: str, *, make: bool) -> tuple[int, str]:
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

    def _entry(self, path: str, hashes: dict[str, Any], fresh: dict[str, Any]) -> tuple[int, int, str] | None:
        """Return size, mode and hash of a file as it is, or `None` where there is no such file."""
        try:
            parent, name = self._open_parent(path, make=False)
        except OSError:
            return None
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=parent)
        except OSError:
            return None
        finally:
            os.close(parent)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return None
            key = [info.st_size, info.st_mtime_ns, info.st_ino]
            hashed = hashes.get(path)
            digest = hashed[3] if hashed is not None and hashed[:3] == key else _hash(fd)
            fresh[path] = [*key, digest]
            return info.st_size, stat.S_IMODE(info.st_mode), digest
        finally:
            os.close(fd)

    def compare(self, files: dict[str, list[Any]], live: str | None) -> list[str]:
        """Return which files have to be sent, after removing what an earlier sync brought and this one does not have.

        Args:
            files: Path to size, mode and hash.
            live: Another run that uses this workdir now, or `None`.

        Raises:
            RequestError: A path leads outside, or something would change under that run.
        """
        for path in files:
            check_path(path)
        make_workdir(self.folder)
        record = self._known()
        fresh: dict[str, Any] = {}
        need, modes = [], []
        for path, (size, mode, digest) in files.items():
            entry = self._entry(path, record["hashes"], fresh)
            if entry is None or (entry[0], entry[2]) != (size, digest):
                need.append(path)
            elif entry[1] != mode:
                modes.append((path, mode))
        gone = [path for path in record["files"] if path not in files and self._unchanged(path, record, fresh)]
        changed = [*need, *gone, *(path for path, _ in modes)]
        if changed and live is not None:
            raise refusals.refused(
                f"run {live} uses {self.folder}, and {len(changed)} files would change under it, `{changed[0]}` first",
                f"wait for it, `clusterctl down {live}`, or set another `workdir`",
            )
        for path, mode in modes:
            self._chmod(path, mode)
        for path in gone:
            self._remove(path)
        lacking = set(need)
        self._save({path: entry for path, entry in files.items() if path not in lacking}, fresh)
        return need

    def difference(self, code_hash: str) -> str | None:
        """Return in what the workdir differs from the manifest with this hash, in words, or `None` where it does not.

        Permissions do not count: there are file systems that keep none.
        """
        record = self._known()
        files = {check_path(path): entry for path, entry in record["files"].items()}
        if _listing_hash((path, mode, digest) for path, (_, mode, digest) in files.items()) != code_hash:
            return "another sync has been there"
        for path, (_, _, digest) in files.items():
            entry = self._entry(path, record["hashes"], {})
            if entry is None or entry[2] != digest:
                return f"`{path}` {'is gone' if entry is None else 'has changed'}"
        return None

    def code_hash(self) -> str | None:
        """Return one hash over the files that the last sync left here, as they are now; `None` where there was none.

        It is the hash of the manifest that was synced where nothing has changed since.
        """
        record = self._known()
        if not record["files"]:
            return None
        listing = []
        for path in record["files"]:
            _, mode, digest = self._entry(check_path(path), record["hashes"], {}) or (None, None, None)
            listing.append((path, mode, digest))
        return _listing_hash(listing)

    def _unchanged(self, path: str, record: dict[str, Any], fresh: dict[str, Any]) -> bool:
        """Whether a file is still the one that a sync brought; what a person has edited since is theirs."""
        entry = self._entry(check_path(path), record["hashes"], fresh)
        fresh.pop(path, None)
        return entry is not None and entry[2] == record["files"][path][2]

    def _chmod(self, path: str, mode: int) -> None:
        parent, name = self._open_parent(path, make=False)
        try:
            os.chmod(name, mode & 0o777, dir_fd=parent)
        finally:
            os.close(parent)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            parent, name = self._open_parent(path, make=False)
            try:
                os.unlink(name, dir_fd=parent)
            finally:
                os.close(parent)
            # Folders that this leaves empty go too, up to the workdir.
            while "/" in path:
                path = path.rpartition("/")[0]
                parent, name = self._open_parent(path, make=False)
                try:
                    os.rmdir(name, dir_fd=parent)
                finally:
                    os.close(parent)

    def _save(self, files: dict[str, Any], hashes: dict[str, Any]) -> None:
        syscalls.write_json(self._file, {"workdir": self.folder, "files": files, "hashes": hashes})

    # --- receiving

    def receive(self, files: list[list[Any]]) -> Receiver:
        """Return what takes the content of files in, in that order; `compare` has looked at their paths."""
        return Receiver(self, files)

    def received(self, files: list[list[Any]], hashes: dict[str, Any]) -> None:
        """Write down what a sync has brought, and the hashes of those files as they lie there now."""
        record = self._known()
        record["files"].update({path: rest for path, *rest in files})
        self._save(record["files"], {**record["hashes"], **hashes})

    def put(self, path: str) -> tuple[int, int, str, str]:
        """Open a new file beside where `path` will lie: its descriptor, the folder's, its name there, the last name."""
        parent, name = self._open_parent(path, make=True)
        temporary = f".{name[:100]}.{os.getpid()}.{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(temporary, flags, 0o600, dir_fd=parent), parent, temporary, name
        except BaseException:
            os.close(parent)
            raise


class Receiver:
    """Takes bytes in and makes files of them, each put in place as a whole once its hash is right.

    Attributes:
        done: Everything that was announced has come.
        written: How many files are in place.
    """

    def __init__(self, workspace: Workspace, files: list[list[Any]]) -> None:
        self._workspace, self._files = workspace, files
        self._number = -1
        self._left = 0
        self._open: tuple[int, int, str, str] | None = None
        self._digest = hashlib.sha256()
        self._all = hashlib.sha256()
        self._hashes: dict[str, Any] = {}
        self.done = False
        self.written = 0
        self._next()

    @property
    def hash(self) -> str:
        """One hash over the paths, modes and contents that came."""
        return self._all.hexdigest()

    def feed(self, data: bytes) -> None:
        """Take in the next bytes.

        Raises:
            RequestError: More than was announced, or other content.
            OSError: It cannot be written.
        """
        view = memoryview(data)
        while view:
            if self.done or self._open is None:
                raise refusals.RequestError(ErrorKind.BAD_REQUEST, "more data than the files announced")
            part = view[: self._left]
            syscalls.write_all(self._open[0], bytes(part))
            self._digest.update(part)
            self._left -= len(part)
            view = view[len(part) :]
            if self._left == 0:
                self._finish()
                self._next()

    def _next(self) -> None:
        """Begin the next file; empty ones are finished at once."""
        while True:
            self._number += 1
            if self._number >= len(self._files):
                self.done = True
                self._workspace.received(self._files, self._hashes)
                return
            path, size, _, _ = self._files[self._number]
            self._open = self._workspace.put(path)
            self._digest = hashlib.sha256()
            self._left = int(size)
            if self._left:
                return
            self._finish()

    def _finish(self) -> None:
        path, _, mode, digest = self._files[self._number]
        if self._open is None:
            return
        if self._digest.hexdigest() != digest:
            self.abandon()
            raise refusals.failed(f"`{path}` arrived with another content than announced")
        (fd, parent, temporary, name), self._open = self._open, None
        try:
            try:
                os.fchmod(fd, int(mode) & 0o777)
                info = os.fstat(fd)
            finally:
                # Before it is put in place: a network file system may say only now that it has no space.
                os.close(fd)
            make_way(name, parent)
            os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            self._hashes[path] = [info.st_size, info.st_mtime_ns, info.st_ino, digest]
        except OSError as error:
            unlink(temporary, parent)
            raise refusals.failed(f"`{path}` cannot be put in place: {error.strerror}") from error
        finally:
            os.close(parent)
        self._all.update(f"{path}\0{mode}\0{digest}\n".encode("utf-8", "surrogateescape"))
        self.written += 1

    def abandon(self) -> None:
        """Leave nothing half-written behind."""
        if self._open is not None:
            (fd, parent, temporary, _), self._open = self._open, None
            os.close(fd)
            unlink(temporary, parent)
            os.close(parent)


def _listing_hash(listing: Iterable[tuple[str, Any, Any]]) -> str:
    """Return one hash over paths, permission bits and hashes; the head computes the same over a manifest."""
    return hashlib.sha256(json.dumps(sorted(listing)).encode("utf-8", "surrogateescape")).hexdigest()


def _hash(fd: int) -> str:
    digest = hashlib.sha256()
    while True:
        data = os.read(fd, _CHUNK)
        if not data:
            return digest.hexdigest()
        digest.update(data)
