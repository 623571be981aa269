"""Fsync of files in child processes, because an fsync takes long while the disk is busy."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import helper_process

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.linux.helper_process import HelperOutput

_RETRY_S = 1.0


class FsyncQueue:
    """Fsyncs the added files in child processes, of which at most one runs."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._paths: dict[str, None] = {}
        self._fd = -1
        self._is_scheduled = False

    def add(self, *paths: str) -> None:
        """Fsync these files after the current action of the loop."""
        self._paths.update(dict.fromkeys(paths))
        self._schedule(0.0)

    def _schedule(self, seconds: float) -> None:
        if self._fd < 0 and not self._is_scheduled and self._paths:
            self._is_scheduled = True
            self._loop.call_later(seconds, self._start_child)

    def _start_child(self) -> None:
        self._is_scheduled = False
        paths = list(self._paths)

        def work(_out: HelperOutput) -> dict[str, Any]:
            for path in paths:
                fsync_file_and_folder(path)
            return {}

        try:
            _, self._fd = helper_process.start_helper(work)
        except OSError:
            self._schedule(_RETRY_S)
            return
        self._paths.clear()
        self._loop.on_readable(self._fd, self._finish_child)

    def _finish_child(self) -> None:
        # Wait for the end of the child; its result does not matter.
        if os.read(self._fd, 4096):
            return
        self._loop.remove_descriptor(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._schedule(0.0)

    def flush_and_close(self, seconds: float) -> None:
        """Fsync all queued files, for at most `seconds`, without the event loop."""
        deadline = time.monotonic() + seconds
        if self._fd < 0 and self._paths:
            self._start_child()
        while self._fd >= 0 and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._finish_child()
            if self._fd < 0 and self._paths:
                self._start_child()


def fsync_file_and_folder(path: str) -> None:
    """Fsync a file and its folder; a missing file is skipped."""
    for place, flags in ((path, os.O_RDONLY), (os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)):
        with contextlib.suppress(OSError):
            fd = os.open(place, flags | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
