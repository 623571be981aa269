"""Records of single events in a worker: its end, a signal that it handles, and peers that it meets.

The program does not notice them, and no failure of ours reaches the program.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import atexit
import os
import sys
from time import monotonic

from .child_failure import is_child_of_python
from .file_writer import create_file, encode, remove_file, replace_file
from .rank_claim import is_launcher, read_start_ticks

# Not from `typing`: importing that would cost more than all the rest at start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .progress_counters import ProgressCounters

_RUNNING, _WELL, _FAILED = "running", "well", "failed"
_PROMPT_S = 1.0
"""If Python ends within this time after a `sys.exit`, the call was the reason: no code has caught it."""
_MAX_MESSAGE_LENGTH, _MAX_TRACEBACK_LENGTH = 8192, 32768


class ExitWatch:
    """Sees the end of this Python: calls `write` with running, well or failed, and what ended it with its traceback."""

    def __init__(self, write: Callable[[str, str, str], None]) -> None:
        self._write_end = write
        self._pid = os.getpid()
        self._exit: tuple[object, float] = (0, 0.0)

    def begin(self) -> None:
        """Watch the ways in which this process can end by itself."""
        atexit.register(self._finish)
        sys.exit = self._wrap(sys.exit, self._note_exit)
        # `exit` and `quit` of `site` raise SystemExit themselves. Other `raise` statements cannot be watched.
        quitter: Any = getattr(sys.modules.get("_sitebuiltins"), "Quitter", None)
        if quitter is not None:
            quitter.__call__ = self._wrap(quitter.__call__, lambda _, *status: self._note_exit(*status))
        os._exit = self._wrap(os._exit, self._note_quick_exit)
        for name in ("execv", "execve"):
            # The exit of the next program is not that of this Python.
            setattr(os, name, self._wrap(getattr(os, name), lambda *_: self._write(_WELL)))

    def _wrap(self, original: Any, note: Callable[..., None]) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._pid:
                note(*args, *kwargs.values())
            return original(*args, **kwargs)

        noted.__name__ = noted.__qualname__ = original.__name__
        noted.__module__, noted.__doc__ = original.__module__, original.__doc__
        return noted

    def _note_exit(self, status: object = None, *_: object) -> None:
        self._exit = (status, monotonic())

    def _note_quick_exit(self, status: object = 0, *_: object) -> None:
        self._write(_FAILED if status else _WELL, f"os._exit({status})" if status else "")

    def _finish(self) -> None:
        """Write the end at exit. `sys.last_value` is the exception that ended the program."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        status, time = self._exit
        if isinstance(error, BaseException):
            import traceback

            message = "".join(traceback.format_exception_only(type(error), error)).strip()
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._write(_FAILED, message, trace)
        elif status and monotonic() - time < _PROMPT_S:
            self._write(_FAILED, f"SystemExit: {status}")
        else:
            self._write(_WELL)

    def _write(self, end: str, message: str = "", trace: str = "") -> None:
        self._write_end(end, message, trace)


class ExitRecord:
    """The file about the end of one Python. If several run one after the other, it keeps the first that failed.

    If a shell has started this Python, the exit code of the rank may be another program's. A Python that is the first
    process of its rank writes nothing but an exit code of which 0 arrives: any other code is enough by itself.
    """

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.python.json")
        self._pid, self._start_time = os.getpid(), start_time

    def begin(self) -> None:
        """Watch this process if a shell has started it, unless it is a `python -c`, which may be a mere question."""
        if os.getsid(0) == self._pid:
            ExitWatch(self._write_multiple).begin()
            return
        if is_child_of_python() or sys.argv[:1] == ["-c"] or self._has_earlier_failure():
            return
        self._write(_RUNNING)
        ExitWatch(self._write).begin()

    def _write_multiple(self, end: str, message: str, trace: str) -> None:
        """Write an exit code such as 256, which `os.system` returns: its lowest 8 bits alone arrive, which are 0."""
        code = message.replace("(", " ").rstrip(")").rpartition(" ")[2]
        if not trace and code.isdigit() and int(code) % 256 == 0:
            self._write(end, message)

    def _has_earlier_failure(self) -> bool:
        """Return whether a Python before this one has failed, or has ended without a record of its end."""
        import json

        try:
            with open(self._path, encoding="ascii") as file:
                found = json.load(file)
            own = (found["pid"], found["start_time"]) == (self._pid, self._start_time)
            ended_silently = found["end"] == _RUNNING and read_start_ticks(found["pid"]) != found["start_time"]
            return not own and (found["end"] == _FAILED or ended_silently)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _write(self, end: str, message: str = "", trace: str = "") -> None:
        if end == _FAILED and self._has_earlier_failure():
            return
        record = {
            "pid": self._pid,
            "start_time": self._start_time,
            "program": sys.argv[0] if sys.argv else "",
            "end": end,
            "message": message[:_MAX_MESSAGE_LENGTH],
            "traceback": trace[-_MAX_TRACEBACK_LENGTH:],
            "output_size": _read_output_size() if end == _FAILED else 0,
        }
        try:
            replace_file(self._path, _encode_long(record) if message else encode(record))
        except (OSError, ValueError):
            # An old record would be wrong.
            remove_file(self._path)


def _read_output_size() -> int:
    """Return the size of the output of the rank, behind which a shell may write; 0 if this Python writes elsewhere."""
    try:
        own = os.fstat(1)
        return own.st_size if os.path.samestat(own, os.stat(f"/proc/{os.getsid(0)}/fd/1")) else 0
    except OSError:
        return 0


