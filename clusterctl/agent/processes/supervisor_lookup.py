"""Finds the supervisor and the waiters of a run on this node."""

from __future__ import annotations

import contextlib
import glob
import os
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.node_state import run_dir, supervisor_lock

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir


def find_supervisor(run: RunDir) -> ProcessIdentity | None:
    """Return the supervisor of a run, or `None`."""
    try:
        sock = supervisor_lock.connect_to_supervisor(run)
    except BlockingIOError:
        pid = supervisor_lock.find_lock_owner(run)
        return None if pid is None else proc.read_identity(pid)
    if sock is None:
        return None
    with sock:
        pid, uid = syscalls.read_peer_credentials(sock)
    return proc.read_identity(pid) if uid == os.getuid() else None


def list_waiters(run: RunDir) -> set[ProcessIdentity]:
    """Return the waiters of all attempts of a run."""
    identities = set()
    for path in glob.glob(os.path.join(glob.escape(run.path), "attempt-*", "rank-*.spawn")):
        spawned = run_dir.read_spawn_record(path)
        if spawned is not None:
            with contextlib.suppress(KeyError):
                identities.add(ProcessIdentity(spawned["waiter_pid"], spawned["waiter_start_time"]))
    return identities


def list_supervisor_and_waiters(run: RunDir) -> set[ProcessIdentity]:
    """Return the supervisor of a run and the waiters of all its attempts."""
    who = find_supervisor(run)
    return list_waiters(run) | ({who} if who is not None else set())
