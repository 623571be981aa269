"""Writes down how this Python ends. Where a shell has started it, the exit code of the rank may be another program's.

In a Python that is the first process of its rank nothing is done: its own exit code tells all.
"""

from __future__ import annotations

import atexit
import os
import sys
from time import monotonic

from .child_record import is_child_of_python
from .claim import start_ticks
from .encode import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RUNNING, WELL, FAILED = "running", "well", "failed"
_PROMPT_S = 1.0
"""A `sys.exit` that is followed by the end of Python in this time was the reason for it: nobody has caught it."""
_MOST_MESSAGE, _MOST_TRACEBACK = 8192, 32768


class ExitRecord:
    """The file about the end of one Python; of several, one after the other, the first that failed stays in it."""

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.python.json")
        self._pid, self._start_time = os.getpid(), start_time
        self._exit: tuple[object, float] = (0, 0.0)

    def begin(self) -> None:
        """Watch this process, if a shell has started it and it is no `python -c`, which may be a mere question."""
        if os.getsid(0) == self._pid or is_child_of_python() or sys.argv[:1] == ["-c"] or self._others_failed():
            return
        self._write(RUNNING)
        atexit.register(self._finish)
        sys.exit = self._noting(sys.exit, self._note_exit)
        # `exit` and `quit` of `site`, which raise SystemExit themselves; a `raise` of somebody else cannot be noticed.
        quitter: Any = getattr(sys.modules.get("_sitebuiltins"), "Quitter", None)
        if quitter is not None:
            quitter.__call__ = self._noting(quitter.__call__, lambda _, *status: self._note_exit(*status))
        os._exit = self._noting(os._exit, self._note_quick_exit)
        for name in ("execv", "execve"):
            # What it becomes ends in its own way.
            setattr(os, name, self._noting(getattr(os, name), lambda *_: self._write(WELL)))

    def _noting(self, original: Any, note: Callable[..., None]) -> Any:
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
        self._write(FAILED if status else WELL, f"os._exit({status})" if status else "")

    def _finish(self) -> None:
        """At exit: Python has put what nobody caught into `sys.last_value`."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        status, time = self._exit
        if isinstance(error, BaseException):
            import traceback

            message = "".join(traceback.format_exception_only(type(error), error)).strip()
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._write(FAILED, message, trace)
        elif status and monotonic() - time < _PROMPT_S:
            self._write(FAILED, f"SystemExit: {status}")
        else:
            self._write(WELL)

    def _others_failed(self) -> bool:
        """Return whether a Python before this one has failed, or ended without a word."""
        import json

        try:
            with open(self._path, encoding="ascii") as file:
                found = json.load(file)
            own = (found["pid"], found["start_time"]) == (self._pid, self._start_time)
            ended_silently = found["end"] == RUNNING and start_ticks(found["pid"]) != found["start_time"]
            return not own and (found["end"] == FAILED or ended_silently)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _write(self, end: str, message: str = "", trace: str = "") -> None:
        record = {
            "pid": self._pid,
            "start_time": self._start_time,
            "program": sys.argv[0] if sys.argv else "",
            "end": end,
            "message": message[:_MOST_MESSAGE],
            "traceback": trace[-_MOST_TRACEBACK:],
        }
        temporary = f"{self._path}.tmp"
        try:
            with open(temporary, "w", encoding="ascii") as file:
                file.write(encode(record) if not message else _encode_long(record))
            os.replace(temporary, self._path)
        except (OSError, ValueError):  # better no word than an old one
            for path in (temporary, self._path):
                if os.path.exists(path):
                    os.unlink(path)


def _encode_long(record: dict[str, Any]) -> str:
    import json

    return json.dumps(record)
