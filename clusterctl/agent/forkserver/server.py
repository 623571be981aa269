"""The main program of a forkserver: it imports modules, then forks a rank at each request until the supervisor ends.

A request is one byte with descriptors. The byte `f` requests a fork. Its descriptors are a file with the request as
JSON, the pipe for the report, and the worker's output. The waiter has to keep all other descriptors open. The byte `?`
asks whether a new process would still import the same modules.

A forked rank waits at a gate, a pipe, until its waiter is ready. No code of the user runs before the gate opens. If a
fork fails until then, the forkserver reports the reason, and the rank starts as a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import socket
import sys
import threading
import time
import types

from . import CannotForkError
from .fork_checks import OLD_TORCH_SEED, ImportWatch
from .installed_modules import InstalledImports

TYPE_CHECKING = False
if TYPE_CHECKING:
    import random
    import weakref
    from collections.abc import Iterable
    from typing import Any, NoReturn

VARIABLE = "CLUSTERCTL_FORKSERVER"
"""The value of this variable is the descriptor number of the connection to the supervisor, followed by many blanks. The
blanks reserve environment memory, in which `_set_environment` writes the variables of a rank.
"""
_NAME = "clusterctl-fork"
_MAX_DESCRIPTORS = 250
_MAX_REASON_LENGTH = 1000
_MEASURING_VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "PYTHONINSPECT")
_TAG_LIMITS = (10, resource.RLIMIT_RSS)
"""Limits that Linux does not enforce (the first is RLIMIT_LOCKS); one of them has the tag of the run as its value."""
_MIN_TAG = 1 << 60
"""Smallest tag, which is larger than any limit that a person would set."""
_ENV_START, _ENV_END = 50, 51
"""Fields of /proc/PID/stat (proc(5))."""


def serve_forks(path: list[str]) -> bool:
    """Run the forkserver until the supervisor ends. This function returns only in forked ranks.

    Args:
        path: The value of `sys.path` in a rank.

    Returns:
        Whether the rank needs the shim.
    """
    # Read the kernel's copy of the environment: Python may have added a variable of the locale to its own copy.
    with open("/proc/self/environ", "rb") as file:
        started = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if entry)
    sock = socket.socket(fileno=int(os.environ.pop(VARIABLE).partition(":")[0]))
    try:
        return _Server(sock, started, path).serve()
    except BaseException as error:
        _send(sock, {"cannot": _describe_error(error)})
        os._exit(0 if isinstance(error, CannotForkError) else 1)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode())


def _describe_error(error: BaseException) -> str:
    """Return the message of a `CannotForkError`, or a text with type, message and line of another exception."""
    if isinstance(error, CannotForkError):
        return str(error)
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1:]
    places = [f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in last]
    return f"{type(error).__name__}: {error}"[:_MAX_REASON_LENGTH] + "".join(places)


def _read_json(fd: int) -> Any:
    """Return the content of a JSON file. Waiter and rank share the file offset, so do not move it."""
    return json.loads(os.pread(fd, os.fstat(fd).st_size, 0))


class _Server:
    def __init__(self, sock: socket.socket, started: dict[bytes, bytes], path: list[str]) -> None:
        self._sock, self._started, self._path = sock, started, path
        with open("/proc/self/comm") as file:
            self._rank_name = file.read().strip()
        _set_process_name(_NAME)

    def serve(self) -> bool:
        (descriptor,) = self._receive()[1]
        request = _read_json(descriptor)
        os.close(descriptor)
        began = time.monotonic()
        imports, watch = self._import(request)
        seconds = time.monotonic() - began
        with open("/proc/self/status") as file:
            shared = next((int(line.split()[1]) for line in file if line.startswith("RssAnon:")), 0)
        _send(self._sock, {"modules": imports.names, "seconds": seconds, "kilobytes": shared})
        while True:
            word, descriptors = self._receive()
            if not word:
                os._exit(0)
            if word == b"?":
                _send(self._sock, {"changed": imports.find_import_change()})
            elif self._fork(descriptors, watch):
                return bool(request["inject"])
            for fd in descriptors:
                os.close(fd)

    def _receive(self) -> tuple[bytes, list[int]]:
        word, descriptors, flags, _ = socket.recv_fds(self._sock, 1, _MAX_DESCRIPTORS)
        if flags & socket.MSG_CTRUNC:
            raise CannotForkError("there are too few free descriptors for a rank")
        return word, descriptors

    def _import(self, request: dict[str, Any]) -> tuple[InstalledImports, ImportWatch]:
        for name in _MEASURING_VARIABLES:
            if os.environ.get(name):
                raise CannotForkError(f"{name} is set, which works in new processes only")
        imports, watch = InstalledImports(request["preload"], self._path), ImportWatch(request["rank_names"])
        imports.check_origins()
        main: Any = sys.modules["__main__"]
        if sys.argv[0] != "-m":
            # Some modules read `__main__.__file__` to find out whether Python runs a script.
            main.__file__ = os.path.abspath(sys.argv[0])
        with watch:
            imports.import_modules(_import_all)
        vars(main).pop("__file__", None)
        watch.check_forkable(self._sock.fileno())
        imports.check_origins()
        sys.stdout.flush()
        sys.stderr.flush()
        return imports, watch

    def _fork(self, descriptors: list[int], watch: ImportWatch) -> bool:
        """Fork a waiter, which forks the rank; return true in the rank once its gate is open."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # Reap the waiters that have ended.
        try:
            pid = os.fork()
        except OSError as error:
            _refuse(descriptors, error)
            return False
        if pid:
            return False
        try:
            self._sock.close()
            os.setsid()
            gate, go = os.pipe()
            ready, ready_end = os.pipe()
            worker = os.fork()
            if worker:
                _exec_waiter(descriptors, go, ready, worker)
            os.setsid()
            os.close(go)
            os.close(ready)
        except BaseException as error:
            _refuse(descriptors, error)
            os._exit(1)
        self._become_rank(descriptors, gate, ready_end, watch)
        return True

    def _become_rank(self, descriptors: list[int], gate: int, ready_end: int, watch: ImportWatch) -> None:
        """Turn this process into a rank, and wait until its waiter opens the gate."""
        request_file, _, output, *_ = descriptors
        try:
            request = _read_json(request_file)
            printed = os.pread(1, os.fstat(1).st_size, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if request["cgroup"]:
                with contextlib.suppress(OSError), open(request["cgroup"], "w") as file:
                    file.write("0")
            self._set_environment(_encode_environment(request["env"]))
            _renew_state(watch.unseeded)
            _set_process_name(self._rank_name)
            del request
        except BaseException as error:
            _refuse(descriptors, error)
            os._exit(126)
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_end, b"r")
        for fd in (*descriptors, ready_end):
            os.close(fd)
        if not os.read(gate, 1):
            # The waiter has reported why the rank must not run, or was killed.
            os._exit(1)
        os.close(gate)
        # In a new process, the imports would have printed this to the output of the rank.
        os.write(1, printed)

    def _set_environment(self, env: dict[bytes, bytes]) -> None:
        """Set the variables that differ from the start environment of the forkserver, so that changes by imports stay.

        Also write the variables into the memory that the kernel shows in `/proc/PID/environ`, where the value of
        `VARIABLE` has reserved space.
        """
        for name in self._started.keys() | env.keys():
            if self._started.get(name) != env.get(name):
                if name in env:
                    os.environb[name] = env[name]
                else:
                    os.environb.pop(name, None)
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ENV_START - 3]), int(fields[_ENV_END - 3])
        with open("/proc/self/environ", "rb") as file:
            front, found, _ = file.read().partition(VARIABLE.encode() + b"=")
        shared = {*front.split(b"\0")}
        rest = b"".join(entry + b"\0" for name, value in env.items() if (entry := name + b"=" + value) not in shared)
        room = end - start - len(front)
        if not found or len(rest) > room:
            raise CannotForkError("the environment of a rank is too large for a fork")
        ctypes.memmove(start + len(front), rest.ljust(room, b"\0"), room)


