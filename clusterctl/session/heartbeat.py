"""The timer thread that sends the heartbeats of all sessions, and the measurement of clock offsets by heartbeats."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol
from weakref import WeakSet

from clusterctl.agent.protocol.command_messages import make_heartbeat
from clusterctl.agent.protocol.frames import encode_message
from clusterctl.session.controller_inbox import ClockMeasured

HEARTBEAT_INTERVAL_S = 5.0


class ClockOffsetMeter:
    """Measures the clock offset of one node by its answers to heartbeats.

    The sender thread creates the heartbeats. The reader thread receives the answers.

    Attributes:
        best_offset: The node's wall clock minus the head's, and the maximum error of this difference (seconds). The
            answer with the smallest error determines this value; `None` before the first answer.
        last_sent_s: The monotonic time of the newest heartbeat.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[float, float]] = {}
        self.best_offset: tuple[float, float] | None = None
        self.last_sent_s = time.monotonic()

    def make_heartbeat_frame(self, number: int) -> bytes:
        """Return the frame of a new heartbeat and store the present time. The caller sends the frame at once."""
        with self._lock:
            self._sent[number] = (time.time(), time.monotonic())
        self.last_sent_s = time.monotonic()
        return encode_message(make_heartbeat(number))

    def measure_offset(self, answer: dict[str, Any]) -> ClockMeasured | None:
        """Return the clock offset that a heartbeat answer shows; `None` if the head did not send the heartbeat."""
        now_wall, now_mono = time.time(), time.monotonic()
        with self._lock:
            sent = self._sent.pop(answer["beat"], None)
            # Answers arrive in order, so older heartbeats will get no answer.
            self._sent = {number: times for number, times in self._sent.items() if number > answer["beat"]}
        if sent is None:
            return None
        sent_wall, sent_mono = sent
        wall_offset_s, error_s = answer["wall"] - (sent_wall + now_wall) / 2, (now_mono - sent_mono) / 2
        if self.best_offset is None or error_s <= self.best_offset[1]:
            self.best_offset = (wall_offset_s, error_s)
        return ClockMeasured(
            self._node,
            wall_offset_s=wall_offset_s,
            mono_offset_s=answer["mono"] - (sent_mono + now_mono) / 2,
            error_s=error_s,
            boot=answer["boot"],
        )


_TICK_SECONDS = 1.0


class Tickable(Protocol):
    """An object whose method `tick` the timer calls once a second."""

    def tick(self, *, suspended_s: float) -> None:
        """Do the periodic work. This process itself was suspended for `suspended_s` seconds before the call."""


class HeartbeatTimer:
    """Calls `tick` of all sessions once a second. The daemon thread runs only while a session is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: WeakSet[Tickable] = WeakSet()
        self._running = False

    def add(self, session: Tickable) -> None:
        """Call `tick` of this session from now on."""
        with self._lock:
            self._sessions.add(session)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="sessions-pulse", daemon=True).start()

    def remove(self, session: Tickable) -> None:
        """Do not call `tick` of this session any more."""
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
                session.tick(suspended_s=stopped)


HEARTBEAT_TIMER = HeartbeatTimer()
