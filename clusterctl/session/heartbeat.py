"""Heartbeats: one timer thread for all sessions, and the clock offset that the replies measure."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol
from weakref import WeakSet

from clusterctl.agent.protocol.command_messages import make_heartbeat
from clusterctl.agent.protocol.frames import encode_message
from clusterctl.session.controller_inbox import ClockMeasured


class ClockSync:
    """The heartbeats of one session. The sender thread creates them, the reader thread gets the replies.

    Attributes:
        best: The node's wall clock minus ours and the error bound (seconds), from the reply with the smallest error so
            far; `None` before the first reply.
        last: Monotonic time of the newest heartbeat.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[float, float]] = {}
        self.best: tuple[float, float] | None = None
        self.last = time.monotonic()

    def make_heartbeat_frame(self, number: int) -> bytes:
        """Return the frame of a heartbeat that is sent now."""
        with self._lock:
            self._sent[number] = (time.time(), time.monotonic())
        self.last = time.monotonic()
        return encode_message(make_heartbeat(number))

    def measure_offset(self, answer: dict[str, Any]) -> ClockMeasured | None:
        """Return the clock offset that a reply measures; `None` for a reply to no heartbeat of ours."""
        now_wall, now_mono = time.time(), time.monotonic()
        with self._lock:
            sent = self._sent.pop(answer["beat"], None)
            # Replies come in order: an older one will never come.
            self._sent = {number: times for number, times in self._sent.items() if number > answer["beat"]}
        if sent is None:
            return None
        sent_wall, sent_mono = sent
        wall_offset_s, error_s = answer["wall"] - (sent_wall + now_wall) / 2, (now_mono - sent_mono) / 2
        if self.best is None or error_s <= self.best[1]:
            self.best = (wall_offset_s, error_s)
        return ClockMeasured(
            self._node,
            wall_offset_s=wall_offset_s,
            mono_offset_s=answer["mono"] - (sent_mono + now_mono) / 2,
            error_s=error_s,
            boot=answer["boot"],
        )


_TICK_SECONDS = 1.0


class Ticking(Protocol):
    """An object that wants a call once a second."""

    def tick(self, *, stopped_s: float) -> None:
        """Do what is due. This process itself did not run for `stopped_s` seconds."""


class HeartbeatTimer:
    """Calls sessions once a second, on one daemon thread that runs only while there are sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: WeakSet[Ticking] = WeakSet()
        self._running = False

    def add(self, session: Ticking) -> None:
        """Start calling a session."""
        with self._lock:
            self._sessions.add(session)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="sessions-pulse", daemon=True).start()

    def remove(self, session: Ticking) -> None:
        """Stop calling a session."""
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


HEARTBEAT_TIMER = HeartbeatTimer()
