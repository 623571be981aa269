"""What imports do that a fork shares, loses or has otherwise than a fresh start: each is a reason to start anew."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import weakref

from .errors import CannotForkError
from .installed import is_standard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_SAFE = ("joblib", "keras", "numpy", "psutil", "rich", "scipy", "sklearn", "sympy", "torch")
"""Packages whose use of their pid and of chance at import was read: it means the same in a fork."""
_NEVER = ("jax", "tensorflow")
"""What is not known to work in a fork."""
OLD_TORCH_SEED = 67280421310721
"""Every process of a torch before 2.13 begins with this seed; since then each draws one."""
_LEAST_DRAWN_SEED = 1 << 48
"""What torch draws has 64 bits; what a person sets is less."""
_FRESH_NUMPY_POSITION = 623
"""Where numpy's own generator stands that nobody has seeded or drawn from."""
_SHARE_PID = "has taken the number of its process"
_SHARE_CHANCE = "has drawn by chance what each rank would draw for itself"


class _Environment(dict):  # type: ignore[type-arg]
    """The values behind `os.environ`; notes which of some names are read, set or removed."""

    def __init__(self, values: dict[bytes, bytes], names: Iterable[str]) -> None:
        super().__init__(values)
        self.names = frozenset(map(os.fsencode, names))
        self.used: list[str] = []

    def _note(self, what: str, name: bytes) -> None:
        if name in self.names:
            self.used.append(f"has {what} {os.fsdecode(name)}")

    def __getitem__(self, name: bytes) -> bytes:  # type: ignore[explicit-override]
        self._note("read", name)
        return super().__getitem__(name)  # type: ignore[no-any-return]

    def __setitem__(self, name: bytes, value: bytes) -> None:  # type: ignore[explicit-override]
        self._note("set", name)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:  # type: ignore[explicit-override]
        self._note("removed", name)
        super().__delitem__(name)


class Watch:
    """Looks at what happens while modules are imported.

    Attributes:
        unseeded: Generators that a fresh start would have seeded by chance.
    """

    def __init__(self, rank_names: Iterable[str]) -> None:
        """Prepare to look; `rank_names` are the variables whose value only a rank has."""
        self.unseeded: list[weakref.ref[random.Random]] = []
        self._rank_names = tuple(rank_names)
        self._reasons: list[str] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._watching = False

    def __enter__(self) -> Watch:
        """Begin to look."""
        self._before = _state()
        self._environment = _Environment(os.environ._data, self._rank_names)  # type: ignore[attr-defined]  # noqa: SLF001
        _put_environment(self._environment)
        for name in ("getpid", "getppid", "getpgrp", "getpgid", "getsid"):
            self._wrap(os, name, _SHARE_PID)
        self._wrap(os, "urandom", _SHARE_CHANCE)
        self._wrap(random, "_urandom", _SHARE_CHANCE)
        for name in dir(random):
            # All functions of the module are methods of one hidden generator.
            if getattr(getattr(random, name), "__self__", None) is random._inst:  # noqa: SLF001
                self._wrap(random, name, "has seeded `random`" if name in ("seed", "setstate") else _SHARE_CHANCE)
        self._watch_generators()
        self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        """Look no longer."""
        self._watching = False
        _put_environment(dict(self._environment))
        for module, name, value in reversed(self._undo):
            setattr(module, name, value)

    def _wrap(self, module: Any, name: str, what: str) -> None:
        usual = getattr(module, name)

        @functools.wraps(usual)
        def noting(*arguments: Any, **more: Any) -> Any:
            self._note(what)
            return usual(*arguments, **more)

        self._undo.append((module, name, usual))
        setattr(module, name, noting)

    def _watch_generators(self) -> None:
        usual = random.Random.seed

        @functools.wraps(usual)
        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None and self._watching:
                self._note("has made a generator of random numbers")
                self.unseeded.append(weakref.ref(generator))
            usual(generator, a, version)

        self._undo.append((random.Random, "seed", usual))
        random.Random.seed = seed  # type: ignore[method-assign, assignment]

    def _note(self, what: str) -> None:
        package = _caller() if self._watching else None
        if package is not None and package not in _SAFE:
            self._reasons.append(f"`{package}` {what} when it was imported")

    # --- afterwards

    def check(self, control: int) -> None:
        """See whether ranks may be forked; `control` is our own connection.

        Raises:
            CannotForkError: They may not.
        """
        if self._environment.used:
            used = self._environment.used[0]
            raise CannotForkError(f"what was imported {used}, whose value each rank gets at its start")
        if getattr(sys.modules.get("tempfile"), "_name_sequence", None) is not None:
            raise CannotForkError("what was imported has made a temporary file or folder, which ranks would share")
        if self._reasons:
            raise CannotForkError(self._reasons[0])
        for name in _NEVER:
            if name in sys.modules:
                raise CannotForkError(f"{name} was imported, which is not known to work in a fork")
        now = _state()
        for what, before in self._before.items():
            if now[what] != before:
                raise CannotForkError(f"what was imported has changed {what}")
        _check_descriptors(control)
        _check_generators()
        if sys.gettrace() is not None or sys.getprofile() is not None:
            raise CannotForkError("a tracer is at work")
        check_process()


