"""Wakes a thread that waits for descriptors, from any other thread or from a signal."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Waker:
    """A pipe to wait at. `wake` may be called at any time, also after the end.

    Attributes:
        fd: Readable after a `wake`, until `heard`.
    """

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)
        self._guard = threading.RLock()
        self._closed = False

    def wake(self) -> None:
        """Let the waiting thread look."""
        # Once closed, its numbers may belong to something else.
        with self._guard:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writer, b"!")

    def heard(self) -> None:
        """Take note of every `wake` so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._closed = True
            os.close(self.fd)
            os.close(self._writer)
