"""Signs of life that are under way, and what their answers tell of the node's clocks."""

from __future__ import annotations

import threading
import time
from typing import Any

from clusterctl.agent.protocol.commands import beat
from clusterctl.agent.protocol.frames import encode_message
from clusterctl.session.items import BeatReceived


class Beats:
    """The beats of one session. Made on the sending thread, answered on the reading one.

    Attributes:
        best: The node's wall clock minus ours, and the bound of the error (seconds), of the beat with the least error
            so far; `None` before the first came back.
        last: When the last one was made (monotonic).
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[float, float]] = {}
        self.best: tuple[float, float] | None = None
        self.last = time.monotonic()

    def make(self, number: int) -> bytes:
        """Return the frame of a beat that leaves now."""
        with self._lock:
            self._sent[number] = (time.time(), time.monotonic())
        self.last = time.monotonic()
        return encode_message(beat(number))

    def answered(self, answer: dict[str, Any]) -> BeatReceived | None:
        """Return what an answer tells; `None` where nobody asked for it."""
        now_wall, now_mono = time.time(), time.monotonic()
        with self._lock:
            sent = self._sent.pop(answer["beat"], None)
            # Answers come in order: what is older than this one will never come.
            self._sent = {number: times for number, times in self._sent.items() if number > answer["beat"]}
        if sent is None:
            return None
        sent_wall, sent_mono = sent
        wall_offset_s, error_s = answer["wall"] - (sent_wall + now_wall) / 2, (now_mono - sent_mono) / 2
        if self.best is None or error_s <= self.best[1]:
            self.best = (wall_offset_s, error_s)
        return BeatReceived(
            self._node,
            wall_offset_s=wall_offset_s,
            mono_offset_s=answer["mono"] - (sent_mono + now_mono) / 2,
            error_s=error_s,
            boot=answer["boot"],
        )