def _caller() -> str | None:
    """Return the package whose code has called; `None` for a module of the standard library that is being imported."""
    frame: Any = sys._getframe(3)  # noqa: SLF001
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return None
        if not is_standard(file):
            return str(frame.f_globals.get("__name__", file)).partition(".")[0]
        frame = frame.f_back
    return None


def _put_environment(values: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):
        setattr(environ, "_data", values)  # noqa: B010 - typeshed knows nothing of it


def _state() -> dict[str, object]:
    """Return what a fork has otherwise than a fresh start, if imports change it."""
    timers = [signal.getitimer(kind)[0] > 0 for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        folder = ""
    return {
        "its folder": folder,
        "its arguments": (list(sys.argv), list(getattr(sys, "orig_argv", ()))),
        "a timer": (timers, _text("/proc/self/timers")),
        "its limits": _text("/proc/self/limits"),
        "its output": [_target(fd) for fd in range(3)],
        "its processors": os.sched_getaffinity(0),
    }


def _check_descriptors(control: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        target = _target(int(name))
        if int(name) > 2 and int(name) != control and target is not None:
            what = "a connection" if target.startswith("socket:") else target
            raise CannotForkError(f"what was imported has opened {what}, which ranks would share")


def _target(fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def _check_generators() -> None:
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "get_state") and numpy.get_state()[2] != _FRESH_NUMPY_POSITION:
        raise CannotForkError("what was imported has seeded `numpy.random`, or drawn from it")
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "default_generator"):
        return
    seed = torch.initial_seed()
    is_fresh = seed == OLD_TORCH_SEED or seed >= _LEAST_DRAWN_SEED
    if not is_fresh or not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state()):
        raise CannotForkError("what was imported has seeded torch, or drawn from its generator")
    if torch.cuda.is_initialized():
        raise CannotForkError("what was imported has initialised CUDA")


def check_process() -> None:
    """See whether the process itself may be forked.

    Raises:
        CannotForkError: A fork would lose a thread or a child, or share memory.
    """
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        # Libraries end theirs before a fork, and start them again where they are needed.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        threads = len(os.listdir("/proc/self/task")) - 1
        os.waitpid(pid, 0)
    if threads:
        raise CannotForkError(f"what was imported runs {threads} threads, which a fork would lose")
    try:
        ended, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        ended = -1
    if not ended:
        raise CannotForkError("what was imported has started a process")
    for line in _text("/proc/self/maps").splitlines():
        fields = line.split(None, 5)
        if fields[1][1] == "w" and fields[1][3] == "s":
            where = fields[5] if len(fields) > 5 else "without a name"
            raise CannotForkError(f"what was imported shares memory with whoever forks: {where}")


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
