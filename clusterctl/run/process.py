"""The controller as a process of its own: no terminal, own session, nothing shared with the command that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from clusterctl import filelimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.run.store import RunDir


def detach(run: RunDir, work: Callable[[], int]) -> None:
    """Do `work` in a new process that outlives this one; return when it has begun or has failed to.

    Forks rather than executes: secrets need not be passed on, and what is imported stays imported. The caller must not
    have started a thread yet.

    Args:
        run: Its log takes what `work` writes to stdout and stderr.
        work: Returns an exit code. Calls `ready` of this module once it holds the run directory.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _second_fork(run, work, writer)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        pipe.read()


def ready() -> None:
    """Tell the process that detached us that the run directory is ours."""
    if _Ready.fd is not None:
        os.close(_Ready.fd)
        _Ready.fd = None


class _Ready:
    fd: int | None = None


def _second_fork(run: RunDir, work: Callable[[], int], writer: int) -> None:
    """Become a child of init, in a session of our own, and never return."""
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    code = 1
    try:
        _cut_loose(run, writer)
        _Ready.fd = writer
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _cut_loose(run: RunDir, keep: int) -> None:
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(run.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, keep)
    os.closerange(keep + 1, min(limit, 65536))
    filelimit.raise_limit()
