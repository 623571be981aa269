"""Records the first failed child process or future of a rank's Python code, because the code may ignore the failure.

A child process of `multiprocessing`, and a script that `subprocess` has started, record the exception that ends them.
The parent process records the exit code or signal of such a child, unless the parent itself has ended the child.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

from .file_writer import create_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_EXIT_PRIORITY = 100
_MAX_MESSAGE_LENGTH = 2048
_LOST_BY_FORKSERVER = 255
_LARGE_BYTES, _RECENT_S = 1 << 20, 5.0
_KILL = 9
# HUP, INT, QUIT, ABRT, KILL and TERM, by number, because the module `signal` would import `enum`.
_ENDING_SIGNALS = (1, 2, 3, 6, 9, 15)
_ORDERLY_SIGNALS = (1, 2, 13, 15)
"""HUP, INT, PIPE, TERM: another process has asked for the end, or has closed the pipe."""
FUTURE_PREFIX = "future: "
"""The prefix of the message about a failed future. In this case no process has failed."""
_RUNS_A_SCRIPT = r"(?:\S*/)?(?:python[\d.]*(?: -[a-zA-Z]+)* \S+\.py|torchrun|accelerate|deepspeed)(?=\s|$)"


class ChildFailureRecorder:
    """Writes the file about the first failed child of a rank or of its descendants.

    An exception in a worker process of a pool or data loader is not recorded, because the worker process continues and
    the caller gets the exception.
    """

    def __init__(self, status_dir: str, rank: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.child.json")
        self._system = os.path.join(status_dir, f"rank-{rank}.system")
        self._sent_signals: dict[int, set[int]] = {}
        self._is_recording_signals = False
        self.hooks: dict[str, Callable[[Any], None]] = {
            "multiprocessing.util": self._record_own_exception,
            "multiprocessing.popen_fork": self._watch_children,
            "subprocess": self._watch_children,
            "concurrent.futures._base": lambda module: _FutureError(self._write_failure).attach(module.Future),
        }

    def watch_script(self, watch_exit: Callable[[Callable[[str, str, str], None]], None]) -> None:
        """Record a failure of this process if it runs a script. Call this method only if this process is not the rank.

        A shell between this process and the rank may hide the exit code. The shim cannot see the exit code that
        `os.system` returns in the rank, so a script below `os.system` records its own exit code.

        Args:
            watch_exit: A function that registers another function. At its end, this process calls the registered
                function with the kind of the end, the message of a failure, and the traceback.
        """
        if not (sys.argv[:1] and sys.argv[0].endswith(".py")):
            return
        if os.path.exists(self._system):
            watch_exit(lambda _end, message, _trace: self._write_failure(os.getpid(), message) if message else None)
            return

        pid = os.getpid()
        atexit.register(lambda: self._write_error(getattr(sys, "last_value", None)) if os.getpid() == pid else None)

    def _watch_children(self, module: Any) -> None:
        """Observe the exit codes of `Popen` objects. A program that waits for a `Popen` has no frame of the shim."""
        module.Popen.returncode = _ReturnCode(self.record_exit)
        self.record_signals()

    def record_signals(self) -> None:
        """From now on, record the signals that this process sends and whether it uses `os.system` for a script."""
        if not self._is_recording_signals:
            self._is_recording_signals = True
            # Wrappers around the functions of `os` would add their frames to the stack of a signal handler.
            sys.addaudithook(self._note_event)

    def _note_event(self, event: str, arguments: Any) -> None:
        if event == "os.system" and _runs_script(arguments[0], anywhere=True):
            create_file(self._system)
        if event == "os.kill":
            pid, signal = arguments
            if signal in _ENDING_SIGNALS and _is_alive(pid):
                self._sent_signals.setdefault(pid, set()).add(int(signal))
                util: Any = sys.modules.get("multiprocessing.util")
                # At its exit Python ends the daemons of `multiprocessing`.
                path = _find_unfinished_file(pid) if util is not None and util.is_exiting() else None
                if path is not None:
                    self._write_failure(pid, f"SIGTERM at the end of the rank, while writing {path}")

    def record_exit(self, popen: Any, code: int) -> None:
        """Record the failure of a child: `code` is an exit code other than 0, or a negative signal number."""
        command = getattr(popen, "args", None)
        if command is not None and not _runs_script(command):
            return
        sent = self._sent_signals.get(popen.pid, set())
        # A broken pool sends SIGTERM to all its processes, also to a process that was already killed.
        is_killed_by_another = code == -_KILL and _KILL not in sent
        if (sent and not is_killed_by_another) or -code in _ORDERLY_SIGNALS or code == _LOST_BY_FORKSERVER:
            return
        if command is None and _is_daemon_at_exit(popen):
            return
        import signal

        try:
            message = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            message = f"signal {-code}"
        self._write_failure(popen.pid, message)

    def _record_own_exception(self, module: Any) -> None:
        """Record the exception that ends this process or one of its forked children."""

        def begin(util: Any) -> None:
            util.Finalize(None, self._finish, exitpriority=_EXIT_PRIORITY)

        # A spawned process calls no fork hook, so register here. A forked child loses the registrations of its parent.
        begin(module)
        module.register_after_fork(module, begin)

    def _finish(self) -> None:
        """Record the exception that ends the process. `multiprocessing` calls this while the exception propagates."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # `torch.multiprocessing` raises SystemExit after an exception.
            error = error.__context__ if error.code else None
        if not isinstance(error, Exception) or (_is_daemon() and isinstance(error, (OSError, EOFError))):
            # The end of the parent closes the pipes of a daemon. In the daemon this raises these errors.
            return
        self._write_error(error)

    def _write_error(self, error: object) -> None:
        if not isinstance(error, Exception):
            return
        import traceback

        self._write_failure(os.getpid(), "".join(traceback.format_exception_only(type(error), error)).strip())

    def _write_failure(self, pid: int, message: str) -> None:
        """Record the failure of a process, unless an earlier failure is already recorded."""
        import json

        record = json.dumps({"pid": pid, "message": message[:_MAX_MESSAGE_LENGTH]}).encode()
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # The file exists, so an earlier failure is recorded.
            return
        try:
            os.write(file, record)
        except OSError:
            return
        finally:
            os.close(file)


