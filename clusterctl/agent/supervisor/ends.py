"""How a worker ended: by the word of its waiter, or else by its wait status where it became our own child."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import proc
from clusterctl.agent.record import rank_files

if TYPE_CHECKING:
    from clusterctl.agent.linux.proc import Identity
    from clusterctl.agent.supervisor.workers import Worker

_UNKNOWN_WAITER_SECONDS = 2.0
"""How long a waiter of which nobody knows the pid may take to write down how its worker ended."""


def end_of(worker: Worker, path: str, make_way: Callable[[], None]) -> dict[str, Any] | None:
    """Return what `waiter.read_exit` says, or would have said; `None` while the worker lives, or its waiter has a say.

    Args:
        worker: Who; it is noted when it was last seen alive.
        path: Its exit file.
        make_way: Called while its waiter has yet to write that, for which the disk may be too full.
    """
    if proc.alive(worker.waiter):
        # Between the file and the end of the waiter lies nothing that could go wrong.
        said = rank_files.read_exit(path)
        if said is None and not proc.alive(worker.identity):
            _wake(worker.waiter)
            make_way()
        return said
    if worker.status is None and proc.alive(worker.identity):
        worker.seen = time.monotonic()
        return None
    said = rank_files.read_exit(path)
    if said is None and not worker.waiter.pid and time.monotonic() - worker.seen < _UNKNOWN_WAITER_SECONDS:
        return None
    _take_status(worker)
    return said or _from_status(worker)


def _wake(who: Identity) -> None:
    """Let a waiter go on that has something to write down and was stopped, by whomever."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(who.pid, signal.SIGCONT)


def _take_status(worker: Worker) -> None:
    """Reap a worker that became our own child, where nobody has done so yet."""
    if worker.status is None and worker.identity.pid:
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(worker.identity.pid, os.WNOHANG)
            worker.status = status if pid else None


def _from_status(worker: Worker) -> dict[str, Any]:
    """Return how a worker ended whose waiter was gone: by its status where it became our child, else nobody knows."""
    now = time.monotonic()
    said: dict[str, Any] = {"exit_code": None, "signal": None, "earliest": worker.seen, "mono": now}
    if worker.status is not None:
        if os.WIFSIGNALED(worker.status):
            said["signal"] = os.WTERMSIG(worker.status)
        else:
            said["exit_code"] = os.WEXITSTATUS(worker.status)
    return said
