"""Measures for how long the main thread has run no Python code, because it is blocked, stopped, or in C code."""

from __future__ import annotations

import ctypes
import os
from time import monotonic


class MainThreadProbe:
    """Asks the main thread to post a semaphore as soon as it runs bytecode, and checks the semaphore later.

    The pending call is C's `sem_post`. Python code in the main thread could run a signal handler of the user or swallow
    an exception, and `sem_post` cannot.

    Attributes:
        last_bytecode_time: The last time (monotonic, seconds) at which the main thread was seen to run bytecode.
    """

    def __init__(self) -> None:
        # PyDLL keeps the GIL during a call. These calls do not block, so a release is not necessary.
        self._libc = ctypes.PyDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)  # sem_t has 32 bytes (glibc), 16 to 32 (musl)
        # The semaphore is never freed, because a call may still be pending when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._semaphore))
        if self._libc.sem_init(self._semaphore, 0, 0) != 0:
            raise OSError("sem_init failed")
        self._post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        self._address = ctypes.c_void_p(ctypes.addressof(self._semaphore))
        self._pending = False
        self.last_bytecode_time = monotonic()

    def update(self) -> None:
        """Store the time if the main thread has posted the semaphore, and then request the next post."""
        if self._pending and self._libc.sem_trywait(self._semaphore) == 0:
            self.last_bytecode_time = monotonic()
            self._pending = False
        if not self._pending:
            self._pending = ctypes.pythonapi.Py_AddPendingCall(self._post, self._address) == 0


def allow_tracer(pid: int) -> None:
    """Let the process `pid` and its children attach with ptrace, if Yama restricts ptrace to ancestors."""
    if os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):
        ctypes.PyDLL(None).prctl(0x59616D61, ctypes.c_ulong(pid), 0, 0, 0)
