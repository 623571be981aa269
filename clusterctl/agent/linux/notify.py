"""Being told that files of a run have changed: inotify where it is to be had, else looking every 100 ms."""

from __future__ import annotations

import ctypes
import os

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.linux.loop import Loop

_LIBC = ctypes.CDLL(None, use_errno=True)
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_POLL_SECONDS = 0.1
_QUIET_SECONDS = 0.02
"""After a change nothing is heard for so long: a flood must not cost more than the looking."""


class Notifier:
    """Calls `changed` soon after anything in a watched folder has changed."""

    def __init__(self, loop: Loop, changed: Callable[[], None]) -> None:
        self._loop, self._changed = loop, changed
        self._watched: dict[str, int] = {}
        self._fd = int(_LIBC.inotify_init1(_NONBLOCK | _CLOEXEC))
        self._polling = False
        if self._fd >= 0:
            loop.on_readable(self._fd, self._heard)
        else:
            self._poll()

    def watch(self, folder: str) -> None:
        """Watch the files of a folder."""
        if folder in self._watched:
            return
        mask = _MODIFY | _MOVED_TO | _CREATE
        number = _LIBC.inotify_add_watch(self._fd, os.fsencode(folder), mask) if self._fd >= 0 else -1
        self._watched[folder] = number
        if number < 0:
            self._poll()

    def forget(self, folder: str) -> None:
        """Watch a folder no more."""
        number = self._watched.pop(folder, -1)
        if number >= 0:
            _LIBC.inotify_rm_watch(self._fd, number)

    def _poll(self) -> None:
        if not self._polling:
            self._polling = True
            self._loop.every(_POLL_SECONDS, self._changed)

    def _heard(self) -> None:
        self._drain()
        self._loop.on_readable(self._fd, None)
        self._changed()
        self._loop.after(_QUIET_SECONDS, self._listen)

    def _listen(self) -> None:
        self._loop.on_readable(self._fd, self._heard)

    def _drain(self) -> None:
        try:
            while len(os.read(self._fd, 65536)) > 32768:
                pass
        except BlockingIOError:
            pass
