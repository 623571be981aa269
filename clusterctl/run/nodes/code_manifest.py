"""The code that goes to the nodes: the manifest of a folder, and its content kept for later attempts.

The content is stored once per hash for all runs of this head, so a run can always be restarted with exactly what it
started with, however the folder has changed since.
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

from clusterctl.agent.protocol.requests import FOLDER_MODE, LINK_MODE
from clusterctl.config import path_rules
from clusterctl.config.spec import SyncSpec
from clusterctl.errors import ConfigError, Problem, RefusedError
from clusterctl.formatting import format_size
from clusterctl.run.nodes.code_selection import ExcludedPath, SelectedFile, read_if_present, select_files
from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.record.rundir import RunDir

_CHUNK = 1024 * 1024
_PART = ".part"
MAX_FILES = 500_000
"""A listing of so many takes a node seconds and half a gigabyte to go through; no code has as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What of a folder is sent.

    Attributes:
        files: Path to size, permission bits and SHA-256; a link has the mode `LINK_MODE`, and its content is where it
            leads; a folder in which nothing is sent has `FOLDER_MODE`, and no content.
        left_out: What is not sent; it is not kept with the run.
    """

    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    left_out: tuple[ExcludedPath, ...] = ()

    @property
    def code_hash(self) -> str:
        """One hash over everything that is synced."""
        listing = json.dumps(sorted((p, m, s) for p, (_, m, s) in self.files.items()))
        return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(size for size, _, _ in self.files.values())


class ContentStore:
    """Files by their hash, shared by all runs of a head."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_private_folder(root.parent)
        make_private_folder(root)

    def path(self, digest: str) -> Path:
        """Return where the content of a hash lies."""
        return self.root / digest[:2] / digest

    def add(self, source: BinaryIO) -> tuple[int, str]:
        """Copy what a file holds in, in one pass that also hashes it; return its size and hash."""
        digest, size = hashlib.sha256(), 0
        # Heads that share a home may have equal pids: only a name that is made up is nobody else's.
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

    def refresh(self, digest: str) -> bool:
        """Return whether the content is there; then it is young again, and no cleaning takes it away meanwhile."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True

    def list_unused(self, used: Collection[str], before: float) -> list[tuple[Path, int]]:
        """Return the files of content that nobody names, those that were never finished too, and their sizes in bytes.

        Args:
            used: Hashes of what runs need.
            before: Wall clock in seconds; what was taken or used later may belong to a start that goes on now.
        """
        unused = []
        for path in (*self.root.glob("??/*"), *self.root.glob(f".*{_PART}")):
            status = read_if_present(path.stat, path)
            if status is not None and path.name not in used and status.st_mtime < before:
                unused.append((path, status.st_size))
        return unused


def find_content_store(runs: Path) -> ContentStore | None:
    """Return the content store beside a folder of runs, or `None` where nothing was ever synced."""
    root = runs.parent / "content"
    return ContentStore(root) if root.is_dir() else None


def open_content_store(run: RunDir) -> ContentStore:
    """Return the content store of the head that a run belongs to."""
    return ContentStore(run.path.parent.parent / "content")


def build_manifest(sync: SyncSpec, store: ContentStore, *, most_files: int = MAX_FILES) -> Manifest:
    """Return the manifest of a folder, its content stored.

    Files that have not changed (size, mtime, inode) since they were last stored are not read again; what vanishes
    meanwhile is left out.

    Raises:
        ConfigError: The folder is not there.
        RefusedError: It is larger than `sync.max_size`, has more than `most_files` files, or something in it cannot be
            read.
    """
    source = Path(sync.source)
    hashed = _HashCache(store.root / "known.json", sync.source)
    files: dict[str, tuple[int, int, str]] = {}
    left_out: list[ExcludedPath] = []
    for found in select_code_files(sync, left_out.append, most_files=most_files):
        if found.is_folder:
            entry: tuple[int, int, str] | None = (0, FOLDER_MODE, store.add(io.BytesIO())[1])
        elif found.target is None:
            entry = hashed.entry(source / found.path, found.status, store)
        else:
            length, digest = store.add(io.BytesIO(os.fsencode(found.target)))
            entry = length, LINK_MODE, digest
        if entry is not None:
            files[found.path] = entry
    hashed.save()
    return Manifest(files=files, left_out=tuple(left_out))


def select_code_files(
    sync: SyncSpec, left_out: Callable[[ExcludedPath], None], *, most_files: int = MAX_FILES
) -> Iterator[SelectedFile]:
    """Yield what a sync would copy, without reading any of it; `left_out` takes what it would not.

    Raises:
        ConfigError, RefusedError: As `collect`.
    """
    source = Path(sync.source)
    if not source.is_dir():
        raise ConfigError([Problem(sync.source, 0, 0, "`sync.source` is not a folder")])
    reason = path_rules.find_upload_obstacle(sync.source)
    if reason is not None:
        raise RefusedError(
            f"`sync.source`: {sync.source} {reason}, which is not sent to nodes", hint=path_rules.UPLOAD_HINT
        )
    files: list[str] = []
    total, largest = 0, list[tuple[int, str]]()
    for found in select_files(source, sync.exclude, left_out):
        total += found.size_bytes
        largest = sorted([*largest, (found.size_bytes, found.path)], reverse=True)[:3]
        if total > sync.max_size:
            raise _too_large(sync, total, largest)
        if len(files) == most_files:
            raise _too_many(sync, files)
        files.append(found.path)
        yield found


def _too_large(sync: SyncSpec, total: int, largest: list[tuple[int, str]]) -> RefusedError:
    names = ", ".join(f"{name} ({format_size(count)})" for count, name in largest)
    return RefusedError(
        f"{sync.source} holds more than {format_size(sync.max_size)} to sync (at least {format_size(total)})",
        hint=f"add to `sync.exclude` or raise `sync.max_size`; the largest: {names}",
    )


def _too_many(sync: SyncSpec, files: Collection[str]) -> RefusedError:
    folders = Counter(path.partition("/")[0] for path in files if "/" in path).most_common(3)
    names = ", ".join(f"{name}/ ({count})" for name, count in folders)
    return RefusedError(
        f"{sync.source} holds more than {len(files)} files to sync",
        hint="add to `sync.exclude` what is no code" + (f"; most of them lie in {names}" if names else ""),
    )


class _HashCache:
    """Hashes of the files of each folder that was synced, by device, inode, size and time of change.

    Only files that the last sync of a folder took are remembered, and only as long as the folder is there.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source
        try:
            self._folders: dict[str, dict[str, list[Any]]] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            self._folders = {}
        self._used: dict[str, list[Any]] = {}

    def entry(self, path: Path, status: os.stat_result, store: ContentStore) -> tuple[int, int, str] | None:
        """Return size, permission bits and hash of a file whose content is stored now, or `None` where it is gone."""
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        size, digest = self._folders.get(self._source, {}).get(key, (0, ""))
        if not digest or not store.refresh(digest):
            file = read_if_present(lambda: path.open("rb"), path)
            if file is None:
                return None
            with file:
                size, digest = store.add(file)
        self._used[key] = [size, digest]
        return size, stat.S_IMODE(status.st_mode), digest

    def save(self) -> None:
        others = {s: used for s, used in self._folders.items() if s != self._source and os.path.isdir(s)}
        write_atomically(self._path, json.dumps({**others, self._source: self._used}).encode())


def save_manifest(run: RunDir, manifest: Manifest) -> None:
    """Keep the manifest with its run."""
    write_atomically(run.manifest, json.dumps({"files": manifest.files}, ensure_ascii=True).encode())


def load_manifest(run: RunDir) -> Manifest | None:
    """Return the manifest that a run was started with, or `None` where nothing was synced."""
    try:
        stored = json.loads(run.manifest.read_text())
    except FileNotFoundError:
        return None
    return Manifest(files={p: (s, m, d) for p, (s, m, d) in stored["files"].items()})
