"""The code of a run: the manifest of the code folder, and a store of file contents.

The head stores each file content once for all runs, under the hash of the content. So every attempt of a run gets the
files of the first attempt, although the folder may have changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from clusterctl.agent.protocol.file_list import FOLDER_MODE, LINK_MODE
from clusterctl.config import file_trust
from clusterctl.config.spec import SyncSpec
from clusterctl.errors import ConfigError, Problem, RefusedError
from clusterctl.formatting import format_size
from clusterctl.run.nodes.code_selection import ExcludedPath, SelectedFile, read_if_present, select_files
from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.record.rundir import RunDir

_CHUNK = 1024 * 1024
_PART = ".part"
MAX_FILES = 500_000
"""The most files in a code folder. For a list of so many files, a node needs seconds and half a gigabyte of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeManifest:
    """The files of a folder to send.

    Attributes:
        files: For each path: size in bytes, permission bits and SHA-256. A link has the mode `LINK_MODE`, and its
            target as content. An empty folder has the mode `FOLDER_MODE` and no content.
        excluded: The excluded paths; not saved with the run.
    """

    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    excluded: tuple[ExcludedPath, ...] = ()

    @property
    def code_hash(self) -> str:
        """A single hash over all files to sync."""
        listing = json.dumps(sorted((p, m, s) for p, (_, m, s) in self.files.items()))
        return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def size_bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(size for size, _, _ in self.files.values())


class ContentStore:
    """A folder of file contents, named by their hash. All runs of a head share this folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_private_folder(root.parent)
        make_private_folder(root)

    def path(self, digest: str) -> Path:
        """Return the path of the content with this hash."""
        return self.root / digest[:2] / digest

    def add_file(self, source: BinaryIO) -> tuple[int, str]:
        """Store a copy of a file, and hash the file in the same pass. Return size and hash."""
        digest, size = hashlib.sha256(), 0
        # Heads that share a home may have equal pids, so the temporary name is random.
        with tempfile.NamedTemporaryFile(dir=self.root, prefix=".", suffix=_PART, delete=False) as writer:
            try:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    writer.write(chunk)
                    size += len(chunk)
                writer.flush()
                target = self.path(digest.hexdigest())
                target.parent.mkdir(exist_ok=True)
                os.replace(writer.name, target)
            except BaseException:
                os.unlink(writer.name)
                raise
        return size, digest.hexdigest()

    def renew(self, digest: str) -> bool:
        """Return whether the content exists. Renew its modification time, so that `clean` does not remove it now."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True

    def list_unused(self, used: Collection[str], before: float) -> list[tuple[Path, int]]:
        """Return path and size (bytes) of stored content that no run needs, and of incomplete files.

        Args:
            used: The hashes that runs need.
            before: Time in seconds (wall clock). Newer content is left out, because it may belong to a run that is
                starting.
        """
        unused = []
        for path in (*self.root.glob("??/*"), *self.root.glob(f".*{_PART}")):
            status = read_if_present(path.stat, path)
            if status is not None and path.name not in used and status.st_mtime < before:
                unused.append((path, status.st_size))
        return unused


def find_content_store(runs: Path) -> ContentStore | None:
    """Return the content store beside a folder of runs; `None` if no run was ever synced."""
    root = runs.parent / "content"
    return ContentStore(root) if root.is_dir() else None


def open_content_store(run: RunDir) -> ContentStore:
    """Return the content store on the head of a run."""
    return ContentStore(run.path.parent.parent / "content")


