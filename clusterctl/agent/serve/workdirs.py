"""The code in workdirs: locks while a run starts, removal after the last run, and hashes of files that nobody synced.

Each workdir has one lock file. Runs that rely on the code share the lock; a sync that changes the code takes it alone.
A lock belongs to the open file, so it ends with the session that took it, however the session ends. Once a run is
prepared, its own directory shows that it uses the workdir.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.linux.syscalls import read_bytes
from clusterctl.agent.record import rundir
from clusterctl.agent.record.folders import DEFAULT_WORKDIRS
from clusterctl.agent.record.workspace import Workspace, brought_for

if TYPE_CHECKING:
    from clusterctl.agent.record import workspace
    from clusterctl.agent.record.rundir import RunDir


class WorkdirLock:
    """One workdir, held for one run.

    Attributes:
        run: The run, or `None` for a sync without one.
        fd: Holds the lock.
    """

    def __init__(self, workdir: workspace.Workspace, run: str | None) -> None:
        self.run = run
        workdir.keep()
        self.fd = os.open(workdir.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def wait_for_lock(self) -> str | None:
        """Wait until nobody changes the workdir; return another run that relies on it as it is.

        `None` means that there is none: then it is held alone. To be called where waiting holds up nobody.
        """
        for _ in range(2):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            # Given once who changes it is through; that one may be gone altogether, and the workdir ours alone then.
            fcntl.flock(self.fd, fcntl.LOCK_SH)
        other = os.pread(self.fd, 4096, 0).decode("utf-8", "surrogateescape")
        # A node of this very run on the same machine brings the same code.
        return None if other == self.run else other or "that is being started"

    def try_exclusive(self) -> bool:
        """Return whether nobody else holds the workdir: then it is held alone now."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def downgrade(self) -> None:
        """Rely on the workdir as it is now, together with others; a sync without a run relies on nothing any more."""
        if self.run is None:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, self.run.encode("utf-8", "surrogateescape"), 0)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Hold it no longer."""
        os.close(self.fd)


class WorkdirLocks:
    """The workdirs that one session holds, by their lock files."""

    def __init__(self) -> None:
        self._locks: dict[str, WorkdirLock] = {}

    def get(self, workdir: workspace.Workspace, run: str | None) -> WorkdirLock:
        """Return the hold on a workdir for a run; its lock is still to be waited for."""
        lock = self._locks.get(workdir.lock_file)
        if lock is None or lock.run != run:
            self.release(workdir)
            lock = self._locks[workdir.lock_file] = WorkdirLock(workdir, run)
        return lock

    def downgrade(self, workdir: workspace.Workspace) -> None:
        """Rely on a workdir as it is now: what was to be brought is there."""
        lock = self._locks.get(workdir.lock_file)
        if lock is not None:
            lock.downgrade()

    def release(self, workdir: workspace.Workspace) -> None:
        """Hold a workdir no longer."""
        lock = self._locks.pop(workdir.lock_file, None)
        if lock is not None:
            lock.close()

    def release_run(self, run: str) -> None:
        """Hold nothing for a run any longer."""
        for file in [file for file, lock in self._locks.items() if lock.run == run]:
            self._locks.pop(file).close()


def find_removable_code(run: RunDir) -> Workspace | None:
    """Return the workdir of a run whose code nobody needs once that run is gone from this node.

    A run whose start failed before it was prepared here has the one that was synced for it. `None` where a person
    chose the folder, where another run of this node has the same or does not say which, where other machines may share
    it (nobody here knows their runs), and where it was synced again since: for something that is no run.
    """
    workdir = _read_workdir(run)
    if not workdir or not workdir.startswith(os.path.expanduser(DEFAULT_WORKDIRS) + "/"):
        return None
    if rundir.is_network(workdir):
        return None
    for other in rundir.runs(run.root):
        if other != run:
            others = _read_workdir(other)
            if others is None or (others and os.path.realpath(others) == os.path.realpath(workdir)):
                return None
    workspace = Workspace(workdir, run.root)
    return None if workspace.brought_for() is None else workspace


def remove_code(workdir: Workspace) -> int:
    """Remove the code that syncs brought, unless somebody has changed it or is about to use it; return the bytes.

    What a job or a person has written there stays.
    """
    lock = WorkdirLock(workdir, None)
    try:
        return workdir.forget() if lock.try_exclusive() else 0
    finally:
        lock.close()


def _read_workdir(run: RunDir) -> str | None:
    """Return where a run has its code: nowhere (empty) where it never came to that, `None` where nobody can tell."""
    if not os.path.exists(run.prepare):
        workdir = brought_for(run.run, run.root)
        return "" if workdir is None else workdir.folder
    workdir = (syscalls.read_json(run.prepare) or {}).get("workdir")
    return workdir if isinstance(workdir, str) else None


_SOURCE_SUFFIXES = (".py", ".sh", ".pyx", ".cu", ".cpp", ".c", ".h")
_MAX_SOURCE_FILES = 2000
_MAX_HASHED_BYTES = 1 << 20


def hash_source_files(folder: str) -> dict[str, str]:
    """Return the SHA-256 of each source file by its path below `folder`; bounded, and blind to what is hidden.

    Folders of virtual environments, caches and hidden ones are left out, as is all beyond the first 2000 files.
    """
    by_path: dict[str, str] = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_code(os.path.join(parent, name)))
        for name in sorted(files):
            if name.endswith(_SOURCE_SUFFIXES) and not name.startswith("."):
                if len(by_path) >= _MAX_SOURCE_FILES:
                    return by_path
                path = os.path.join(parent, name)
                by_path[os.path.relpath(path, folder)] = hashlib.sha256(read_bytes(path, _MAX_HASHED_BYTES)).hexdigest()
    return by_path


def _is_code(folder: str) -> bool:
    name = os.path.basename(folder)
    hidden = name.startswith(".") or name in ("__pycache__", "node_modules", "site-packages")
    return not hidden and not os.path.exists(os.path.join(folder, "pyvenv.cfg"))
