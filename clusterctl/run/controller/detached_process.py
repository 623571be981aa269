"""Starts the controller as a detached process: without a terminal, in a session of its own."""

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
from clusterctl.agent.linux import syscalls
from clusterctl.errors import ClusterctlError, ExitCode
from clusterctl.run.record.rundir import RunDir

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals with which a user ends a command. A controller takes commands only from its socket."""

_READY = b"ready"


class ControllerEndedError(ClusterctlError):
    """A controller ended before it was ready."""


def defer_signals() -> None:
    """Block the signals that would end this process, until a handler for them is ready.

    Unblock `DEFERRED_SIGNALS` afterwards. A process that is detached meanwhile does not inherit the blocked signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED_SIGNALS)


def run_detached(run: RunDir, work: Callable[[], int]) -> None:
    """Do `work` in a new process that outlives this process; return when the new process is ready.

    The new process is a fork without exec, so that it keeps secrets and imported modules. The caller must not have
    started a thread.

    Args:
        run: The run directory. The file `log` there receives stdout and stderr of `work`.
        work: A function that calls `report_ready` once it holds the lock of the run directory, and returns an exit
            code.

    Raises:
        ControllerEndedError: The new process ended before it was ready. The log of the run has the reason.
        ClusterctlError: `work` raised this error before it called `report_ready`.
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


def _parse_failure(run: RunDir, report: bytes) -> ClusterctlError:
    try:
        failure = json.loads(report)
        error = ClusterctlError(failure["message"], hint=failure["hint"])
        error.exit_code = ExitCode(failure["exit_code"])
    except (ValueError, LookupError, TypeError):
        return ControllerEndedError(f"the controller of {run.run} ended at its start", hint=f"{run.log} says why")
    return error


def report_ready() -> None:
    """Tell the parent that this process holds the lock of the run directory."""
    _report(_READY)


class _ReportPipe:
    """The pipe to the parent of the detached process. It is closed after the report."""

    fd: int | None = None


def _report(words: bytes) -> None:
    if _ReportPipe.fd is not None:
        with contextlib.suppress(OSError):
            os.write(_ReportPipe.fd, words)
        os.close(_ReportPipe.fd)
        _ReportPipe.fd = None


def _second_fork(run: RunDir, work: Callable[[], int], writer: int) -> None:
    """Become a child of init in a new session, do the work and exit."""
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    code = 1
    try:
        _daemonize(run, writer)
        syscalls.set_process_title(f"clusterctl-controller {run.run}")
        _ReportPipe.fd = writer
        code = work()
    except ClusterctlError as error:
        traceback.print_exc()
        failure = {"message": str(error), "hint": error.hint, "exit_code": int(error.exit_code)}
        _report(json.dumps(failure).encode())
        code = int(error.exit_code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_GC_DEFAULTS = 700, 10, 10
"""The default thresholds of the garbage collector (`gc.get_threshold` of 3.11)."""


def _daemonize(run: RunDir, keep: int) -> None:
    # Short commands raise the thresholds of the garbage collector. This process may run for months.
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
    rlimits.disable_own_core_dumps()
