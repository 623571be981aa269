"""Provides keys and signals as readable file descriptors, and the alternate screen of the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
from collections.abc import Iterator
from typing import TYPE_CHECKING

from typing_extensions import Self

from clusterctl.run.controller import detached_process

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ESCAPE_SEQUENCES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
}


@contextlib.contextmanager
def open_keyboard(*, enabled: bool) -> Iterator[int | None]:
    """Yield a descriptor that reads single keys without echo, or `None` without a keyboard.

    Ctrl-C still sends SIGINT.
    """
    if not enabled or not _in_foreground(fd := sys.stdin.fileno()):
        yield None
        return
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    try:
        termios.tcsetattr(fd, termios.TCSANOW, mode)
        yield fd
    finally:
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _in_foreground(fd: int) -> bool:
    """Return whether this process is in the foreground of the terminal, so that it may change terminal settings.

    Under `setsid`, `su -c` and in containers, the terminal may belong to another session. If another session has the
    terminal, the kernel answers with ENOTTY.
    """
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def read_keys(fd: int) -> bytes:
    """Return the typed bytes; no bytes if the terminal has hung up."""
    try:
        return os.read(fd, 64)
    except OSError:
        return b""


@contextlib.contextmanager
def catch_signals(*more_signals: int) -> Iterator[int]:
    """Yield a descriptor to read a byte (the signal number) for each SIGINT, SIGTERM, SIGHUP or given signal."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_fd = signal.set_wakeup_fd(writer)
    # Keep ignored signals ignored: `nohup` ignores SIGHUP, and shells may ignore SIGINT in commands with `&`.
    caught = [number for number in LEAVE_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    old = {number: signal.signal(number, lambda *_: None) for number in (*caught, *more_signals)}
    # A signal that `up` has deferred arrives when this call unblocks it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, detached_process.DEFERRED_SIGNALS)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


class AlternateScreen:
    """A context that shows the alternate screen of a terminal and reads single keys.

    The end of the context restores the terminal. Ctrl-C, SIGTERM and SIGHUP end the screen. Ctrl-Z restores the
    terminal until the command continues.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._signals, self._keys = contextlib.ExitStack(), contextlib.ExitStack()
        self._typed_text = ""

    def __enter__(self) -> Self:
        self._wake = self._signals.enter_context(catch_signals(signal.SIGTSTP, signal.SIGWINCH))
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._signals.close()

    def wait_for_key(self, seconds: float) -> str | None:
        """Wait for a key and return it; the arrow and page keys are `up`, `down`, `pageup` and `pagedown`.

        The result is "" if the command should end, and `None` after `seconds` or after a change of the terminal size.
        """
        if not self._typed_text:
            descriptors = [self._wake] if self._keyboard is None else [self._keyboard, self._wake]
            ready = select.select(descriptors, [], [], seconds)[0]
            if self._wake in ready:
                numbers = os.read(self._wake, 64)
                if any(number in numbers for number in LEAVE_SIGNALS):
                    return ""
                if signal.SIGTSTP in numbers:
                    self._close()
                    os.kill(os.getpid(), signal.SIGSTOP)
                    self._open()
            if self._keyboard is None or self._keyboard not in ready or self._wake in ready:
                return None
            self._typed_text = read_keys(self._keyboard).decode(errors="replace")
        return self._pop_key()

    def _pop_key(self) -> str:
        """Remove and return the first typed key; "" if the terminal has hung up."""
        for sequence, name in _ESCAPE_SEQUENCES.items():
            if self._typed_text.startswith(sequence):
                self._typed_text = self._typed_text[len(sequence) :]
                return name
        key, self._typed_text = self._typed_text[:1], self._typed_text[1:]
        return key

    def _open(self) -> None:
        self._keyboard = self._keys.enter_context(open_keyboard(enabled=True))
        self._terminal.switch_screen(alternate=True)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._terminal.switch_screen(alternate=False)
        self._keys.close()
