"""Checks whether a forked rank would behave as a rank in a new process.

A fork is not possible if imports have opened files, started threads, or used random numbers, for example. Most such
actions can be detected after the imports. Reads of random numbers, pids and environment variables leave no trace, so
they are recorded during the imports.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import weakref

from . import CannotForkError
from .installed_modules import is_standard_library_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_SAFE = ("joblib", "keras", "numpy", "psutil", "rich", "scipy", "sklearn", "sympy", "torch")
"""Packages that are allowed to use pids and random numbers at import: a review found that this is safe in forks."""
_NEVER = ("jax", "tensorflow")
"""Packages with which no rank is forked, because they may fail in a fork."""
OLD_TORCH_SEED = 67280421310721
"""The seed that torch before version 2.13 uses in each process. Later versions draw a random seed in each process."""
_MIN_DRAWN_SEED = 1 << 48
"""Seeds that torch draws have 64 bits, and seeds that people set are smaller than this number."""
_FRESH_NUMPY_POSITION = 623
"""Position of numpy's global generator before the first use or seed."""
_PID = "has read the id of its process"
_DRAWN = "has drawn a random value that each rank would draw for itself"
_PID_FUNCTIONS = ("getpid", "getppid", "getpgrp", "getpgid", "getsid")


class _Environment(dict):  # type: ignore[type-arg]
    """Replaces the dictionary of `os.environ`, and records which of the variables `names` are read."""

    def __init__(self, values: dict[bytes, bytes], names: set[bytes]) -> None:
        super().__init__(values)
        self.names, self.read_names = names, list[str]()

    def __getitem__(self, name: bytes) -> bytes:  # type: ignore[explicit-override]
        if name in self.names:
            self.read_names.append(os.fsdecode(name))
        return super().__getitem__(name)  # type: ignore[no-any-return]


