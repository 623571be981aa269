"""Starting the supervisor of a run: a process of its own that depends on nothing of who started it."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from typing import TYPE_CHECKING

from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.node_state import supervisor_lock
from clusterctl.agent.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir


READY = b"ready\n"

TAKEN = b"taken\n"


def start(run: RunDir) -> tuple[int, int]:
    """Fork a supervisor that outlives this process; to be called in a process with one thread.

    It is forked twice, so that it is never our child, and in a session of its own. It executes nothing: all that it
    needs is loaded here already, and a start waits for it.

    Returns:
        The pid of a short-lived child, and a descriptor from which READY or TAKEN (or nothing) can be read.
    """
    pid, read, write = syscalls.fork_with_pipes()
    if pid == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _supervise(run, write)
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def _supervise(run: RunDir, report: int) -> None:
    try:
        _detach(run, {report})
        _serve(run, report)
    except BaseException:
        traceback.print_exc()
        raise


def _serve(run: RunDir, report: int) -> None:
    """Be the supervisor of a run."""
    try:
        place = supervisor_lock.SupervisorLock(run)
    except BlockingIOError:
        os.write(report, TAKEN)
        return
    supervisor = Supervisor(run, place)
    with contextlib.suppress(OSError):
        os.write(report, READY)
    os.close(report)
    supervisor.serve()
    place.release()


def _detach(run: RunDir, keep: set[int]) -> None:
    """Depend on nothing of who started us: no terminal, no folder, no descriptor, no signal."""
    run.make()
    os.chdir("/")
    spawn.reset_signals()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1):
        os.dup2(null, target)
    log = os.open(run.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(log, 2)
    spawn.close_descriptors(keep)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    spawn.disable_core_dumps()
    syscalls.become_subreaper()
    syscalls.set_process_name("clusterctl-supv")
    # Others see it: by the names of run and node they would know the marks of its processes.
    syscalls.set_process_title(f"clusterctl-agent supervise {run.short}")
