"""What nodes send of their files, on its way to the replicas. On a full disk it is held back, and no node is harmed.

Bytes travel on credit, which is given back once they are safe; so a full disk on the head stops the nodes from sending
more, while their workers write on.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from clusterctl.run.linefile import is_full

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.run.store import Writer
    from clusterctl.session import OutputReceived

_RETRY = 2.0


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
        self._retry_at = 0.0

    @property
    def paused(self) -> bool:
        """The disk is full."""
        return bool(self._held)

    def take(self, item: OutputReceived) -> None:
        """Write bytes of a file, or hold them until there is space again."""
        if self._held:
            self._held.append(item)
        elif not self._store(item):
            self._held.append(item)
            self._say("the head's disk is full: replication waits for space, workers are not affected", "warn")

    def retry(self) -> None:
        """Go on if there is space again; looks now and then."""
        if not self._held or time.monotonic() < self._retry_at:
            return
        while self._held and self._store(self._held[0]):
            self._held.popleft()
        if not self._held:
            self._say("the head's disk has space again: replication goes on", "info")

    def _store(self, item: OutputReceived) -> bool:
        try:
            size = self._writer.replicate(item.node, item.file, item.offset, item.payload)
        except OSError as error:
            if not is_full(error):
                raise
            self._retry_at = time.monotonic() + _RETRY
            return False
        self._stored(item, size)
        return True
