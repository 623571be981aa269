"""Starts a process that shakes off all it can: new session, double fork, no environment, no files, another title."""

import ctypes
import os
import sys
import time

report, mode = sys.argv[1], sys.argv[2]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        if mode == "exec":
            for fd in range(3, 256):
                try:
                    os.close(fd)
                except OSError:
                    pass
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            with open(report, "w") as file:
                file.write(f"{os.getpid()}\n")
            os.execve("/bin/sleep", ["innocent", "1000"], {})
        libc = ctypes.CDLL(None)
        libc.prctl(15, b"innocent", 0, 0, 0)
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(report, "w") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1000)
    os._exit(0)
while not (os.path.exists(report) and os.path.getsize(report)):
    time.sleep(0.01)
print("stray is out", flush=True)
if len(sys.argv) > 3:
    time.sleep(1000)
