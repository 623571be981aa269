"""The forkserver's own work: import what is asked for, and fork a rank at each request until the supervisor ends.

A request is one byte with descriptors: `f` asks for a fork, and `?` whether a fresh start would still import the same.
A fork comes with a file with the request as JSON, one with what the waiter is told, where to report, the worker's
output, and what the waiter is to hold. If it fails before the gate opens, nothing of the user's has been started: the
reason is reported, and the rank starts anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import socket
import sys
import time

from . import rank
from .errors import CannotForkError, reason
from .installed import Imports
from .watch import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

VARIABLE = "CLUSTERCTL_FORKSERVER"
"""Its value begins with the number of our connection."""
_NAME = "clusterctl-fork"
_MOST_DESCRIPTORS = 250
_MEASURES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "PYTHONINSPECT")
_TAG_LIMITS = (10, resource.RLIMIT_RSS)
"""Limits that Linux does not enforce (the first is RLIMIT_LOCKS): one of them holds the tag of the run."""
_LEAST_TAG = 1 << 60
"""Far above any limit that a person would set."""


def main(path: list[str]) -> bool:
    """Be the forkserver until the supervisor ends; return in a rank alone: whether our shim is wanted there.

    Args:
        path: What `sys.path` is in a rank.
    """
    # As the kernel has it: Python itself may have added a variable of the locale, as it does for every rank.
    with open("/proc/self/environ", "rb") as file:
        started = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if entry)
    control = int(os.environ.pop(VARIABLE).partition(":")[0])
    sock = socket.socket(fileno=control)
    try:
        return _Server(sock, started, path).serve()
    except BaseException as error:
        _say(sock, {"cannot": reason(error)})
        os._exit(0 if isinstance(error, CannotForkError) else 1)


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode())


def _content(fd: int) -> Any:
    """Return what a file holds, as JSON. Waiter and rank read theirs at once, so it has no offset in common."""
    return json.loads(os.pread(fd, os.fstat(fd).st_size, 0))


class _Server:
    def __init__(self, sock: socket.socket, started: dict[bytes, bytes], path: list[str]) -> None:
        self._sock, self._started, self._path = sock, started, path
        with open("/proc/self/comm") as file:
            self._rank_name = file.read().strip()
        rank.set_name(_NAME)

    def serve(self) -> bool:
        (asked,) = self._receive()[1]
        spec = _content(asked)
        os.close(asked)
        began = time.monotonic()
        imports, watch = self._import(spec)
        seconds = time.monotonic() - began
        _say(self._sock, {"modules": imports.names, "seconds": seconds, "kilobytes": _memory()})
        while True:
            word, descriptors = self._receive()
            if not word:
                os._exit(0)
            if word == b"?":
                _say(self._sock, {"changed": _changed(imports)})
            elif self._fork(descriptors, watch):
                return bool(spec["inject"])
            for fd in descriptors:
                os.close(fd)

    def _receive(self) -> tuple[bytes, list[int]]:
        word, descriptors, flags, _ = socket.recv_fds(self._sock, 1, _MOST_DESCRIPTORS)
        if flags & socket.MSG_CTRUNC:
            raise CannotForkError("no descriptor is to be had for what a rank needs")
        return word, descriptors

    def _import(self, spec: dict[str, Any]) -> tuple[Imports, Watch]:
        for name in _MEASURES:
            if os.environ.get(name):
                raise CannotForkError(f"{name} is set, which is for processes that start anew")
        imports, watch = Imports(spec["preload"], self._path), Watch(spec["rank_names"])
        imports.check_names()
        main: Any = sys.modules["__main__"]
        if sys.argv[0] != "-m":
            # A module may look at it to know whether there is a script.
            main.__file__ = os.path.abspath(sys.argv[0])
        with watch:
            imports.run(_import_all)
        vars(main).pop("__file__", None)
        watch.check(self._sock.fileno())
        imports.check_names()
        sys.stdout.flush()
        sys.stderr.flush()
        return imports, watch

    # --- a fork

    def _fork(self, descriptors: list[int], watch: Watch) -> bool:
        """Fork a rank and its waiter; true in the rank, once its gate is open."""
        try:
            settled, settling = os.pipe()
            between = os.fork()
        except OSError as error:
            _refuse(descriptors, error)
            return False
        if between:
            os.close(settled)
            os.waitpid(between, 0)
            os.close(settling)
            return False
        try:
            if os.fork():
                # Whoever remains has the supervisor for a parent, which takes in all orphans.
                os._exit(0)
            os.close(settling)
            # Nobody is an orphan before its parent has been waited for, however late that is.
            os.read(settled, 1)
            os.close(settled)
            self._sock.close()
            gate, readying = _part(descriptors)
        except BaseException as error:
            _refuse(descriptors, error)
            os._exit(1)
        self._become(descriptors, gate, readying, watch)
        return True

    def _become(self, descriptors: list[int], gate: int, readying: int, watch: Watch) -> None:
        """Become a rank, and wait at the gate."""
        request, _, _, output, *_ = descriptors
        try:
            asked = _content(request)
            words = os.pread(1, os.fstat(1).st_size, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if asked["cgroup"]:
                _join(asked["cgroup"])
            rank.prepare(self._started, rank.of_text(asked["env"]), watch.unseeded)
            rank.set_name(self._rank_name)
            del asked
        except BaseException as error:
            if not _refuse(descriptors, error) and os.read(gate, 1):
                # The waiter did not wait for us so long: this is a rank that has started.
                _print()
            os._exit(126)
        with contextlib.suppress(BrokenPipeError):
            os.write(readying, b"r")
        for fd in (*descriptors, readying):
            os.close(fd)
        if not os.read(gate, 1):
            # The waiter has said why, or was killed.
            os._exit(1)
        os.close(gate)
        # What the imports of a fresh start would have said.
        os.write(1, words)


def _import_all(names: list[str]) -> None:
    usual, few = gc.get_threshold(), (1 << 20, 1 << 10, 1 << 10)
    # What imports make stays: to look for garbage among it takes an eighth of their time.
    gc.set_threshold(*few)
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:
                raise CannotForkError(f"`import {name}` failed: {type(error).__name__}: {error}") from error
    finally:
        # All ranks share it, garbage included: collections leave it alone, so that it stays shared. Before there is a
        # usual one again: the first would look at all of it.
        gc.freeze()
        if gc.get_threshold() == few:
            gc.set_threshold(*usual)


def _changed(imports: Imports) -> str | None:
    try:
        imports.check_names()
    except CannotForkError as error:
        return str(error)
    return imports.changed()


def _memory() -> int:
    """Return the memory that a rank shares with us, in KiB."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("RssAnon:")), 0)


