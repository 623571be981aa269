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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import request_errors
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
    """What a sync has to do to a workdir.

    Attributes:
        need: Files whose content has to come.
        modes: Files that have other permissions, and those that they are to have.
        gone: What an earlier sync brought and this one does not have.
        hashes: Size, time, inode and hash of the files that were read.
    """

    changed_files: list[str]
    modes: list[tuple[str, int]]
    removed: list[str]
    hashes: dict[str, Any]

    @property
    def changed(self) -> list[str]:
        """All files that will be another."""
        return [*self.changed_files, *self.removed, *(path for path, _ in self.modes)]


@dataclass
class SyncedWorkdir(FileTree):
    """One workdir and what is known of it.

    Attributes:
        folder: The workdir.
        root: The state root.
        lock_file: A file whose lock stands for the workdir (`holds`).
    """

    root: str

    def __post_init__(self) -> None:
        name = hashlib.sha256(os.fsencode(os.path.realpath(self.folder))).hexdigest()[:32]
        place = os.path.join(self.root, "sync")
        self._file = os.path.join(place, f"{name}.json")
        self.lock_file = os.path.join(place, f"{name}.lock")

    def make_state_dir(self) -> None:
        """Make the folder in which it is written down what is known of workdirs."""
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
        """Return the files that the last sync left here."""
        return list(self._read_state()["files"])

    def read_sync_stamp(self) -> tuple[int, int] | None:
        """Return what is another one as soon as a sync has begun here; `None` where none ever did."""
        try:
            status = os.stat(self._file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def read_synced_run(self) -> str | None:
        """Return the run for which a sync was here last; `None` where none was, or where it was for no run."""
        run = self._read_state()["run"]
        return run if isinstance(run, str) else None

    def remove_synced_files(self) -> int:
        """Remove what syncs brought and nobody has changed, and the workdir if nothing else is there; return bytes."""
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

    # --- looking

    def diff(self, files: dict[str, list[Any]]) -> SyncDiff:
        """Return what a sync of files would do; nothing is changed.

        Args:
            files: Path to size, mode and hash.

        Raises:
            RequestError: A path leads outside.
        """
        for path in files:
            check_relative_path(path)
        remembered = self._read_state()
        fresh: dict[str, Any] = {}
        need, modes = [], []
        for path, (size, mode, digest) in files.items():
            entry = self.read_entry(path, remembered["hashes"], fresh)
            if entry is None or not has_same_content(entry, (size, mode, digest)):
                need.append(path)
            elif entry[1] != mode:
                modes.append((path, mode))
        gone = [
            path for path in remembered["files"] if path not in files and self._is_unchanged(path, remembered, fresh)
        ]
        return SyncDiff(changed_files=need, modes=modes, removed=gone, hashes=fresh)

    def prepare_sync(self, files: dict[str, list[Any]], live: str | None, run: str | None = None) -> list[str]:
        """Return which files have to be sent, after removing what an earlier sync brought and this one does not have.

        Args:
            files: Path to size, mode and hash.
            live: Another run that uses this workdir now, or `None`.
            run: The one for which they are brought, if any.

        Raises:
            RequestError: A path leads outside, something would change under that run, or there is no space.
        """
        found = self.diff(files)
        changed = found.changed
        if changed and live is not None:
            many = f"{len(changed)} files" if len(changed) > 1 else "1 file"
            raise request_errors.make_refused_error(
                f"run {live} uses {self.folder}, and {many} would change under it, `{changed[0]}` first",
                f"wait for it, `clusterctl down {live}`, or set another `workdir`",
            )
        make_workdir(self.folder)
        for path, mode in found.modes:
            self.chmod(path, mode)
        for path in found.removed:
            self._remove_with_bytecode(path)
        lacking = set(found.changed_files)
        refuse_without_space(self.folder, [(path, files[path][0]) for path in found.changed_files])
        self._save({path: entry for path, entry in files.items() if path not in lacking}, found.hashes, run)
        return found.changed_files

    def find_change(self, code_hash: str) -> str | None:
        """Return in what the workdir differs from the manifest with this hash, in words, or `None` where it does not.

        Permissions do not count: there are file systems that keep none.
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
        """Return one hash over the files that the last sync left here, as they are now; `None` where there was none.

        It is the hash of the manifest that was synced where nothing has changed since.
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
        """Whether a file is still the one that a sync brought; what a person has edited since is theirs."""
        entry = self.read_entry(check_relative_path(path), known["hashes"], fresh)
        fresh.pop(path, None)
        return entry is not None and entry[2] == known["files"][path][2]

    def _remove_with_bytecode(self, path: str) -> None:
        for made in self._list_bytecode(path):
            self._remove(made)
        self._remove(path)

    def _list_bytecode(self, path: str) -> list[str]:
        """Return the files beside one of Python that Python makes of it."""
        folder, _, name = path.rpartition("/")
        if not name.endswith(".py"):
            return []
        place = f"{folder}/__pycache__" if folder else "__pycache__"
        try:
            parent, _ = self.open_parent(f"{place}/any", make=False)
        except OSError:
            return []
        try:
            found = os.listdir(parent)
        finally:
            os.close(parent)
        return [f"{place}/{one}" for one in found if one.startswith(name[:-2]) and one.endswith(".pyc")]

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            parent, name = self.open_parent(path, make=False)
            try:
                os.unlink(name, dir_fd=parent)
            finally:
                os.close(parent)
            # Folders that this leaves empty go too, up to the workdir.
            while "/" in path:
                path = path.rpartition("/")[0]
                parent, name = self.open_parent(path, make=False)
                try:
                    os.rmdir(name, dir_fd=parent)
                finally:
                    os.close(parent)

    def _save(self, files: dict[str, Any], hashes: dict[str, Any], run: str | None) -> None:
        self.make_state_dir()
        syscalls.write_json(self._file, {"workdir": self.folder, "run": run, "files": files, "hashes": hashes})

    def make_receiver(self, files: list[list[Any]]) -> FileReceiver:
        """Return what takes the content of files in, in that order; `compare` has looked at their paths."""
        return FileReceiver(self, files, self._save_received)

    def _save_received(self, files: list[list[Any]], hashes: dict[str, Any]) -> None:
        """Write down what a sync has brought, and the hashes of those files as they lie there now."""
        remembered = self._read_state()
        remembered["files"].update({path: rest for path, *rest in files})
        self._save(remembered["files"], {**remembered["hashes"], **hashes}, remembered["run"])


def find_synced_workdir(run: str, root: str) -> SyncedWorkdir | None:
    """Return the workdir that was last synced for a run, if there is one."""
    folder = os.path.join(root, "sync")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        known = syscalls.read_json(os.path.join(folder, name)) if name.endswith(".json") else None
        if known and known.get("run") == run and isinstance(known.get("workdir"), str):
            return SyncedWorkdir(known["workdir"], root)
    return None


def _hash_listing(listing: Iterable[tuple[str, Any, Any]]) -> str:
    """Return one hash over paths, permission bits and hashes; the head computes the same over a manifest."""
    return hashlib.sha256(json.dumps(sorted(listing)).encode("utf-8", "surrogateescape")).hexdigest()
