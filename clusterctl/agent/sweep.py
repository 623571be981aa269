"""Finding every process of a run, and ending it. Never by name, never by parent, never what another run owns."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.agent import cgroup, proc

if TYPE_CHECKING:
    from clusterctl.agent.marks import Marks
    from clusterctl.agent.proc import Identity, Stat

_ROOT = 0


@dataclass
class Ledger:
    """Who is known to belong to the run, and who must not be touched.

    Attributes:
        workers: Each worker, and the ticks at which it was seen gone (`None` while it lives).
        found: Processes that an earlier look found.
        ours: Supervisor and waiters.
        cgroup: Folder of the run's own cgroup, or `None`.
    """

    workers: dict[Identity, int | None] = field(default_factory=dict)
    found: set[Identity] = field(default_factory=set)
    ours: set[Identity] = field(default_factory=set)
    cgroup: str | None = None


def find(marks: Marks, ledger: Ledger) -> list[Stat]:
    """Return every process of the run on this node that has not ended, and remember it in the ledger.

    One that changed its user may be beyond our signals; it is of the run nevertheless, and has to be named.
    """
    inside = cgroup.members(ledger.cgroup)
    mine = os.getpid()
    result = []
    for pid in proc.pids():
        if pid == mine:
            continue
        found = proc.stat(pid)
        if found is None or found.gone or found.identity in ledger.ours:
            continue
        if pid in inside or _belongs(found, marks, ledger):
            result.append(found)
    ledger.found.update(found.identity for found in result)
    return result


def _belongs(found: Stat, marks: Marks, ledger: Ledger) -> bool:
    pid = found.pid
    known = found.identity in ledger.workers or found.identity in ledger.found
    if known or marks.tagged(pid) or _in_session(found, ledger):
        return True
    # What follows can be copied by a process of somebody else, so its user must be ours.
    if proc.owner(pid) != marks.uid:
        return False
    return marks.named(pid) or proc.writes_output(pid, marks.folder)


def _in_session(found: Stat, ledger: Ledger) -> bool:
    """Whether a process is in the POSIX session of one of the workers.

    The pid of a worker that has ended may be used again, by a new session too: so only who was there before its end
    counts once it has ended. (Who came later carries other marks.)
    """
    for worker, ended in ledger.workers.items():
        if found.sid == worker.pid and found.start_time >= worker.start_time:
            return found.start_time <= ended if ended is not None else proc.alive(worker)
    return False


# --- ending


def end_groups(found: list[Stat], signalled: set[int]) -> None:
    """Send SIGTERM and SIGCONT to every process group that holds one of the processes and had none yet.

    A stopped process acts on SIGTERM only once it is continued. Groups whose leader has ended are reached as well.
    """
    for group in {one.pgid for one in found} - signalled:
        signalled.add(group)
        for number in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


def kill(found: list[Stat], ledger: Ledger) -> None:
    """Send SIGKILL to the processes, their groups and their cgroup."""
    cgroup.kill(ledger.cgroup)
    for group in {one.pgid for one in found}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for one in found:
        if proc.identify(one.pid) == one.identity:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)


def describe(found: Stat) -> dict[str, Any]:
    """Return a survivor and why it is still there: `{pid, start_time, command, why}`."""
    now = proc.stat(found.pid) or found
    place = proc.wchan(found.pid)
    if now.state == "D":
        why = "in an uninterruptible wait" + (f" in {place}" if place else "")
    elif proc.owner(found.pid) not in (os.getuid(), None) and os.getuid() != _ROOT:
        why = "belongs to another user"
    elif proc.exiting(now):
        why = "killed, the kernel has not finished ending it"
    else:
        why = f"still there after SIGKILL, state {now.state}"
    return {"pid": found.pid, "start_time": found.start_time, "command": proc.command(found.pid), "why": why}


def end_all(marks: Marks, ledger: Ledger, grace: float, bound: float = 10.0) -> list[Stat]:
    """Do the whole ladder and wait for it; for who has nothing else to do. Return what is left after `bound` s."""
    signalled: set[int] = set()
    killing, last = time.monotonic() + grace, time.monotonic() + grace + bound
    empty = 0
    found: list[Stat] = []
    while empty < 2 and time.monotonic() < last:
        found = find(marks, ledger)
        empty = 0 if found else empty + 1
        if found and time.monotonic() >= killing:
            kill(found, ledger)
        elif found:
            end_groups(found, signalled)
        time.sleep(0.05)
    return found