class ImportWatch:
    """Records what modules do to the process while they are imported.

    Attributes:
        unseeded: Random number generators that a rank has to seed again.
    """

    def __init__(self, rank_names: Iterable[str]) -> None:
        """Make a watch; `rank_names` are the environment variables that differ between ranks."""
        self.unseeded: list[weakref.ref[random.Random]] = []
        self._rank_names = set(map(os.fsencode, rank_names))
        self._reasons: list[str] = []
        self._originals: list[tuple[Any, str, Any]] = []
        self._is_watching = False

    def __enter__(self) -> ImportWatch:
        """Start watching."""
        self._before = self._read_state()
        self._environment = _Environment(os.environ._data, self._rank_names)  # type: ignore[attr-defined]  # noqa: SLF001
        _replace_environment(self._environment)
        for name in _PID_FUNCTIONS:
            self._wrap(os, name, _PID)
        self._wrap(os, "urandom", _DRAWN)
        self._wrap(random, "_urandom", _DRAWN)
        for name in dir(random):
            # The functions of the module `random` are methods of one hidden generator.
            if getattr(getattr(random, name), "__self__", None) is random._inst:  # noqa: SLF001
                self._wrap(random, name, "has seeded `random`" if name in ("seed", "setstate") else _DRAWN)
        self._watch_generators()
        self._is_watching = True
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self._is_watching = False
        _replace_environment(dict(self._environment))
        for module, name, value in reversed(self._originals):
            setattr(module, name, value)

    def _wrap(self, module: Any, name: str, what: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def recording(*arguments: Any, **more: Any) -> Any:
            self._record_reason(what)
            return original(*arguments, **more)

        self._originals.append((module, name, original))
        setattr(module, name, recording)

    def _watch_generators(self) -> None:
        original = random.Random.seed

        @functools.wraps(original)
        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None and self._is_watching:
                self._record_reason("has made a random number generator")
                self.unseeded.append(weakref.ref(generator))
            original(generator, a, version)

        self._originals.append((random.Random, "seed", original))
        random.Random.seed = seed  # type: ignore[method-assign, assignment]

    def _record_reason(self, what: str) -> None:
        package = _find_caller() if self._is_watching else None
        if package is not None and package not in _SAFE:
            self._reasons.append(f"`{package}` {what} when it was imported")

    def _read_state(self) -> dict[str, object]:
        """Return the state of the process that imports must not change, because forks would inherit the change."""
        kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        values = os.environb
        return {
            "its folder": _read_link("/proc/self/cwd"),
            "its arguments": (list(sys.argv), list(getattr(sys, "orig_argv", ()))),
            "a timer": ([signal.getitimer(kind)[0] > 0 for kind in kinds], _read_text("/proc/self/timers")),
            "its limits": _read_text("/proc/self/limits"),
            "its output": [_read_link(f"/proc/self/fd/{fd}") for fd in range(3)],
            "its processors": os.sched_getaffinity(0),
            **{os.fsdecode(name): values.get(name) for name in self._rank_names},
        }

    def check_forkable(self, control: int) -> None:
        """Check that ranks may be forked after the imports; `control` is the descriptor of the supervisor's connection.

        Raises:
            CannotForkError: Ranks must start as new processes.
        """
        for name in self._environment.read_names:
            raise CannotForkError(f"an imported module has read {name}, whose value each rank gets at its start")
        if getattr(sys.modules.get("tempfile"), "_name_sequence", None) is not None:
            raise CannotForkError("an imported module has made a temporary file or folder, which ranks would share")
        for reason in self._reasons:
            raise CannotForkError(reason)
        for name in _NEVER:
            if name in sys.modules:
                raise CannotForkError(f"{name} was imported, and may not work in a fork")
        now = self._read_state()
        for what, before in self._before.items():
            if now[what] != before:
                raise CannotForkError(f"an imported module has changed {what}")
        if sys.gettrace() is not None or sys.getprofile() is not None:
            raise CannotForkError("a tracer or a profiler is active")
        _check_descriptors(control)
        _check_generators()
        _check_threads_and_children()
        for line in _read_text("/proc/self/maps").splitlines():
            fields = line.split(None, 5)
            if fields[1][1] == "w" and fields[1][3] == "s":
                where = fields[5] if len(fields) > 5 else "without a name"
                raise CannotForkError(f"an imported module shares memory with its forks: {where}")


def _find_caller() -> str | None:
    """Return the package of the calling code; `None` if the import of a standard library module makes the call."""
    frame: Any = sys._getframe(3)  # noqa: SLF001
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return None
        if not is_standard_library_file(file):
            return str(frame.f_globals.get("__name__", file)).partition(".")[0]
        frame = frame.f_back
    return None


def _replace_environment(values: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):
        setattr(environ, "_data", values)  # noqa: B010 - typeshed does not know it


def _check_descriptors(control: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        target = _read_link(f"/proc/self/fd/{name}")
        if int(name) > 2 and int(name) != control and target is not None:
            what = "a connection" if target.startswith("socket:") else target
            raise CannotForkError(f"an imported module has opened {what}, which ranks would share")


def _check_generators() -> None:
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "get_state") and numpy.get_state()[2] != _FRESH_NUMPY_POSITION:
        raise CannotForkError("an imported module has seeded `numpy.random`, or drawn from it")
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "default_generator"):
        return
    seed = torch.initial_seed()
    is_fresh = seed == OLD_TORCH_SEED or seed >= _MIN_DRAWN_SEED
    if not is_fresh or not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()):
        raise CannotForkError("an imported module has seeded torch, or drawn from its generator")
    if torch.cuda.is_initialized():
        raise CannotForkError("an imported module has initialised CUDA")


def _check_threads_and_children() -> None:
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        # Some libraries end their threads before a fork, so fork once and count again.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        threads = len(os.listdir("/proc/self/task")) - 1
        os.waitpid(pid, 0)
    if threads:
        raise CannotForkError(f"an imported module runs {threads} threads, which a fork would lose")
    try:
        has_child = os.waitpid(-1, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return
    if has_child:
        raise CannotForkError("an imported module has started a process")


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _read_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