def _refuse(descriptors: list[int], error: BaseException) -> bool:
    """Report why there is no such rank; false where nobody listens any more."""
    try:
        os.write(descriptors[2], json.dumps({"refused": reason(error)}).encode() + b"\n")
    except OSError:
        return False
    return True


def _part(descriptors: list[int]) -> tuple[int, int]:
    """Fork the rank; return its gate and where to say that it is ready there, and be its waiter here."""
    os.setsid()
    gate, go = os.pipe()
    ready, readying = os.pipe()
    worker = os.fork()
    if worker:
        _wait(descriptors, go, ready, worker)
    os.setsid()
    os.close(go)
    os.close(ready)
    return gate, readying


def _wait(descriptors: list[int], go: int, ready: int, worker: int) -> NoReturn:
    """Become the agent's waiter: a small process that knows nothing of all this."""
    request, told, report, _, *keep = descriptors
    asked = _content(request)
    argv, env = asked["waiter"], rank.of_text(asked["waiter_env"])
    _untag()
    null = os.open(os.devnull, os.O_RDWR)
    # A Python that cannot start says why on its stderr.
    for source, target in ((null, 0), (null, 1), (report, 2)):
        os.dup2(source, target)
    held = [told, report, go, ready, *keep]
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), int(name) in held)
            except OSError:
                continue
    os.execve(argv[0], [*argv, *map(str, [*held[:4], worker, *keep])], env)


def _untag() -> None:
    """Take off the tag of the run: a waiter is no process of it."""
    for limit in _TAG_LIMITS:
        soft, hard = resource.getrlimit(limit)
        if soft >= _LEAST_TAG:
            resource.setrlimit(limit, (hard, hard))


def _print() -> None:
    import traceback

    traceback.print_exc()


def _join(procs: str) -> None:
    try:
        with open(procs, "w") as file:
            file.write("0")
    except OSError:
        return
