"""What nodes send of their files, on its way to the replicas. What finds no room is held back, and no node is harmed.

Bytes travel on credit, which is given back once they are safe; so a full disk on the head stops the nodes from sending
more, while their workers write on. The same holds where the head cannot open more files.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from clusterctl.run.record.disk import is_full, is_short

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.run.record.writer import Writer
    from clusterctl.session.conversation import OutputReceived

_RETRY = 2.0
_FULL = "the head's disk is full", "the head's disk has space again"
_TOO_MANY = "the head cannot open more files (`ulimit -n`)", "the head can open files again"


class Intake:
    """The way from sessions to replicas.

    Args:
        writer: Of the run.
        stored: Called with what is safe, and the size of its replica.
        say: Takes what a person should know, and its level.
    """

    def __init__(
        self, writer: Writer, stored: Callable[[OutputReceived, int], None], say: Callable[[str, str], None]
    ) -> None:
        self._writer, self._stored, self._say = writer, stored, say
        self._held: deque[OutputReceived] = deque()
        self._why, self._over = _FULL
        self._retry_at = 0.0

    @property
    def paused(self) -> bool:
        """There is no room: the disk is full, or no more files can be opened."""
        return bool(self._held)

    def take(self, item: OutputReceived) -> None:
        """Write bytes of a file, or hold them until there is room again."""
        if self._held:
            self._held.append(item)
        elif not self._store(item):
            self._held.append(item)
            self._say(f"{self._why}: replication waits, workers are not affected", "warn")

    def retry(self) -> None:
        """Go on if there is room again; looks now and then."""
        if not self._held or time.monotonic() < self._retry_at:
            return
        while self._held and self._store(self._held[0]):
            self._held.popleft()
        if not self._held:
            self._say(f"{self._over}: replication goes on", "info")

    def _store(self, item: OutputReceived) -> bool:
        try:
            size = self._writer.replicate(item.node, item.file, item.offset, item.payload)
        except OSError as error:
            if not is_short(error):
                raise
            self._why, self._over = _FULL if is_full(error) else _TOO_MANY
            self._retry_at = time.monotonic() + _RETRY
            return False
        self._stored(item, size)
        return True
