"""Recorders of single events in a worker: the end, a handled signal, and contact with peers.

The recorders do not change the behaviour of the program, and no failure of a recorder reaches the program.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import atexit
import os
import sys
import time
from time import monotonic

from .child_failure_recorder import is_child_of_python
from .file_writer import create_file, encode_json, remove_file, replace_file
from .rank_claim import is_rank_launcher, read_start_ticks
from .torch_names import C10D, REGISTER_GROUP, RPC, RPC_BACKEND, SET_GROUP, find_name

# TYPE_CHECKING is not imported from `typing`, because the import of `typing` takes longer than all other imports.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .progress_counters import ProgressCounters

_RUNNING, _WELL, _FAILED = "running", "well", "failed"
_PROMPT_S = 1.0
"""If Python ends within so many seconds after `sys.exit`, no code has caught the SystemExit, so the call caused the
end.
"""
_MAX_MESSAGE_LENGTH, _MAX_TRACEBACK_LENGTH = 8192, 32768


class ExitWatcher:
    """Calls `write_end` at the end of this Python with `well` or `failed`, the reason and the traceback."""

    def __init__(self, write: Callable[[str, str, str], None]) -> None:
        self._write_end = write
        self._pid = os.getpid()
        self._exit: tuple[object, float] = (0, 0.0)

    def start(self) -> None:
        """Observe all ways in which this process can end by itself."""
        atexit.register(self._finish)
        sys.exit = self._wrap(sys.exit, self._note_exit)
        # `exit` and `quit` of `site` raise SystemExit without `sys.exit`. Other `raise` statements cannot be observed.
        quitter: Any = getattr(sys.modules.get("_sitebuiltins"), "Quitter", None)
        if quitter is not None:
            quitter.__call__ = self._wrap(quitter.__call__, lambda _, *status: self._note_exit(*status))
        os._exit = self._wrap(os._exit, self._note_quick_exit)
        for name in ("execv", "execve"):
            # `exec` replaces this Python, so the exit code will be that of the next program.
            setattr(os, name, self._wrap(getattr(os, name), lambda *_: self._write_end(_WELL, "", "")))

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
        self._write_end(_FAILED if status else _WELL, f"os._exit({status})" if status else "", "")

    def _finish(self) -> None:
        """Write the reason for the end. `sys.last_value` is the exception that ended the program."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        status, time = self._exit
        if isinstance(error, BaseException):
            import traceback

            message = "".join(traceback.format_exception_only(type(error), error)).strip()
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._write_end(_FAILED, message, trace)
        elif status and monotonic() - time < _PROMPT_S:
            self._write_end(_FAILED, f"SystemExit: {status}", "")
        else:
            self._write_end(_WELL, "", "")


class ExitRecorder:
    """Writes the file about the end of a Python of the rank.

    If several Pythons run in sequence, the first failure is kept.

    If a shell has started this Python, the exit code of the rank may come from another program, so the file is needed.
    If this Python is the first process of the rank, its exit code is usually enough. The file is then written only for
    an exit code such as 256, which arrives as 0.
    """

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.python.json")
        self._pid, self._start_time = os.getpid(), start_time

    def start(self) -> None:
        """Observe the end of this process if a shell has started it.

        `python -c` is skipped, because its code may be a mere test.
        """
        if os.getsid(0) == self._pid:
            ExitWatcher(self._write_multiple).start()
            return
        if is_child_of_python() or sys.argv[:1] == ["-c"] or self._has_earlier_failure():
            return
        self._write(_RUNNING)
        ExitWatcher(self._write).start()

    def _write_multiple(self, end: str, message: str, trace: str) -> None:
        """Record an exit code such as 256, which `os.system` may return.

        The system passes on only the lowest 8 bits of an exit code.
        """
        code = message.replace("(", " ").rstrip(")").rpartition(" ")[2]
        if not trace and code.isdigit() and int(code) % 256 == 0:
            self._write(end, message)

    def _has_earlier_failure(self) -> bool:
        """Return whether an earlier Python of the rank has failed, or has ended without an end record."""
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
            replace_file(self._path, _encode_long(record) if message else encode_json(record))
        except (OSError, ValueError):
            # Without this call, the file would still have an outdated record.
            remove_file(self._path)


def _read_output_size() -> int:
    """Return the present size of the rank's output; 0 if the stdout of this Python is another file.

    Later output comes from the shell that has started this Python.
    """
    try:
        own = os.fstat(1)
        return own.st_size if os.path.samestat(own, os.stat(f"/proc/{os.getsid(0)}/fd/1")) else 0
    except OSError:
        return 0


