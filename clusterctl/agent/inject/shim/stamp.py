"""How long the main thread has been away from Python: in a blocking call, stopped, or in C code with the GIL."""

from __future__ import annotations

import ctypes
import os
from time import monotonic


class MainStamp:
    """Asks the main thread to raise a semaphore as soon as it runs bytecode, and looks whether it has.

    The call it is asked to make is C's `sem_post`: no Python runs in the main thread, so no signal handler of the user
    can be entered, and no exception of theirs swallowed, on our account.
    """

    def __init__(self) -> None:
        # PyDLL: these calls do not block, so giving up the GIL around them would only cost.
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

    def look(self) -> None:
        """Takes the answer to the last question, if there is one, and asks again."""
        if self._pending and self._libc.sem_trywait(self._semaphore) == 0:
            self.time = monotonic()
            self._pending = False
        if not self._pending:
            self._pending = ctypes.pythonapi.Py_AddPendingCall(self._post, self._address) == 0


def signal_handler(number: int) -> bytes:
    """The C handler installed for a signal now, as raw bytes: tells whether ours is still the one."""
    action = ctypes.create_string_buffer(256)  # struct sigaction; its handler comes first (glibc and musl)
    if ctypes.PyDLL(None).sigaction(number, None, action) != 0:
        raise OSError(f"sigaction {number} failed")
    return action.raw[:8]


def allow_tracer(pid: int) -> None:
    """Lets the supervisor and its children attach where Yama restricts ptrace to ancestors (prctl PR_SET_PTRACER)."""
    if os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):
        ctypes.PyDLL(None).prctl(0x59616D61, ctypes.c_ulong(pid), 0, 0, 0)
