"""Locks on workdirs while runs start, and the removal of code after the last run.

Each workdir has a lock file. A sync that changes the code holds an exclusive lock. A run that uses the code holds a
shared lock until the run is prepared. After that, the run directory shows that the run uses the workdir. A lock belongs
to the open file, so it ends with the session.
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
        fd: Descriptor of the lock file.
    """

    def __init__(self, workdir: synced_code.SyncedWorkdir, run: str | None) -> None:
        self.run = run
        workdir.make_state_dir()
        self.fd = os.open(workdir.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def wait_for_lock(self) -> str | None:
        """Wait, perhaps for long, until no other sync changes the workdir.

        Returns:
            Another run that uses the code, or `None`. Without another run, the lock is now exclusive, or shared with
            other nodes of the same run.
        """
        for _ in range(2):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            # Wait until the other sync has ended. The workdir may then be free, so try the exclusive lock again.
            fcntl.flock(self.fd, fcntl.LOCK_SH)
        other = os.pread(self.fd, 4096, 0).decode("utf-8", "surrogateescape")
        # If another node of the same run is on this machine, both sync the same code.
        return None if other == self.run else other or "that is being started"

    def try_exclusive(self) -> bool:
        """Take the exclusive lock if no other process holds a lock; return whether the lock was taken."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def downgrade(self) -> None:
        """Change the exclusive lock to a shared one, because the code has arrived. Without a run, release the lock."""
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
        """Return the lock object of a workdir for a run; the object holds no lock before `wait_for_lock`."""
        lock = self._locks.get(workdir.lock_file)
        if lock is None or lock.run != run:
            self.release(workdir)
            lock = self._locks[workdir.lock_file] = WorkdirLock(workdir, run)
        return lock

    def downgrade(self, workdir: synced_code.SyncedWorkdir) -> None:
        """Change the lock of a workdir to a shared one, because its code has arrived."""
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


def find_removable_workdir(run: RunDir) -> SyncedWorkdir | None:
    """Return the workdir of a run, or `None` if the code in this workdir must stay when the run is removed.

    If the run was not prepared on this node, its workdir is the folder of its sync. The code must stay if the user
    chose the folder, or if the last sync to the folder was without a run. The code must also stay if other runs may use
    it: on a network filesystem, or if another run on this node has the same workdir or an unknown workdir.
    """
    workdir = _read_workdir(run)
    if not workdir or not workdir.startswith(os.path.expanduser(DEFAULT_WORKDIRS) + "/"):
        return None
    if run_dir.is_on_network_filesystem(workdir):
        return None
    for other in run_dir.list_run_dirs(run.root):
        if other != run:
            used = _read_workdir(other)
            if used is None or (used and os.path.realpath(used) == os.path.realpath(workdir)):
                return None
    synced = SyncedWorkdir(workdir, run.root)
    return None if synced.read_synced_run() is None else synced


def remove_synced_code(workdir: SyncedWorkdir) -> int:
    """Remove the files that a sync wrote to a workdir; return the number of freed bytes.

    Files that a job or a person has written or changed are not removed. If a sync uses the workdir, remove nothing.
    """
    lock = WorkdirLock(workdir, None)
    try:
        return workdir.remove_synced_files() if lock.try_exclusive() else 0
    finally:
        lock.close()


def _read_workdir(run: RunDir) -> str | None:
    """Return the workdir of a run; "" if the run was never synced here, `None` if `prepare.json` cannot be read."""
    if not os.path.exists(run.prepare_file):
        workdir = find_synced_workdir(run.run, run.root)
        return "" if workdir is None else workdir.folder
    workdir = (syscalls.read_json(run.prepare_file) or {}).get("workdir")
    return workdir if isinstance(workdir, str) else None
