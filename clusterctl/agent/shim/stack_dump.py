"""Lets the supervisor dump the stacks of all threads by a signal, even while C code holds the GIL.

A signal without a handler kills the process, and a closed descriptor may be a user's file now. So the ready file names
process, signal and descriptor exactly, and is removed if one of them is not ours any more. The sender checks all of
them again, and takes the stacks in another way if there is no ready file.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import _thread
import faulthandler
import fcntl
import os

from .file_writer import encode, remove_file, replace_file

# From the middle of the real-time range: glibc takes the lowest signals, valgrind and debuggers the highest, and
# programs that want one of their own count up from SIGRTMIN or down from SIGRTMAX.
_OFFSETS = (12, 13, 14, 11, 10, 9, 15, 16)
# High numbers are the last to be used again after a program has closed everything.
_HIGH_DESCRIPTOR = 700


class StackDumper:
    """Arms one signal of this process."""

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._stacks = os.path.join(status_dir, f"rank-{rank}.stacks")
        self._ready = os.path.join(status_dir, f"rank-{rank}.ready.json")
        self._start_time = start_time
        self._number: int | None = None
        self._fd = -1
        self._file: os.stat_result | None = None

    def arm(self) -> None:
        """Take a free signal, and write the ready file.

        Raises:
            OSError: The stacks file cannot be opened, or no signal is free.
        """
        number = _find_free_signal()
        low = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
            os.close(low)
        except OSError:  # a low limit of open files
            self._fd = low
        self._file = os.fstat(self._fd)
        faulthandler.register(number, file=self._fd, all_threads=True, chain=False)
        self._number = number
        facts = {
            "pid": os.getpid(),
            "start_time": self._start_time,
            "signal": number,
            "fd": self._fd,
            "dev": self._file.st_dev,
            "ino": self._file.st_ino,
            "main_thread": _thread.get_ident(),
        }
        replace_file(self._ready, encode(facts))

    def check(self) -> None:
        """Check that signal and descriptor are still ours, and remove the ready file if not.

        Raises:
            OSError: They are not ours any more.
        """
        # Python keeps its own table: faulthandler does not touch it, a user's `signal.signal` does.
        if self._number is None or (self._has_descriptor() and _signal.getsignal(self._number) == _signal.SIG_DFL):
            return
        remove_file(self._ready)
        raise OSError("the program has taken the signal, or closed the file, for stack dumps")

    def _has_descriptor(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._fd), self._file)
        except OSError:
            return False


def _find_free_signal() -> int:
    """Return a real-time signal that this process neither catches nor ignores nor blocks."""
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
