"""The whole terminal for one command: an alternate screen that is redrawn, single keys, and everything as it was after.

Ctrl-C, SIGTERM and SIGHUP leave; Ctrl-Z gives the terminal back until the command is continued.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
from typing import TYPE_CHECKING

from clusterctl.cli.signals import heeded
from clusterctl.render.sanitize import sanitize_line

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_SEQUENCES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
}
_LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Screen:
    """The terminal of stdin and stdout, as a context. Both must be terminals."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._before = termios.tcgetattr(self._in)
        self._handlers: dict[int, object] = {}
        self._wake = (-1, -1)
        self._old_wake = -1
        self._typed = ""

    def __enter__(self) -> Self:
        self._wake = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        self._old_wake = signal.set_wakeup_fd(self._wake[1])
        for number in (*heeded(*_LEAVE_SIGNALS), signal.SIGTSTP, signal.SIGWINCH):
            self._handlers[number] = signal.signal(number, lambda *_: None)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for fd in self._wake:
            os.close(fd)

    @property
    def height(self) -> int:
        """Lines of the terminal now."""
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self._out).lines or 24
        return 24

    def draw(self, lines: list[str]) -> None:
        """Show lines in place of what was there; without a flicker, for nothing is cleared before it is overwritten."""
        shown = (sanitize_line(" ".join(line.split("\n"))) for line in lines)
        self._write(_HOME + "\r\n".join(line + _TO_LINE_END for line in shown) + _TO_END)

    def key(self, seconds: float) -> str | None:
        """Wait for a key, at most so long; return it (`up`, `down`, `pageup`, `pagedown` for those), "" to leave.

        Returns `None` when time is over or the size of the terminal has changed.
        """
        if self._typed:
            return self._next()
        ready = select.select([self._in, self._wake[0]], [], [], seconds)[0]
        if self._wake[0] in ready:
            numbers = os.read(self._wake[0], 64)
            if any(number in numbers for number in _LEAVE_SIGNALS):
                return ""
            if signal.SIGTSTP in numbers:
                self._stop()
            return None
        if self._in not in ready:
            return None
        typed = os.read(self._in, 64).decode(errors="replace")
        if not typed:
            # The terminal has hung up.
            return ""
        self._typed = typed
        return self._next()

    def _next(self) -> str:
        """Return the first key of what was typed, and keep the rest."""
        for sequence, name in _SEQUENCES.items():
            if self._typed.startswith(sequence):
                self._typed = self._typed[len(sequence) :]
                return name
        key, self._typed = self._typed[0], self._typed[1:]
        return key

    def _stop(self) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        mode = termios.tcgetattr(self._in)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(self._in, termios.TCSANOW, mode)
        self._write(_ENTER)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._in, termios.TCSANOW, self._before)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