def record_error_for_torchrun() -> None:
    """Write the error that ends this worker to torchrun's error file, if torchrun redirects the output to a file.

    torchrun then reports the error, as with `@record`. Without the error file, the output of the rank would not show
    the reason.
    """
    path = os.path.realpath(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    try:
        output = os.readlink("/proc/self/fd/2")
    except OSError:
        return
    if os.path.dirname(output) != os.path.dirname(path) or not is_rank_launcher(os.getppid()):
        return

    def write(end: str, message: str, trace: str) -> None:
        if end != _FAILED or os.path.exists(path):
            return

        # torchrun reports the earliest error and compares whole seconds. A rank that lost a connection failed later
        # than its peer, so the recorded time of this rank is one second later.
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

    ExitWatcher(write).start()


def _encode_long(record: dict[str, Any]) -> str:
    import json

    return json.dumps(record)


# --- signals

_WATCHED = (int(_signal.SIGINT), int(_signal.SIGTERM))


class SignalRecorder:
    """Writes the file about the last SIGTERM or SIGINT for which this Python has called a handler.

    After such a signal the program may end with 0. `signal.signal` and `signal.getsignal` still take and return the
    program's own handlers, and tracebacks have no frame of the shim. Handlers in C code, and handlers that are set
    through `_signal`, are not observed.
    """

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.signal.json")
        self._pid, self._start_time = os.getpid(), start_time

    def start(self) -> None:
        """Observe Python's default handler of SIGINT, which raises KeyboardInterrupt."""
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _WatchedHandler(_signal.default_int_handler, _signal.SIGINT, self))

    def wrap_signal_module(self, module: Any) -> None:
        """Observe all handlers that the program sets by the module `signal`, which has just been imported."""
        set_handler, get_handler = module.signal, module.getsignal

        def signal(signalnum: Any, handler: Any) -> Any:
            if signalnum in _WATCHED and callable(handler):
                handler = _WatchedHandler(handler, signalnum, self)
            return _unwrap(set_handler(signalnum, handler))

        def getsignal(signalnum: Any) -> Any:
            return _unwrap(get_handler(signalnum))

        for wrapper, original in ((signal, set_handler), (getsignal, get_handler)):
            wrapper.__module__, wrapper.__qualname__ = original.__module__, original.__qualname__
            wrapper.__doc__ = original.__doc__
            vars(wrapper)["__wrapped__"] = original
            setattr(module, wrapper.__name__, wrapper)

    def record_signal(self, number: int) -> None:
        """Record a signal, unless this process is a forked child."""
        if os.getpid() != self._pid:
            return
        record = {"pid": self._pid, "start_time": self._start_time, "signal": int(number), "time": monotonic()}
        try:
            replace_file(self._path, encode_json(record))
        except OSError:
            return


class _WatchedHandler:
    """A signal handler of the program. Each call of the handler is recorded.

    Python reads `__call__` and then calls the result. Therefore no code of the shim is on the stack while the handler
    runs.
    """

    __slots__ = ("_number", "_recorder", "handler")

    def __init__(self, handler: Any, number: int, recorder: SignalRecorder) -> None:
        self.handler, self._number, self._recorder = handler, number, recorder

    @property
    def __call__(self) -> Any:
        self._recorder.record_signal(self._number)
        return self.handler


def _unwrap(handler: Any) -> Any:
    return handler.handler if type(handler) is _WatchedHandler else handler


# --- process groups

_OTHERS = ("distributed", "horovod", "jax", "mindspore", "mpi4py.MPI", "paddle", "ray", "tensorflow", "torch_xla")
"""Modules that connect processes without torch. A Python that has imported one of these modules is never reported as
alone.
"""


class PeerRecorder:
    """Creates `rank-R.met` if a process of the rank has met a peer, and `rank-R.alone` if the rank has trained alone.

    A process meets a peer when it joins a process group of torch with other members, or uses torch's RPC. A rank has
    trained alone if it has loaded torch and has met no peer.
    """

    def __init__(self, status_dir: str, rank: int) -> None:
        base = os.path.join(status_dir, f"rank-{rank}")
        self._met, self._alone, self._pid = f"{base}.met", f"{base}.alone", os.getpid()
        self._is_rank = False
        self.hooks: dict[str, Callable[[Any], None]] = {C10D: self._watch_groups, RPC: self._watch_rpc}

    def start(self) -> None:
        """Record for the rank: remove `rank-R.alone` of an earlier Python, which may belong to the prologue."""
        self._is_rank = True
        remove_file(self._alone)

    def finish(self, counters: ProgressCounters) -> None:
        """At the exit of the rank, create `rank-R.alone` if the rank has loaded torch and met no peer."""
        if os.getpid() != self._pid or "torch" not in counters.frameworks or os.path.exists(self._met):
            return
        if not any(name in sys.modules for name in _OTHERS):
            create_file(self._alone)

    def _watch_groups(self, module: Any) -> None:
        from . import call_values, collective_recorder

        call_values.watch_stores()
        register_group = find_name(REGISTER_GROUP)
        if register_group is not None:

            def register_process_group(name: Any, group: Any) -> None:
                register_group(name, group)
                if self._is_rank and os.getpid() == self._pid:
                    collective_recorder.watch_group(name, group)

            module._register_process_group = register_process_group  # noqa: SLF001
        # Without this function the shim cannot see whether the process meets a peer, and assumes that the process does.
        set_group = find_name(SET_GROUP)
        if set_group is None:
            create_file(self._met)
            return

        def update_default_group(group: Any) -> None:
            set_group(group)
            if group is not None and not (hasattr(group, "size") and group.size() == 1):
                create_file(self._met)

        module._update_default_pg = update_default_group  # noqa: SLF001

    def _watch_rpc(self, module: Any) -> None:
        begin = find_name(RPC_BACKEND)
        if begin is None:
            return

        def init_rpc_backend(*args: Any, **kwargs: Any) -> Any:
            create_file(self._met)
            return begin(*args, **kwargs)

        module._init_rpc_backend = init_rpc_backend  # noqa: SLF001
