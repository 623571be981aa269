"""The controller as a process of its own: no terminal, own session, nothing shared with the command that started it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable

from clusterctl import rlimits
from clusterctl.errors import ClusterctlError, ExitCode
from clusterctl.run.record.rundir import RunDir

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a person sends who wants something to end; a controller takes its orders otherwise."""

_READY = b"ready"


class ControllerEndedError(ClusterctlError):
    """A controller ended before it had begun."""


def defer_signals() -> None:
    """Let signals wait from now on that would end this process, until somebody is there to heed them.

    Whoever does unblocks `DEFERRED_SIGNALS`. What is detached meanwhile does not inherit that.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED_SIGNALS)


def detach(run: RunDir, work: Callable[[], int]) -> None:
    """Do `work` in a new process that outlives this one; return when it has begun.

    Forks rather than executes: secrets need not be passed on, and what is imported stays imported. The caller must not
    have started a thread yet.

    Args:
        run: Its log takes what `work` writes to stdout and stderr.
        work: Returns an exit code. Calls `ready` of this module once it holds the run directory.

    Raises:
        ControllerEndedError: It ended before that, and its log says why.
        ClusterctlError: What it raised itself before that.
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
        report = pipe.read()
    if report != _READY:
        raise _parse_failure(run, report)


def _parse_failure(run: RunDir, said: bytes) -> ClusterctlError:
    try:
        told = json.loads(said)
        error = ClusterctlError(told["message"], hint=told["hint"])
        error.exit_code = ExitCode(told["exit_code"])
    except (ValueError, LookupError, TypeError):
        return ControllerEndedError(f"the controller of {run.run} ended at its start", hint=f"{run.log} says why")
    return error


def report_ready() -> None:
    """Tell the process that detached us that the run directory is ours."""
    _report(_READY)


class _ReportPipe:
    """Where the process listens that detached this one, until it has been told how that went."""

    fd: int | None = None


def _report(words: bytes) -> None:
    if _ReportPipe.fd is not None:
        with contextlib.suppress(OSError):
            os.write(_ReportPipe.fd, words)
        os.close(_ReportPipe.fd)
        _ReportPipe.fd = None


def _second_fork(run: RunDir, work: Callable[[], int], writer: int) -> None:
    """Become a child of init, in a session of our own, and never return."""
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    code = 1
    try:
        _daemonize(run, writer)
        _set_process_title(f"clusterctl-controller {run.run}")
        _ReportPipe.fd = writer
        code = work()
    except ClusterctlError as error:
        traceback.print_exc()
        told = {"message": str(error), "hint": error.hint, "exit_code": int(error.exit_code)}
        _report(json.dumps(told).encode())
        code = int(error.exit_code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_GC_DEFAULTS = 700, 10, 10
"""When Python looks for circles of values, where nothing else was said (`gc.get_threshold` of 3.11)."""
_ARGUMENTS_BEGIN = 48
"""Which field of `/proc/self/stat` says where our words begin in our memory; the next one says where they end."""


def _set_process_title(title: str) -> None:
    """Have `ps` show a title instead of the command that made this process; it is cut to the room that one took.

    Where the kernel does not let us, nothing changes.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        begin, end = (int(field) for field in fields[_ARGUMENTS_BEGIN - 3 :][:2])
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            with open("/proc/self/cmdline", "rb") as file:
                shown = file.read()
            if shown and os.pread(memory, len(shown), begin) == shown and len(shown) == end - begin:
                os.pwrite(memory, title.encode()[: len(shown) - 1].ljust(len(shown), b"\0"), begin)
        finally:
            os.close(memory)


def _daemonize(run: RunDir, keep: int) -> None:
    # A command is over soon, and looks for circles of values seldom. This process lives for months.
    gc.set_threshold(*_GC_DEFAULTS)
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFERRED_SIGNALS)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(run.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, keep)
    os.closerange(keep + 1, min(limit, 65536))
    rlimits.raise_open_files_limit()
    rlimits.disable_core_dumps()