def record_error_for_torchrun() -> None:
    """Write the error that ends this worker to torchrun's error file if torchrun sends the worker's output to a file.

    torchrun then reports the error, as with `@record`. Otherwise the output of the rank would not hold the reason.
    """
    path = os.path.realpath(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    try:
        output = os.readlink("/proc/self/fd/2")
    except OSError:
        return
    if os.path.dirname(output) != os.path.dirname(path) or not is_launcher(os.getppid()):
        return

    def write(end: str, message: str, trace: str) -> None:
        if end != _FAILED or os.path.exists(path):
            return
        import time

        # A rank that lost a connection failed later than its peer; torchrun compares whole seconds.
        extra = {"timestamp": str(int(time.time()) + ("onnection" in message))}
        if trace:
            extra["py_callstack"] = trace
        else:
            message = f"{message}; its output is in {output}"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(_encode_long({"message": {"message": message, "extraInfo": extra}}))
        except OSError:
            return

    ExitWatch(write).begin()


def _encode_long(record: dict[str, Any]) -> str:
    import json

    return json.dumps(record)


# --- signals

_WATCHED = (int(_signal.SIGINT), int(_signal.SIGTERM))


class SignalRecord:
    """The file about the last SIGTERM or SIGINT that a handler of this Python got: the program may then end with 0.

    `signal.signal` and `signal.getsignal` still take and return the program's own handlers, and no frame of ours is in
    a traceback. Handlers of C code, and those set through `_signal` itself, are not watched.
    """

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.signal.json")
        self._pid, self._start_time = os.getpid(), start_time

    def begin(self) -> None:
        """Watch Python's default handler of SIGINT, which raises KeyboardInterrupt."""
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _WatchedHandler(_signal.default_int_handler, _signal.SIGINT, self))

    def watch(self, module: Any) -> None:
        """Watch the handlers that the module `signal`, which has just been imported, sets from now on."""
        set_handler, get_handler = module.signal, module.getsignal

        def signal(signalnum: Any, handler: Any) -> Any:
            if signalnum in _WATCHED and callable(handler):
                handler = _WatchedHandler(handler, signalnum, self)
            return _unwrap(set_handler(signalnum, handler))

        def getsignal(signalnum: Any) -> Any:
            return _unwrap(get_handler(signalnum))

        for ours, original in ((signal, set_handler), (getsignal, get_handler)):
            ours.__module__, ours.__qualname__ = original.__module__, original.__qualname__
            ours.__doc__ = original.__doc__
            vars(ours)["__wrapped__"] = original
            setattr(module, ours.__name__, ours)

    def note(self, number: int) -> None:
        """Write that a signal has come, unless this is a forked child."""
        if os.getpid() != self._pid:
            return
        record = {"pid": self._pid, "start_time": self._start_time, "signal": int(number), "time": monotonic()}
        try:
            replace_file(self._path, encode(record))
        except OSError:
            return


class _WatchedHandler:
    """A handler of the program, whose calls are noted.

    Python reads `__call__` and then calls the result, so no code of ours is running while the handler runs.
    """

    __slots__ = ("_number", "_record", "handler")

    def __init__(self, handler: Any, number: int, record: SignalRecord) -> None:
        self.handler, self._number, self._record = handler, number, record

    @property
    def __call__(self) -> Any:
        self._record.note(self._number)
        return self.handler


def _unwrap(handler: Any) -> Any:
    return handler.handler if type(handler) is _WatchedHandler else handler


# --- process groups

_C10D, _RPC = "torch.distributed.distributed_c10d", "torch.distributed.rpc"
_OTHERS = ("distributed", "horovod", "jax", "mindspore", "mpi4py.MPI", "paddle", "ray", "tensorflow", "torch_xla")
"""Modules that connect processes by themselves: a Python that has imported one is never reported as alone."""


class PeerRecord:
    """Two files of a rank: `rank-R.met` if one of its processes has met a peer, `rank-R.alone` if none has.

    Processes meet in a process group or by RPC of torch. A rank with torch that has met no peer has trained alone.
    """

    def __init__(self, status_dir: str, rank: int) -> None:
        base = os.path.join(status_dir, f"rank-{rank}")
        self._met, self._alone, self._pid = f"{base}.met", f"{base}.alone", os.getpid()
        self.hooks: dict[str, Callable[[Any], None]] = {_C10D: self._watch_groups, _RPC: self._watch_rpc}

    def begin(self) -> None:
        """Remove the file of an earlier Python of this rank, such as one of the prologue."""
        remove_file(self._alone)

    def finish(self, state: ProgressCounters) -> None:
        """At exit of the rank, make `rank-R.alone` if it has loaded torch and met no peer."""
        if os.getpid() != self._pid or "torch" not in state.frameworks or os.path.exists(self._met):
            return
        if not any(name in sys.modules for name in _OTHERS):
            create_file(self._alone)

    def _watch_groups(self, module: Any) -> None:
        # A private function (seen in torch 1.8 to 2.13) that sets every default group. If it is missing, a meeting
        # cannot be ruled out.
        set_group = getattr(module, "_update_default_pg", None)
        if set_group is None:
            create_file(self._met)
            return

        def update_default_group(group: Any) -> None:
            set_group(group)
            if group is not None and not (hasattr(group, "size") and group.size() == 1):
                create_file(self._met)

        module._update_default_pg = update_default_group  # noqa: SLF001

    def _watch_rpc(self, module: Any) -> None:
        begin = getattr(module, "_init_rpc_backend", None)
        if begin is None:
            return

        def init_rpc_backend(*args: Any, **kwargs: Any) -> Any:
            create_file(self._met)
            return begin(*args, **kwargs)

        module._init_rpc_backend = init_rpc_backend  # noqa: SLF001
