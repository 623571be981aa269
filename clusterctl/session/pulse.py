"""The thread that lets all sessions beat."""

from __future__ import annotations

import threading
import time
from typing import Protocol
from weakref import WeakSet

_TICK_SECONDS = 1.0


class Beating(Protocol):
    """What wants to be called once a second."""

    def tick(self, *, stopped_s: float) -> None:
        """Do what is due; this process itself did not run for `stopped_s` seconds."""


class Pulse:
    """Calls sessions once a second, on one thread that runs only while there are any and ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: WeakSet[Beating] = WeakSet()
        self._running = False

    def add(self, session: Beating) -> None:
        """Call a session from now on."""
        with self._lock:
            self._sessions.add(session)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="sessions-pulse", daemon=True).start()

    def remove(self, session: Beating) -> None:
        """Call a session no more."""
        with self._lock:
            self._sessions.discard(session)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            stopped, last = max(0.0, now - last - 2 * _TICK_SECONDS), now
            with self._lock:
                sessions = list(self._sessions)
                if not sessions:
                    self._running = False
                    return
            for session in sessions:
                session.tick(stopped_s=stopped)


PULSE = Pulse()
