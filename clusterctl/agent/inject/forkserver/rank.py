"""Becoming a rank: a fork gets what a fresh start would have been given, and draws anew what that would have drawn."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
import time
import types

from .errors import CannotForkError
from .watch import OLD_TORCH_SEED

TYPE_CHECKING = False
if TYPE_CHECKING:
    import random
    import weakref
    from collections.abc import Iterable
    from typing import Any

_ROOM = b"CLUSTERCTL_FORKSERVER="
"""Begins the variables that only a forkserver has. Its value is long, so that those of a rank find room there."""
_ENV_START, _ENV_END = 50, 51
"""Fields of /proc/PID/stat (proc(5))."""


def prepare(
    started: dict[bytes, bytes], env: dict[bytes, bytes], unseeded: Iterable[weakref.ref[random.Random]]
) -> None:
    """Be what a fresh start would be.

    Args:
        started: The environment that the forkserver was started with. What imports have changed since stays changed.
        env: That of the rank.
        unseeded: Generators that a fresh start would have seeded by chance.
    """
    for name in started.keys() | env.keys():
        if started.get(name) != env.get(name):
            if name in env:
                os.environb[name] = env[name]
            else:
                os.environb.pop(name, None)
    _show(env)
    importlib.invalidate_caches()
    know = getattr(threading.main_thread(), "_set_native_id", None)
    if know is not None:
        know()
    _draw_anew(unseeded)
    # What was there when imports were frozen is never collected. The one that Python runs is, when it ends.
    main = types.ModuleType("__main__")
    vars(main).update(vars(sys.modules["__main__"]))
    sys.modules["__main__"] = main
    for stream in (sys.stdout, sys.stderr):
        _go_to_the_end(stream)


def _show(env: dict[bytes, bytes]) -> None:
    """Have the kernel show this environment: what the forkserver was not started with goes where there is room for it.

    Raises:
        CannotForkError: There is none.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[_ENV_START - 3]), int(fields[_ENV_END - 3])
    with open("/proc/self/environ", "rb") as file:
        shown, found, _ = file.read().partition(_ROOM)
    front = {*shown.split(b"\0")}
    rest = b"".join(entry + b"\0" for name, value in env.items() if (entry := name + b"=" + value) not in front)
    room = end - start - len(shown)
    if not found or len(rest) > room:
        raise CannotForkError("the environment of a rank could not be shown")
    ctypes.memmove(start + len(shown), rest.ljust(room, b"\0"), room)


def set_name(name: str) -> None:
    """Set what `ps -o comm` shows."""
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def of_text(values: dict[str, str]) -> dict[bytes, bytes]:
    """Return variables of a request as the kernel has them, whatever encoding the user's Python goes by."""
    how = ("utf-8", "surrogateescape")
    return {name.encode(*how): value.encode(*how) for name, value in values.items()}


def _draw_anew(unseeded: Iterable[weakref.ref[random.Random]]) -> None:
    """Draw again what a fresh start draws by chance or of the clock; `random` does so by itself."""
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
        # `relativeCreated` counts from here.
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()  # noqa: SLF001
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)


def _go_to_the_end(stream: Any) -> None:
    """Know where the output stands: it is another file than the one that was there at the start."""
    try:
        stream.flush()
        if stream.seekable():
            stream.seek(0, os.SEEK_END)
    except (OSError, ValueError, AttributeError):
        return