def build_manifest(sync: SyncSpec, store: ContentStore, *, max_files: int = MAX_FILES) -> CodeManifest:
    """Return the manifest of a folder, and store its content.

    Files with the size, mtime and inode of the last sync are not read again. Files that are removed meanwhile are left
    out.

    Raises:
        ConfigError: The folder does not exist.
        RefusedError: The folder is larger than `sync.max_size`, has more than `max_files` files, or cannot be read.
    """
    source = Path(sync.source)
    hashed = _HashCache(store.root / "known.json", sync.source)
    files: dict[str, tuple[int, int, str]] = {}
    excluded: list[ExcludedPath] = []
    for found in select_code_files(sync, excluded.append, max_files=max_files):
        if found.is_folder:
            entry: tuple[int, int, str] | None = (0, FOLDER_MODE, store.add_file(io.BytesIO())[1])
        elif found.target is None:
            entry = hashed.entry(source / found.path, found.status, store)
        else:
            length, digest = store.add_file(io.BytesIO(os.fsencode(found.target)))
            entry = length, LINK_MODE, digest
        if entry is not None:
            files[found.path] = entry
    hashed.save()
    return CodeManifest(files=files, excluded=tuple(excluded))


def select_code_files(
    sync: SyncSpec, on_excluded: Callable[[ExcludedPath], None], *, max_files: int = MAX_FILES
) -> Iterator[SelectedFile]:
    """Yield the files to sync, without reading them; `on_excluded` takes the excluded paths.

    Raises:
        ConfigError, RefusedError: For the reasons that `build_manifest` lists.
    """
    source = Path(sync.source)
    if not source.is_dir():
        raise ConfigError([Problem(sync.source, 0, 0, "`sync.source` is not a folder")])
    reason = file_trust.find_upload_obstacle(sync.source)
    if reason is not None:
        raise RefusedError(
            f"`sync.source`: {sync.source} {reason}, which is not sent to nodes", hint=file_trust.UPLOAD_HINT
        )
    files: list[str] = []
    total, largest = 0, list[tuple[int, str]]()
    for found in select_files(source, sync.exclude, on_excluded):
        total += found.size_bytes
        largest = sorted([*largest, (found.size_bytes, found.path)], reverse=True)[:3]
        if total > sync.max_size:
            names = ", ".join(f"{name} ({format_size(count)})" for count, name in largest)
            raise RefusedError(
                f"{sync.source} holds more than {format_size(sync.max_size)} to sync (at least {format_size(total)})",
                hint=f"add to `sync.exclude` or raise `sync.max_size`; the largest: {names}",
            )
        if len(files) == max_files:
            folders = Counter(path.partition("/")[0] for path in files if "/" in path).most_common(3)
            names = ", ".join(f"{name}/ ({count})" for name, count in folders)
            raise RefusedError(
                f"{sync.source} holds more than {len(files)} files to sync",
                hint="add to `sync.exclude` what is no code" + (f"; most of them lie in {names}" if names else ""),
            )
        files.append(found.path)
        yield found


class _HashCache:
    """Hashes of the files of each synced folder, by device, inode, size and modification time.

    Only files of the last sync are kept, and only for folders that still exist.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source
        try:
            self._folders: dict[str, dict[str, list[Any]]] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            self._folders = {}
        self._used: dict[str, list[Any]] = {}

    def entry(self, path: Path, status: os.stat_result, store: ContentStore) -> tuple[int, int, str] | None:
        """Store a file; return its size, permission bits and hash, or `None` if the file no longer exists."""
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        size, digest = self._folders.get(self._source, {}).get(key, (0, ""))
        if not digest or not store.renew(digest):
            file = read_if_present(lambda: path.open("rb"), path)
            if file is None:
                return None
            with file:
                size, digest = store.add_file(file)
        self._used[key] = [size, digest]
        return size, stat.S_IMODE(status.st_mode), digest

    def save(self) -> None:
        others = {s: used for s, used in self._folders.items() if s != self._source and os.path.isdir(s)}
        write_atomically(self._path, json.dumps({**others, self._source: self._used}).encode())


def save_manifest(run: RunDir, manifest: CodeManifest) -> None:
    """Save the manifest in the run directory."""
    write_atomically(run.manifest, json.dumps({"files": manifest.files}, ensure_ascii=True).encode())


def load_manifest(run: RunDir) -> CodeManifest | None:
    """Return the saved manifest of a run; `None` if no code was synced."""
    try:
        stored = json.loads(run.manifest.read_text())
    except FileNotFoundError:
        return None
    return CodeManifest(files={p: (s, m, d) for p, (s, m, d) in stored["files"].items()})
