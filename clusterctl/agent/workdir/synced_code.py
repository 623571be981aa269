"""The synced code in a workdir: its comparison with the head's files, its transfer and its removal.

For each workdir, the state root stores the list of files of the last sync. It also stores the hash, size, time and
inode of each file that was read. A sync uses the list and the hashes only as hints, and the head sends each file that
differs. Files that do not come from a sync are never changed. An attempt starts only if the workdir has the content of
the attempt's own sync.
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

_PRIVATE_MODE = 0o700


@dataclass(frozen=True)
class SyncDiff:
    """The changes that a sync has to make.

    Attributes:
        differing_files: The files whose content the head has to send.
        mode_changes: The files with wrong permissions, and the permissions to set.
        files_to_remove: The files of an earlier sync that are missing in this sync.
        hashes: The size, time, inode and hash of the files that were read.
        edited: The `differing_files` that have changed on this node, not on the head, since the last sync.
    """

    differing_files: list[str]
    mode_changes: list[tuple[str, int]]
    files_to_remove: list[str]
    hashes: dict[str, Any]
    edited: list[str]

    @property
    def changed_paths(self) -> list[str]:
        """The paths of all files that the sync changes or removes."""
        return [*self.differing_files, *self.files_to_remove, *(path for path, _ in self.mode_changes)]


@dataclass
class SyncedWorkdir(FileTree):
    """A workdir, and the stored state of its last sync.

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
        """Create the folder with the sync states of all workdirs."""
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
        """Return the paths of the files of the last sync."""
        return list(self._read_state()["files"])

    def read_synced_run(self) -> str | None:
        """Return the id of the run that made the last sync, or `None`."""
        run = self._read_state()["run"]
        return run if isinstance(run, str) else None

    def remove_synced_files(self) -> int:
        """Remove the unchanged files of the last sync, and an empty workdir; return the number of removed bytes."""
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

    def compare_files(self, files: dict[str, list[Any]]) -> SyncDiff:
        """Return the changes that a sync of these files would make, without making them.

        Args:
            files: The size, mode and hash of each file, by path.

        Raises:
            RequestError: A path leads out of the workdir.
        """
        for path in files:
            check_relative_path(path)
        remembered = self._read_state()
        fresh: dict[str, Any] = {}
        need, modes, edited = [], [], []
        for path, (size, mode, digest) in files.items():
            entry = self.read_fingerprint(path, remembered["hashes"], fresh)
            if entry is None or not has_same_content(entry, (size, mode, digest)):
                need.append(path)
                if entry is not None and remembered["files"].get(path) == [size, mode, digest]:
                    edited.append(path)
            elif entry[1] != mode:
                modes.append((path, mode))
        # Do not remove an empty folder that is missing in this sync: it may have files now, of the code or of a run.
        gone = [
            path
            for path, (_, mode, _) in remembered["files"].items()
            if path not in files and mode != FOLDER_MODE and self._is_unchanged(path, remembered, fresh)
        ]
        return SyncDiff(differing_files=need, mode_changes=modes, files_to_remove=gone, hashes=fresh, edited=edited)

    def prepare_sync(self, files: dict[str, list[Any]], live_run: str | None, run: str | None = None) -> SyncDiff:
        """Remove the files that are missing in this sync, set permissions, and return all changes of the sync.

        Args:
            files: The size, mode and hash of each file, by path.
            live_run: Another run that uses this workdir at present, or `None`.
            run: The run that makes this sync, or `None`.

        Raises:
            RequestError: A path leads out of the workdir, a file of a live run would change, or the space is too small.
        """
        found = self.compare_files(files)
        changed = found.changed_paths
        if changed and live_run is not None:
            many = f"{len(changed)} files" if len(changed) > 1 else "1 file"
            raise command_messages.make_refused_error(
                f"run {live_run} uses {self.folder}, and this sync would change {many} there, `{changed[0]}` first",
                f"wait for the end of that run, end it by `clusterctl down {live_run}`, or set another `workdir`",
            )
        make_workdir(self.folder)
        for path, mode in found.mode_changes:
            self.chmod(path, mode)
        for path in found.files_to_remove:
            self._remove_with_bytecode(path)
        lacking = set(found.differing_files)
        refuse_without_space(self.folder, [(path, files[path][0], files[path][2]) for path in found.differing_files])
        self._save({path: entry for path, entry in files.items() if path not in lacking}, found.hashes, run)
        return found

    def find_difference(self, code_hash: str) -> str | None:
        """Return a description of the first difference between the workdir and the manifest with this hash, or `None`.

        Permissions are not compared, because some filesystems do not store them.
        """
        remembered = self._read_state()
        files = {check_relative_path(path): entry for path, entry in remembered["files"].items()}
        if _hash_listing((path, mode, digest) for path, (_, mode, digest) in files.items()) != code_hash:
            return "another sync has changed it"
        for path, (_, _, digest) in files.items():
            entry = self.read_fingerprint(path, remembered["hashes"], {})
            if entry is None or entry[2] != digest:
                return f"`{path}` {'is gone' if entry is None else 'has changed'}"
        return None

    def hash_synced_files(self) -> str | None:
        """Return one hash over the present content of the files of the last sync; `None` without a sync.

        If no file has changed, the result is the hash of the manifest of the last sync.
        """
        remembered = self._read_state()
        if not remembered["files"]:
            return None
        listing = []
        for path in remembered["files"]:
            _, mode, digest = self.read_fingerprint(check_relative_path(path), remembered["hashes"], {}) or (None,) * 3
            listing.append((path, mode, digest))
        return _hash_listing(listing)

    def _is_unchanged(self, path: str, known: dict[str, Any], fresh: dict[str, Any]) -> bool:
        """Return whether a file still has the content that the sync has written. An edited file belongs to the user."""
        entry = self.read_fingerprint(check_relative_path(path), known["hashes"], fresh)
        fresh.pop(path, None)
        return entry is not None and entry[2] == known["files"][path][2]

    def _remove_with_bytecode(self, path: str) -> None:
        """Remove a file, its Python bytecode, and the folders that are empty afterwards."""
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
        """Return a receiver for the content of these files, in this order. `prepare_sync` has checked their paths."""

        def store(files: list[list[Any]], hashes: dict[str, Any]) -> None:
            remembered = self._read_state()
            remembered["files"].update({path: rest for path, *rest in files})
            self._save(remembered["files"], {**remembered["hashes"], **hashes}, remembered["run"])

        return FileReceiver(self, files, store)


def find_synced_workdir(run: str, root: str) -> SyncedWorkdir | None:
    """Return the workdir whose last sync was made by this run, or `None`."""
    folder = os.path.join(root, "sync")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        known = syscalls.read_json(os.path.join(folder, name)) if name.endswith(".json") else None
        if known and known.get("run") == run and isinstance(known.get("workdir"), str):
            return SyncedWorkdir(known["workdir"], root)
    return None


def _hash_listing(listing: Iterable[tuple[str, Any, Any]]) -> str:
    """Return one hash over paths, permission bits and hashes. The head computes the same hash for a manifest."""
    return hashlib.sha256(json.dumps(sorted(listing)).encode("utf-8", "surrogateescape")).hexdigest()
