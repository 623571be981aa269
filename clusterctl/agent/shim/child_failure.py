"""Records the first failed child process or future of a rank's Python code, because the code may ignore the failure.

A process of `multiprocessing`, and a script that `subprocess` has started, write the exception that ends them. Their
parent writes the exit code or the signal, unless it ended them itself.
"""

from __future__ import annotations

import os
import sys

from .file_writer import create_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FIRST = 100
_MOST_MESSAGE = 2048
_LOST_BY_FORKSERVER = 255
_LARGE, _RECENT_S = 1 << 20, 5.0
_KILL = 9
# By number: `signal` would import `enum`. HUP, INT, QUIT, ABRT, KILL and TERM end a process.
_ENDING_SIGNALS = (1, 2, 3, 6, 9, 15)
_ORDERLY_SIGNALS = (1, 2, 13, 15)
"""HUP, INT, PIPE, TERM: another process requested the end, or has closed the pipe."""
UNASKED_FUTURE = "future: "
"""What begins the message of a future, whose process has not failed."""
_RUNS_A_SCRIPT = r"(?:\S*/)?(?:python[\d.]*(?: -[a-zA-Z]+)* \S+\.py|torchrun|accelerate|deepspeed)(?=\s|$)"


class ChildFailureRecord:
    """The file about the first failed child of a rank, or of a process below it.

    An exception in a worker of a pool or of a data loader goes to the caller, and does not end that worker.
    """

    def __init__(self, status_dir: str, rank: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.child.json")
        self._system = os.path.join(status_dir, f"rank-{rank}.system")
        self._sent_signals: dict[int, set[int]] = {}
        self._is_listening = False
        self.hooks: dict[str, Callable[[Any], None]] = {
            "multiprocessing.util": self._watch,
            "multiprocessing.popen_fork": self._watch_children,
            "subprocess": self._watch_children,
            "concurrent.futures._base": lambda module: _FutureError(self._write_failure).watch(module.Future),
        }

    def begin_script(self, watch_exit: Callable[[Callable[[str, str, str], None]], None]) -> None:
        """Watch this process, which is not the rank, if it is a script: an exception ends it.

        A shell between it and the Python of the rank may hide its exit code. No code learns the one that `os.system`
        returns, so below that the script writes its own.

        Args:
            watch_exit: Calls a function with how this process ends, the message of a failure, and its traceback.
        """
        if not (sys.argv[:1] and sys.argv[0].endswith(".py")):
            return
        if os.path.exists(self._system):
            watch_exit(lambda _end, message, _trace: self._write_failure(os.getpid(), message) if message else None)
            return
        import atexit

        pid = os.getpid()
        atexit.register(lambda: self._write_error(getattr(sys, "last_value", None)) if os.getpid() == pid else None)

    def _watch_children(self, module: Any) -> None:
        """Watch the exit codes that `Popen` objects receive. No frame of ours shows in a stack while they wait."""
        module.Popen.returncode = _ReturnCode(self.note_exit)
        self.listen()

    def listen(self) -> None:
        """Note which signals this process sends, and that it runs a script by `os.system`."""
        if not self._is_listening:
            self._is_listening = True
            # Not functions in place of those of `os`: their frames would show in the stack of a signal's handler.
            sys.addaudithook(self._note_event)

    def _note_event(self, event: str, arguments: Any) -> None:
        if event == "os.system" and _runs_script(arguments[0], anywhere=True):
            create_file(self._system)
        if event == "os.kill":
            pid, signal = arguments
            if signal in _ENDING_SIGNALS and _is_alive(pid):
                self._sent_signals.setdefault(pid, set()).add(int(signal))
                util: Any = sys.modules.get("multiprocessing.util")
                # Python ends the daemons of `multiprocessing` at its own end.
                path = _find_unfinished_file(pid) if util is not None and util.is_exiting() else None
                if path is not None:
                    self._write_failure(pid, f"SIGTERM at the end of the rank, while writing {path}")

    def note_exit(self, popen: Any, code: int) -> None:
        """Record that a child has ended with an exit code other than 0, or by a signal (a negative code)."""
        command = getattr(popen, "args", None)
        if command is not None and not _runs_script(command):
            return
        sent = self._sent_signals.get(popen.pid, set())
        # A pool that breaks sends SIGTERM to all of its processes, to one that was killed too.
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

    def _watch(self, module: Any) -> None:
        """Watch this process if `multiprocessing` has started it, and each process that it starts."""

        def begin(util: Any) -> None:
            util.Finalize(None, self._finish, exitpriority=_FIRST)

        # A spawned process is no fork. In a fork, the registrations from before the fork are gone.
        begin(module)
        module.register_after_fork(module, begin)

    def _finish(self) -> None:
        """Record the exception that ends the process; called while it propagates."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # `torch.multiprocessing` raises SystemExit after an exception.
            error = error.__context__ if error.code else None
        if not isinstance(error, Exception) or (_is_daemon() and isinstance(error, (OSError, EOFError))):
            # A daemon loses its pipes when its parent ends.
            return
        self._write_error(error)

    def _write_error(self, error: object) -> None:
        if not isinstance(error, Exception):
            return
        import traceback

        self._write_failure(os.getpid(), "".join(traceback.format_exception_only(type(error), error)).strip())

    def _write_failure(self, pid: int, message: str) -> None:
        """Write that a process has failed, unless another one has failed before it."""
        import json

        record = json.dumps({"pid": pid, "message": message[:_MOST_MESSAGE]}).encode()
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # another process has written it first
            return
        try:
            os.write(file, record)
        except OSError:
            return
        finally:
            os.close(file)


class _ReturnCode:
    """The attribute `returncode` of a `Popen`: it reports a failure when it is set."""

    def __init__(self, note: Callable[[Any, int], None]) -> None:
        self._note = note

    def __get__(self, popen: Any, owner: Any = None) -> Any:
        if popen is None:
            return self
        try:
            return vars(popen)["returncode"]
        except KeyError:
            raise AttributeError("returncode") from None

    def __set__(self, popen: Any, code: Any) -> None:
        is_news = vars(popen).get("returncode") is None
        vars(popen)["returncode"] = code
        if is_news and code:
            try:
                self._note(popen, code)
            except Exception:  # nothing of ours may reach user code
                return

    def __delete__(self, popen: Any) -> None:
        del vars(popen)["returncode"]


class _FutureError:
    """The attribute `_exception` of a `Future`: at exit, it tells of the first one if nobody has asked for any."""

    def __init__(self, write_failure: Callable[[int, str], None]) -> None:
        self._write_failure = write_failure
        self._pid = os.getpid()
        self._message = ""
        self._was_asked = False

    def watch(self, future_class: Any) -> None:
        import atexit

        future_class._exception = self  # noqa: SLF001
        atexit.register(self._finish)

    def __get__(self, future: Any, owner: Any = None) -> Any:
        if future is None:
            return self
        try:
            error = vars(future)["_exception"]
        except KeyError:
            raise AttributeError("_exception") from None
        self._was_asked = self._was_asked or error is not None
        return error

    def __set__(self, future: Any, error: Any) -> None:
        vars(future)["_exception"] = error
        # No reference to the error stays here: its frames hold memory.
        if isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)) and not self._message:
            text = str(error).strip().partition("\n")[0]
            self._message = f"{UNASKED_FUTURE}{type(error).__name__}: {text}"

    def _finish(self) -> None:
        if self._message and not self._was_asked and os.getpid() == self._pid:
            self._write_failure(self._pid, self._message)


def _is_daemon() -> bool:
    process: Any = sys.modules.get("multiprocessing.process")
    return bool(process is not None and process.current_process().daemon)


def _is_daemon_at_exit(popen: Any) -> bool:
    """Return whether a daemon has ended while its parent ends: it loses its pipes then."""
    util: Any = sys.modules.get("multiprocessing.util")
    process: Any = sys.modules.get("multiprocessing.process")
    if util is None or process is None or not util.is_exiting():
        return False
    own = [each for each in list(vars(process)["_children"]) if getattr(each, "_popen", None) is popen]
    return not own or own[0].daemon


def _find_unfinished_file(pid: int) -> str | None:
    """Return the large file that a process is writing, as a checkpoint; `None` if it seems to write none.

    A process that has written little itself, such as a worker of a data loader, has inherited its files. Logs are
    appended to.
    """
    import time

    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            if int(file.read().partition("\nwrite_bytes: ")[2].split()[0]) < _LARGE:
                return None
        for name in os.listdir(f"/proc/{pid}/fd"):
            path, status = os.readlink(f"/proc/{pid}/fd/{name}"), os.stat(f"/proc/{pid}/fd/{name}")
            is_recent = status.st_size >= _LARGE and time.time() - status.st_mtime < _RECENT_S
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
    """Return whether a child has not ended yet: a clean-up after a failure signals all children, also ended ones."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except (OSError, AttributeError):
        return True


def is_child_of_python() -> bool:
    """Return whether another Python has started this one."""
    try:
        return os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe")).startswith("python")
    except OSError:
        return False


def _runs_script(command: Any, *, anywhere: bool = False) -> bool:
    import re

    words = [command] if isinstance(command, (str, bytes, os.PathLike)) else list(command)
    text = " ".join(os.fsdecode(word) for word in words)
    return bool(re.search(r"(?:^|[\s;&|(])" + _RUNS_A_SCRIPT, text) if anywhere else re.match(_RUNS_A_SCRIPT, text))
