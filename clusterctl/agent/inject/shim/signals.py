"""Writes down when a SIGTERM or SIGINT reaches a handler of this Python: a program may end with 0 for it.

The program sees its own handlers: `signal.signal` and `signal.getsignal` take and give them as ever, and no frame of
ours stands in a traceback. Handlers of C code, and those set by `_signal` itself, are left alone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import os
from time import monotonic

from .encode import encode

# Not from `typing`: importing that would cost more than all the rest at start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WATCHED = (int(_signal.SIGINT), int(_signal.SIGTERM))


class SignalRecord:
    """The file about the last such signal of one Python."""

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._path = os.path.join(status_dir, f"rank-{rank}.signal.json")
        self._pid, self._start_time = os.getpid(), start_time

    def begin(self) -> None:
        """Watch the handler that Python has set itself, which raises KeyboardInterrupt."""
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _Watched(_signal.default_int_handler, _signal.SIGINT, self))

    def watch(self, module: Any) -> None:
        """Watch the handlers that are set from now on by the module `signal`, which has just been imported."""
        set_handler, get_handler = module.signal, module.getsignal

        def signal(signalnum: Any, handler: Any) -> Any:
            if signalnum in _WATCHED and callable(handler):
                handler = _Watched(handler, signalnum, self)
            return _unwatched(set_handler(signalnum, handler))

        def getsignal(signalnum: Any) -> Any:
            return _unwatched(get_handler(signalnum))

        for ours, original in ((signal, set_handler), (getsignal, get_handler)):
            ours.__module__, ours.__qualname__, ours.__doc__ = (
                original.__module__,
                original.__qualname__,
                original.__doc__,
            )
            vars(ours)["__wrapped__"] = original
            setattr(module, ours.__name__, ours)

    def note(self, number: int) -> None:
        """Write down that a signal has come, if this is not a child that was forked."""
        if os.getpid() != self._pid:
            return
        told = {"pid": self._pid, "start_time": self._start_time, "signal": int(number), "time": monotonic()}
        try:
            with open(f"{self._path}.tmp", "w", encoding="ascii") as file:
                file.write(encode(told))
            os.replace(f"{self._path}.tmp", self._path)
        except OSError:
            return


class _Watched:
    """A handler of somebody, whose calls are noted.

    Python asks for `__call__` and then calls what it is given: so nothing of ours is under way while the handler runs.
    """

    __slots__ = ("_number", "_record", "handler")

    def __init__(self, handler: Any, number: int, record: SignalRecord) -> None:
        self.handler, self._number, self._record = handler, number, record

    @property
    def __call__(self) -> Any:
        self._record.note(self._number)
        return self.handler


def _unwatched(handler: Any) -> Any:
    return handler.handler if type(handler) is _Watched else handler
