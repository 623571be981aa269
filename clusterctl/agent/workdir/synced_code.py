"""The code in a workdir: comparison with the head's files, transfer, and removal of files that a sync brought.

The state root stores per workdir the files of the last sync, and the hashes of files at their last read (by size, time
and inode). Both are only hints for a sync: a file that differs is sent again. Files that no sync brought are never
touched. An attempt starts only if the workdir is what its own sync brought.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import command_messages
from clusterctl.agent.protocol.file_list import FOLDER_MODE
from clusterctl.agent.workdir.file_tree import (
    FileReceiver,
    FileTree,
    check_relative_path,
    has_same_content,
    make_workdir,
    refuse_without_space,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Entry = "tuple[int, int, str]"
_PRIVATE_MODE = 0o700


@dataclass(frozen=True)
class SyncDiff:
    """The changes that a sync has to make.

    Attributes:
        changed_files: Files whose content has to be sent.
        modes: Files with other permissions, and the permissions to set.
        removed: Files that an earlier sync brought and this one lacks.
        hashes: Size, time, inode and hash of the files that were read.
        edited: Those of `changed_files` that are as in the last sync, and that something on this node has changed.
    """

    differing_files: list[str]
    modes: list[tuple[str, int]]
    removed: list[str]
    hashes: dict[str, Any]
    edited: list[str]

    @property
    def changed(self) -> list[str]:
        """All files that the sync changes."""
        return [*self.differing_files, *self.removed, *(path for path, _ in self.modes)]


@dataclass
class SyncedWorkdir(FileTree):
    """One workdir and its stored sync state.

    Attributes:
        folder: The workdir.
        root: The state root.
        lock_file: The lock file of the workdir.
    """

    root: str

    def __post_init__(self) -> None:
        name = hashlib.sha256(os.fsencode(os.path.realpath(self.folder))).hexdigest()[:32]
        place = os.path.join(self.root, "sync")
        self._file = os.path.join(place, f"{name}.json")
        self.lock_file = os.path.join(place, f"{name}.lock")

    def make_state_dir(self) -> None:
        """Make the folder of the sync states."""
        os.makedirs(os.path.dirname(self._file), mode=_PRIVATE_MODE, exist_ok=True)

    def _read_state(self) -> dict[str, Any]:
        remembered = syscalls.read_json(self._file) or {}
        return {
            "workdir": self.folder,
            "run": remembered.get("run"),
            "files": remembered.get("files", {}),
            "hashes": remembered.get("hashes", {}),
        }

    def list_synced_files(self) -> list[str]:
        """Return the files of the last sync."""
        return list(self._read_state()["files"])

    def read_synced_run(self) -> str | None:
        """Return the run of the last sync, or `None`."""
        run = self._read_state()["run"]
        return run if isinstance(run, str) else None

    def remove_synced_files(self) -> int:
        """Remove the unchanged files of syncs, and the workdir if it is empty then; return the bytes."""
        remembered = self._read_state()
        fresh: dict[str, Any] = {}
        ours = [path for path in remembered["files"] if self._is_unchanged(path, remembered, fresh)]
        for path in ours:
            self._remove_with_bytecode(path)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file)
        return sum(remembered["files"][path][0] for path in ours)

    # --- comparison

    def diff(self, files: dict[str, list[Any]]) -> SyncDiff:
        """Return what a sync of these files would change, without any change.

        Args:
            files: Path to size, mode and hash.

        Raises:
            RequestError: A path leads outside.
        """
        for path in files:
            check_relative_path(path)
        remembered = self._read_state()
        fresh: dict[str, Any] = {}
        need, modes, edited = [], [], []
        for path, (size, mode, digest) in files.items():
            entry = self.read_entry(path, remembered["hashes"], fresh)
            if entry is None or not has_same_content(entry, (size, mode, digest)):
                need.append(path)
                if entry is not None and remembered["files"].get(path) == [size, mode, digest]:
                    edited.append(path)
            elif entry[1] != mode:
                modes.append((path, mode))
        # An empty folder that is no longer sent may have files now, of the code or of a run: it stays.
        gone = [
            path
            for path, (_, mode, _) in remembered["files"].items()
            if path not in files and mode != FOLDER_MODE and self._is_unchanged(path, remembered, fresh)
        ]
        return SyncDiff(differing_files=need, modes=modes, removed=gone, hashes=fresh, edited=edited)

    def prepare_sync(self, files: dict[str, list[Any]], live: str | None, run: str | None = None) -> SyncDiff:
        """Remove files that this sync lacks, set permissions, and return the changes.

        Args:
            files: Path to size, mode and hash.
            live: Another run that uses this workdir now, or `None`.
            run: The run of this sync, or `None`.

        Raises:
            RequestError: A path leads outside, a file of a live run would change, or there is no space.
        """
        found = self.diff(files)
        changed = found.changed
        if changed and live is not None:
            many = f"{len(changed)} files" if len(changed) > 1 else "1 file"
            raise command_messages.make_refused_error(
                f"run {live} uses {self.folder}, and {many} would change under it, `{changed[0]}` first",
                f"wait for it, `clusterctl down {live}`, or set another `workdir`",
            )
        make_workdir(self.folder)
        for path, mode in found.modes:
            self.chmod(path, mode)
        for path in found.removed:
            self._remove_with_bytecode(path)
        lacking = set(found.differing_files)
        refuse_without_space(self.folder, [(path, files[path][0]) for path in found.differing_files])
        self._save({path: entry for path, entry in files.items() if path not in lacking}, found.hashes, run)
        return found

    def find_change(self, code_hash: str) -> str | None:
        """Return in words how the workdir differs from the manifest with this hash, or `None` if it does not.

        Permissions do not count: some filesystems do not store them.
        """
        remembered = self._read_state()
        files = {check_relative_path(path): entry for path, entry in remembered["files"].items()}
        if _hash_listing((path, mode, digest) for path, (_, mode, digest) in files.items()) != code_hash:
            return "another sync has been there"
        for path, (_, _, digest) in files.items():
            entry = self.read_entry(path, remembered["hashes"], {})
            if entry is None or entry[2] != digest:
                return f"`{path}` {'is gone' if entry is None else 'has changed'}"
        return None

    def hash_synced_files(self) -> str | None:
        """Return one hash over the files of the last sync as they are now; `None` if there was no sync.

        If nothing has changed, it is the hash of the manifest that was synced.
        """
        remembered = self._read_state()
        if not remembered["files"]:
            return None
        listing = []
        for path in remembered["files"]:
            _, mode, digest = self.read_entry(check_relative_path(path), remembered["hashes"], {}) or (None, None, None)
            listing.append((path, mode, digest))
        return _hash_listing(listing)

    def _is_unchanged(self, path: str, known: dict[str, Any], fresh: dict[str, Any]) -> bool:
        """Return whether a file is still as a sync left it; a file that a person has edited is theirs."""
        entry = self.read_entry(check_relative_path(path), known["hashes"], fresh)
        fresh.pop(path, None)
        return entry is not None and entry[2] == known["files"][path][2]

    def _remove_with_bytecode(self, path: str) -> None:
        """Remove a file, the bytecode that Python made of it, and the folders that are empty then."""
        folder, _, name = path.rpartition("/")
        places = [path]
        if name.endswith(".py"):
            cache = f"{folder}/__pycache__" if folder else "__pycache__"
            with contextlib.suppress(OSError):
                made = os.listdir(os.path.dirname(self.resolve(f"{cache}/any")))
                places[:0] = [f"{cache}/{one}" for one in made if one.startswith(name[:-2]) and one.endswith(".pyc")]
        for place in places:
            with contextlib.suppress(OSError):
                whole = self.resolve(place)
                is_folder = os.path.isdir(whole) and not os.path.islink(whole)
                (os.rmdir if is_folder else os.unlink)(whole)
                above = os.path.dirname(place)
                while above:
                    os.rmdir(self.resolve(above))
                    above = os.path.dirname(above)

    def _save(self, files: dict[str, Any], hashes: dict[str, Any], run: str | None) -> None:
        self.make_state_dir()
        syscalls.write_json(self._file, {"workdir": self.folder, "run": run, "files": files, "hashes": hashes})

    def make_receiver(self, files: list[list[Any]]) -> FileReceiver:
        """Return a receiver for the content of these files, in that order; `prepare_sync` has checked their paths."""

        def store(files: list[list[Any]], hashes: dict[str, Any]) -> None:
            remembered = self._read_state()
            remembered["files"].update({path: rest for path, *rest in files})
            self._save(remembered["files"], {**remembered["hashes"], **hashes}, remembered["run"])

        return FileReceiver(self, files, store)


def find_synced_workdir(run: str, root: str) -> SyncedWorkdir | None:
    """Return the workdir of the last sync for a run, or `None`."""
    folder = os.path.join(root, "sync")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        known = syscalls.read_json(os.path.join(folder, name)) if name.endswith(".json") else None
        if known and known.get("run") == run and isinstance(known.get("workdir"), str):
            return SyncedWorkdir(known["workdir"], root)
    return None


def _hash_listing(listing: Iterable[tuple[str, Any, Any]]) -> str:
    """Return one hash over paths, permission bits and hashes; the head computes the same for a manifest."""
    return hashlib.sha256(json.dumps(sorted(listing)).encode("utf-8", "surrogateescape")).hexdigest()
