"""Keys and signals of the person who follows a run, as descriptors that can be waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from clusterctl.cli.signals import heeded
from clusterctl.run.controller import process

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def keys(*, enabled: bool) -> Iterator[int | None]:
    """Give single key presses, not echoed; Ctrl-C stays a signal. `None` where no keys can be read."""
    if not enabled or not _in_foreground(fd := sys.stdin.fileno()):
        yield None
        return
    import termios

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
    """Return whether this process may change the terminal.

    It may not in the background of a shell. Under `setsid`, `su -c` and in containers the terminal may be the
    controlling one of another session, or of none: the kernel then answers with ENOTTY.
    """
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def typed(fd: int) -> bytes:
    """Return what was typed; nothing where the terminal is gone."""
    try:
        return os.read(fd, 64)
    except OSError:
        return b""


@contextlib.contextmanager
def signals() -> Iterator[int]:
    """Give SIGINT, SIGTERM and SIGHUP, a byte with its number each."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_fd = signal.set_wakeup_fd(writer)
    old = {n: signal.signal(n, lambda *_: None) for n in heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # A signal that was held back until the view could answer it comes now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.HELD_BACK)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