class _ReturnCode:
    """A descriptor for the attribute `returncode` of `Popen`, which calls `on_failure` with a failing exit code."""

    def __init__(self, on_failure: Callable[[Any, int], None]) -> None:
        self._on_failure = on_failure

    def __get__(self, popen: Any, owner: Any = None) -> Any:
        if popen is None:
            return self
        try:
            return vars(popen)["returncode"]
        except KeyError:
            raise AttributeError("returncode") from None

    def __set__(self, popen: Any, code: Any) -> None:
        is_first = vars(popen).get("returncode") is None
        vars(popen)["returncode"] = code
        if is_first and code:
            try:
                self._on_failure(popen, code)
            except Exception:  # No exception of the shim may reach user code.
                return

    def __delete__(self, popen: Any) -> None:
        del vars(popen)["returncode"]


class _FutureError:
    """A descriptor for the attribute `_exception` of `Future`.

    At exit the descriptor records the first exception of a future, if the program has read no exception of any future.
    """

    def __init__(self, write_failure: Callable[[int, str], None]) -> None:
        self._write_failure = write_failure
        self._pid = os.getpid()
        self._message = ""
        self._was_read = False

    def attach(self, future_class: Any) -> None:

        future_class._exception = self  # noqa: SLF001
        atexit.register(self._finish)

    def __get__(self, future: Any, owner: Any = None) -> Any:
        if future is None:
            return self
        try:
            error = vars(future)["_exception"]
        except KeyError:
            raise AttributeError("_exception") from None
        self._was_read = self._was_read or error is not None
        return error

    def __set__(self, future: Any, error: Any) -> None:
        vars(future)["_exception"] = error
        # Store only the text, because the frames of an exception keep memory in use.
        if isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)) and not self._message:
            text = str(error).strip().partition("\n")[0]
            self._message = f"{FUTURE_PREFIX}{type(error).__name__}: {text}"

    def _finish(self) -> None:
        if self._message and not self._was_read and os.getpid() == self._pid:
            self._write_failure(self._pid, self._message)


def _is_daemon() -> bool:
    process: Any = sys.modules.get("multiprocessing.process")
    return bool(process is not None and process.current_process().daemon)


def _is_daemon_at_exit(popen: Any) -> bool:
    """Return whether a daemon process has ended because its parent exits and closes the pipes of the daemon."""
    util: Any = sys.modules.get("multiprocessing.util")
    process: Any = sys.modules.get("multiprocessing.process")
    if util is None or process is None or not util.is_exiting():
        return False
    own = [each for each in list(vars(process)["_children"]) if getattr(each, "_popen", None) is popen]
    return not own or own[0].daemon


def _find_unfinished_file(pid: int) -> str | None:
    """Return a large file that a process is writing, such as a checkpoint, or `None`.

    A process that has written little, such as a worker of a data loader, is skipped, because it has inherited its open
    files. Files in append mode are skipped, because such files are logs.
    """
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            if int(file.read().partition("\nwrite_bytes: ")[2].split()[0]) < _LARGE_BYTES:
                return None
        for name in os.listdir(f"/proc/{pid}/fd"):
            path, status = os.readlink(f"/proc/{pid}/fd/{name}"), os.stat(f"/proc/{pid}/fd/{name}")
            is_recent = status.st_size >= _LARGE_BYTES and time.time() - status.st_mtime < _RECENT_S
            if int(name) <= 2 or not is_recent or path.startswith("/dev/") or path.endswith(" (deleted)"):
                continue
            with open(f"/proc/{pid}/fdinfo/{name}", encoding="ascii") as file:
                flags = int(file.read().partition("flags:")[2].split()[0], 8)
            if flags & os.O_ACCMODE and not flags & os.O_APPEND:
                return path
    except (OSError, ValueError, IndexError):
        pass
    return None


def _is_alive(pid: int) -> bool:
    """Return whether a child is still alive.

    After a failure, programs also send signals to children that have ended.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except (OSError, AttributeError):
        return True


def is_child_of_python() -> bool:
    """Return whether the parent of this process is a Python."""
    try:
        return os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe")).startswith("python")
    except OSError:
        return False


def _runs_script(command: Any, *, anywhere: bool = False) -> bool:
    import re

    words = [command] if isinstance(command, (str, bytes, os.PathLike)) else list(command)
    text = " ".join(os.fsdecode(word) for word in words)
    return bool(re.search(r"(?:^|[\s;&|(])" + _RUNS_A_SCRIPT, text) if anywhere else re.match(_RUNS_A_SCRIPT, text))