def _import_all(names: list[str]) -> None:
    usual, rare = gc.get_threshold(), (1 << 20, 1 << 10, 1 << 10)
    # Imports make almost no garbage, but the garbage collector would need an eighth of their time.
    gc.set_threshold(*rare)
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:
                raise CannotForkError(f"`import {name}` failed: {type(error).__name__}: {error}") from error
    finally:
        # All ranks share the memory of these objects. A garbage collection would write to it, which ends the sharing,
        # so exclude the objects from collections.
        gc.freeze()
        if gc.get_threshold() == rare:
            gc.set_threshold(*usual)


def _refuse(descriptors: list[int], error: BaseException) -> None:
    """Report to the supervisor why the rank cannot be forked."""
    with contextlib.suppress(OSError):
        os.write(descriptors[1], json.dumps({"refused": _describe_error(error)}).encode() + b"\n")


def _exec_waiter(descriptors: list[int], go: int, ready: int, worker: int) -> NoReturn:
    """Replace this process by the waiter, a small process of the agent."""
    request_file, report, _, *keep = descriptors
    request = _read_json(request_file)
    argv = request["waiter"]
    for limit in _TAG_LIMITS:
        # A sweep must not end the waiter, so remove the tag of the run.
        soft, hard = resource.getrlimit(limit)
        if soft >= _MIN_TAG:
            resource.setrlimit(limit, (hard, hard))
    null = os.open(os.devnull, os.O_RDWR)
    # If the agent's Python cannot start, it writes the reason to stderr, which is the report pipe.
    for source, target in ((null, 0), (null, 1), (report, 2)):
        os.dup2(source, target)
    passed = [request_file, report, go, ready, *keep]
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), int(name) in passed)
    argv = [*argv, *map(str, [*passed[:4], worker, *keep])]
    os.execve(argv[0], argv, _encode_environment(request["waiter_env"]))


def _set_process_name(name: str) -> None:
    """Set the process name, which `ps -o comm` shows."""
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def _encode_environment(values: dict[str, str]) -> dict[bytes, bytes]:
    """Encode environment variables as UTF-8, whatever the encoding of the user's Python is."""
    how = ("utf-8", "surrogateescape")
    return {name.encode(*how): value.encode(*how) for name, value in values.items()}


def _renew_state(unseeded: Iterable[weakref.ref[random.Random]]) -> None:
    """Renew the state that differs between new processes: random seeds, thread id, start time, keys, output position.

    The module `random` seeds itself again in a fork.
    """
    importlib.invalidate_caches()
    set_native_id = getattr(threading.main_thread(), "_set_native_id", None)
    if set_native_id is not None:
        set_native_id()
    for generator in filter(None, (reference() for reference in unseeded)):
        generator.seed()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != OLD_TORCH_SEED:
        torch.default_generator.seed()
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        # The attribute `relativeCreated` of log records counts from this time.
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # noqa: SLF001
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    # At its end, Python collects the main module, but Python cannot collect frozen objects.
    main = types.ModuleType("__main__")
    vars(main).update(vars(sys.modules["__main__"]))
    sys.modules["__main__"] = main
    for stream in (sys.stdout, sys.stderr):
        # The stream is now another file, with another position.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            if stream.seekable():
                stream.seek(0, os.SEEK_END)
