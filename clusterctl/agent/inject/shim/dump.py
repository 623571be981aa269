"""Lets the supervisor dump the stacks of all threads by a signal, even while C code holds the GIL.

A signal that nobody catches kills, and a descriptor that was closed may be a user's file by now. So the ready file
names process, signal and descriptor exactly, is renewed as soon as one of them changes, and is withdrawn when the
signal is not ours any more; the sender checks it all again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import _thread
import faulthandler
import fcntl
import os

from .encode import encode

# From the middle of the real-time range: glibc takes the lowest ones, valgrind and debuggers the highest, and programs
# that want one of their own count up from SIGRTMIN or down from SIGRTMAX.
_OFFSETS = (12, 13, 14, 11, 10, 9, 15, 16)
# High numbers are the last to be used again after a program has closed everything.
_HIGH_DESCRIPTOR = 700


class Dumper:
    """Arms and re-arms one signal of this process."""

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._stacks = os.path.join(status_dir, f"rank-{rank}.stacks")
        self._ready = os.path.join(status_dir, f"rank-{rank}.ready.json")
        self._start_time = start_time
        self._main = _thread.get_ident()
        self._number: int | None = None
        self._fd = -1
        self._file: tuple[int, int] | None = None
        self._handler: bytes | None = None

    def arm(self) -> None:
        """Takes a free signal and says so.

        Raises:
            OSError: If the stacks file cannot be opened or no signal is free.
        """
        number = _free_signal()
        self._open()
        faulthandler.register(number, file=self._fd, all_threads=True, chain=False)
        self._number = number
        self._announce()

    def check(self) -> None:
        """Looks once a second whether the signal and the descriptor are still ours, and puts right what is not.

        Raises:
            OSError: If that fails; nothing is announced then.
        """
        if self._number is None:
            return
        if not self._signal_is_ours():
            self._withdraw()
            self._number = self._handler = None
            self.arm()
        elif not self._descriptor_is_ours():
            self._withdraw()
            self._open()
            faulthandler.register(self._number, file=self._fd, all_threads=True, chain=False)
            self._announce()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        low = os.open(self._stacks, flags, 0o600)
        try:
            self._fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
        except OSError:  # a low limit of open files
            self._fd, low = low, -1
        if low >= 0:
            os.close(low)
        status = os.fstat(self._fd)
        self._file = (status.st_dev, status.st_ino)

    def _descriptor_is_ours(self) -> bool:
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file

    def _signal_is_ours(self) -> bool:
        # Python keeps its own table: faulthandler does not touch it, a user's `signal.signal` does.
        if self._number is None or _signal.getsignal(self._number) != _signal.SIG_DFL:
            return False
        try:
            from .stamp import signal_handler

            handler = signal_handler(self._number)
        except (ImportError, OSError, AttributeError):
            return True  # without ctypes a handler set by C code stays unseen; the sender checks SigCgt
        self._handler = self._handler or handler
        return handler == self._handler

    def _announce(self) -> None:
        device, inode = self._file or (0, 0)
        facts = {
            "pid": os.getpid(),
            "start_time": self._start_time,
            "signal": self._number,
            "fd": self._fd,
            "dev": device,
            "ino": inode,
            "main_thread": self._main,
        }
        temporary = f"{self._ready}.tmp"
        with open(temporary, "w", encoding="ascii") as file:
            file.write(encode(facts))
        os.replace(temporary, self._ready)

    def _withdraw(self) -> None:
        try:  # noqa: SIM105  (importing `contextlib` at start would cost more)
            os.unlink(self._ready)
        except FileNotFoundError:
            pass


def _free_signal() -> int:
    """A real-time signal that nobody in this process catches, ignores or blocks."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        masks = dict(line.split(":\t", 1) for line in file if line.startswith("Sig") and ":\t" in line)
    used = 0
    for name in ("SigBlk", "SigIgn", "SigCgt"):
        used |= int(masks.get(name, "0"), 16)
    for offset in _OFFSETS:
        number = int(_signal.SIGRTMIN) + offset
        if not used >> (number - 1) & 1 and _signal.getsignal(number) == _signal.SIG_DFL:
            return number
    raise OSError("no free real-time signal")
