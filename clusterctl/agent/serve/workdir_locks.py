"""The code in workdirs: locks while a run starts, and removal after the last run.

Each workdir has one lock file. Runs that rely on the code share the lock; a sync that changes the code takes it alone.
A lock belongs to the open file, so it ends with the session that took it, however the session ends. Once a run is
prepared, its own directory shows that it uses the workdir.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.workdir.file_tree import DEFAULT_WORKDIRS
from clusterctl.agent.workdir.synced_code import SyncedWorkdir, find_synced_workdir

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.workdir import synced_code


class WorkdirLock:
    """The lock on one workdir, for one run.

    Attributes:
        run: The run, or `None` for a sync without a run.
        fd: The open lock file.
    """

    def __init__(self, workdir: synced_code.SyncedWorkdir, run: str | None) -> None:
        self.run = run
        workdir.make_state_dir()
        self.fd = os.open(workdir.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def wait_for_lock(self) -> str | None:
        """Wait until no sync changes the workdir; return another run that relies on its code, or `None`.

        If there is no other run, the lock is exclusive afterwards. This call may block for long.
        """
        for _ in range(2):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            # The shared lock is granted when the writer has finished. It may have released the workdir, so try the
            # exclusive lock again.
            fcntl.flock(self.fd, fcntl.LOCK_SH)
        other = os.pread(self.fd, 4096, 0).decode("utf-8", "surrogateescape")
        # Another node of the same run on this machine syncs the same code.
        return None if other == self.run else other or "that is being started"

    def try_exclusive(self) -> bool:
        """Take the exclusive lock if no other process holds it; return whether that worked."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def downgrade(self) -> None:
        """Share the lock from now on: the run relies on the present code. A sync without a run releases it."""
        if self.run is None:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, self.run.encode("utf-8", "surrogateescape"), 0)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock."""
        os.close(self.fd)


class WorkdirLocks:
    """The workdir locks of one session, by lock file."""

    def __init__(self) -> None:
        self._locks: dict[str, WorkdirLock] = {}

    def get(self, workdir: synced_code.SyncedWorkdir, run: str | None) -> WorkdirLock:
        """Return the lock of a workdir for a run; the caller must still wait for it."""
        lock = self._locks.get(workdir.lock_file)
        if lock is None or lock.run != run:
            self.release(workdir)
            lock = self._locks[workdir.lock_file] = WorkdirLock(workdir, run)
        return lock

    def downgrade(self, workdir: synced_code.SyncedWorkdir) -> None:
        """Share the lock of a workdir: its code has arrived."""
        lock = self._locks.get(workdir.lock_file)
        if lock is not None:
            lock.downgrade()

    def release(self, workdir: synced_code.SyncedWorkdir) -> None:
        """Release the lock of a workdir."""
        lock = self._locks.pop(workdir.lock_file, None)
        if lock is not None:
            lock.close()

    def release_run(self, run: str) -> None:
        """Release all locks of a run."""
        for file in [file for file, lock in self._locks.items() if lock.run == run]:
            self._locks.pop(file).close()


def find_removable_code(run: RunDir) -> SyncedWorkdir | None:
    """Return the workdir of a run if its code may be removed together with the run, else `None`.

    If the start failed before the run was prepared here, that is the workdir that was synced for it. The code stays if
    a person chose the folder, if another run on this node uses it or does not name its workdir, if it is on a network
    file system (runs of other machines may use it), or if it was synced again for something other than a run.
    """
    workdir = _read_workdir(run)
    if not workdir or not workdir.startswith(os.path.expanduser(DEFAULT_WORKDIRS) + "/"):
        return None
    if run_dir.is_on_network_filesystem(workdir):
        return None
    for other in run_dir.list_run_dirs(run.root):
        if other != run:
            others = _read_workdir(other)
            if others is None or (others and os.path.realpath(others) == os.path.realpath(workdir)):
                return None
    workspace = SyncedWorkdir(workdir, run.root)
    return None if workspace.read_synced_run() is None else workspace


def remove_code(workdir: SyncedWorkdir) -> int:
    """Remove the code that syncs wrote, unless it has changed or a sync is about to use it; return the bytes freed.

    Files that a job or a person wrote stay.
    """
    lock = WorkdirLock(workdir, None)
    try:
        return workdir.remove_synced_files() if lock.try_exclusive() else 0
    finally:
        lock.close()


def _read_workdir(run: RunDir) -> str | None:
    """Return the workdir of a run; "" if the run was never synced here, `None` if its record cannot be read."""
    if not os.path.exists(run.prepare_file):
        workdir = find_synced_workdir(run.run, run.root)
        return "" if workdir is None else workdir.folder
    workdir = (syscalls.read_json(run.prepare_file) or {}).get("workdir")
    return workdir if isinstance(workdir, str) else None
