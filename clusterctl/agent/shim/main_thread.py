"""Measures how long the main thread has run no Python code: in a blocking call, stopped, or in C code with the GIL."""

from __future__ import annotations

import ctypes
import os
from time import monotonic


class MainThreadProbe:
    """Asks the main thread to post a semaphore as soon as it runs bytecode, and checks whether it has.

    The pending call is C's `sem_post`. So no Python code of ours runs in the main thread, where it could run a signal
    handler of the user or swallow an exception.
    """

    def __init__(self) -> None:
        # PyDLL keeps the GIL: these calls do not block.
        self._libc = ctypes.PyDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)  # sem_t has 32 bytes (glibc), 16 to 32 (musl)
        # Never freed: a call may still be pending when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._semaphore))
        if self._libc.sem_init(self._semaphore, 0, 0) != 0:
            raise OSError("sem_init failed")
        self._post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        self._address = ctypes.c_void_p(ctypes.addressof(self._semaphore))
        self._pending = False
        self.time = monotonic()

    def update(self) -> None:
        """Check whether the main thread has posted the semaphore; if so, request the next post."""
        if self._pending and self._libc.sem_trywait(self._semaphore) == 0:
            self.time = monotonic()
            self._pending = False
        if not self._pending:
            self._pending = ctypes.pythonapi.Py_AddPendingCall(self._post, self._address) == 0


def allow_tracer(pid: int) -> None:
    """Let the supervisor and its children attach if Yama restricts ptrace to ancestors (prctl PR_SET_PTRACER)."""
    if os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):
        ctypes.PyDLL(None).prctl(0x59616D61, ctypes.c_ulong(pid), 0, 0, 0)
