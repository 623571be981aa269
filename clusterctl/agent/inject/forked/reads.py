"""What imports have read beside modules: settings, libraries, and what makes the interpreter what it is.

Only a zygote that is to be kept for another run needs it: a hook for audits stays in a process for good.
"""

from __future__ import annotations

import os
import stat
import sys

from . import origins

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    Look = tuple[int, ...]
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_FILES = (_OURS + "/", "/proc/", "/sys/", "/dev/")
"""Our own are touched by each run; what the kernel serves has no time of its own."""
_TOO_LATE = (-1,)
"""What was written while imports went on: nobody knows which content they have seen."""


class Reads:
    """Which files were opened while it watched, and how they were.

    What was only looked for, without being opened, is not seen.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._watching = False
        self._opened: dict[str, bool] = {}
        self._known: dict[str, Look | None] = {}

    def watch(self) -> None:
        """Note from now on which files are opened."""
        self._watching = True
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: Any) -> None:
        if self._watching and event == "open":
            path, _, flags = arguments
            # A module is looked at where it lies, and a log grows.
            if isinstance(path, (str, bytes)) and not flags & os.O_APPEND:
                name = os.path.abspath(os.fsdecode(path))
                if not name.startswith(_NOT_FILES) and not name.endswith(".pyc"):
                    ours = bool(flags & (os.O_WRONLY | os.O_RDWR))
                    self._opened[name] = self._opened.get(name, False) or ours

    def end(self, since: int, now: int) -> None:
        """Note no longer; remember how all of them are. Imports took from `since` to `now`, in nanoseconds."""
        self._watching = False
        for path in {*self._opened, *_of_python(), *_libraries()}:
            look = _look(path)
            written = look is not None and since <= max(look[:2]) <= now
            self._known[path] = _TOO_LATE if written and not self._opened.get(path) else look

    def changed(self) -> str | None:
        """Return a file that is not as it was."""
        return next((path for path, known in self._known.items() if _look(path) != known), None)


def _of_python() -> Iterator[str]:
    """Yield what Python is, and what tells it at its start where modules are."""
    yield sys.executable
    yield os.path.join(sys.prefix, "pyvenv.cfg")
    for folder in origins.installed():
        yield from (os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))


def _libraries() -> Iterable[str]:
    """Return the files whose code is in this process, the interpreter's own among them."""
    with open("/proc/self/maps") as file:
        fields = [line.rstrip("\n").split(None, 5) for line in file]
    return {parts[5] for parts in fields if len(parts) > 5 and "x" in parts[1] and parts[5].startswith("/")}


def _look(path: str) -> Look | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return (status.st_mode,)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size
