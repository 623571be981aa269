"""Dumps the stacks of all threads if the supervisor requests it, by a file or by a signal.

The shim's thread answers the file `rank-R.dump` once a second, while it holds the GIL. If C code holds the GIL, this
thread cannot run, and the supervisor sends a signal instead. A dump by signal reads the frames of the other threads
without the GIL. A thread that runs Python code may free these frames at the same time, which ends the process with
SIGSEGV (seen with Python 3.11 to 3.13). So the supervisor sends the signal only if the shim's thread is silent.

A signal without a handler kills the process, and a closed descriptor number may now belong to a user's file. Therefore
the ready file names process, signal and descriptor exactly, and the shim removes this file if the program has taken the
signal or the descriptor. The sender of the signal checks process, signal and descriptor again. Without a ready file,
the sender reads the stacks in another way.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
import _thread
import faulthandler
import fcntl
import os
from time import monotonic

from .file_writer import encode_json, remove_file, replace_file

# These signals are in the middle of the real-time range. glibc uses the lowest signals of this range, valgrind and
# debuggers use the highest, and other programs count up from SIGRTMIN or down from SIGRTMAX.
_OFFSETS = (12, 13, 14, 11, 10, 9, 15, 16)
# If a program closes all its descriptors, the system reuses high numbers last.
_HIGH_DESCRIPTOR = 700


class StackDumper:
    """Dumps the stacks of all threads into a file, when asked by a request file or by a signal."""

    def __init__(self, status_dir: str, rank: int, start_time: int) -> None:
        self._stacks = os.path.join(status_dir, f"rank-{rank}.stacks")
        self._ready = os.path.join(status_dir, f"rank-{rank}.ready.json")
        self._values = os.path.join(status_dir, f"rank-{rank}.values.json")
        self._request = os.path.join(status_dir, f"rank-{rank}.dump")
        self._start_time = start_time
        self._main_thread = 0
        self._number: int | None = None
        self._fd = -1
        self._file: os.stat_result | None = None

    def register(self) -> None:
        """Register a free signal for stack dumps, and write the ready file.

        Raises:
            OSError: The stacks file cannot be opened, or no signal is free.
        """
        number = _find_free_signal()
        low = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
            os.close(low)
        except OSError:  # The limit of open files does not allow this number.
            self._fd = low
        self._file = os.fstat(self._fd)
        faulthandler.register(number, file=self._fd, all_threads=True, chain=False)
        self._number, self._main_thread = number, _thread.get_ident()
        facts = {
            "pid": os.getpid(),
            "start_time": self._start_time,
            "signal": number,
            "fd": self._fd,
            "dev": self._file.st_dev,
            "ino": self._file.st_ino,
            "main_thread": self._main_thread,
        }
        replace_file(self._ready, encode_json(facts))

    def dump_if_requested(self) -> None:
        """Dump values of calls, and the stacks, if the supervisor has written the request file.

        The caller holds the GIL.
        """
        if os.path.exists(self._request) and self._has_descriptor():
            remove_file(self._request)
            try:
                self._write_call_values()
            finally:
                faulthandler.dump_traceback(file=self._fd, all_threads=True)

    def _write_call_values(self) -> None:
        from . import call_values

        record = {
            "pid": os.getpid(),
            "start_time": self._start_time,
            "time": monotonic(),
            "values": call_values.read_call_values(self._main_thread),
            "awaited_keys": list(call_values.awaited_keys),
            "set_keys": list(call_values.set_keys),
        }
        replace_file(self._values, encode_json(record))

    def check_registration(self) -> None:
        """Remove the ready file if the program has replaced the signal handler or closed the descriptor.

        Raises:
            OSError: The program has replaced the handler or closed the descriptor.
        """
        # Python has its own table of handlers, which `signal.signal` changes and faulthandler does not.
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
