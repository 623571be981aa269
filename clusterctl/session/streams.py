"""Whose the streams of a session are: those that we named in a request, and files that the agent announced."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.files import attempt_of
from clusterctl.agent.protocol.frames import Data, FrameError

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[Data], None]


class Streams:
    """The streams of one session. Named from any thread; announced and looked up on the reading one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._named = 0
        self._listeners: dict[int, Listener] = {}
        self._files: dict[int, tuple[str, str]] = {}

    @property
    def announced(self) -> int:
        """How many files the agent has announced that may still grow."""
        return len(self._files)

    def name(self, listener: Listener | None, count: int) -> int:
        """Return the first of `count` unused numbers in a row, all of that listener."""
        with self._lock:
            numbers = [next(self._numbers) for _ in range(count)]
            self._named = numbers[-1]
            if listener is not None:
                self._listeners.update(dict.fromkeys(numbers, listener))
        return numbers[0]

    def listener(self, number: int) -> Listener | None:
        """Return who listens to a stream of ours; `None` where it goes into the inbox.

        Raises:
            FrameError: Nobody has named it.
        """
        if not 0 < number <= self._named:
            raise FrameError(f"data of stream {number}, which nobody has named")
        return self._listeners.get(number)

    def announce(self, number: int, run: str, file: str) -> None:
        """Take note of which file a stream of the agent's is."""
        self._files[number] = (run, file)

    def file(self, number: int) -> tuple[str, str]:
        """Return run and file of a stream of the agent's.

        Raises:
            FrameError: It was never announced.
        """
        if number not in self._files:
            raise FrameError(f"data of stream {number}, which was never announced")
        return self._files[number]

    def end_before(self, run: str, attempt: int) -> None:
        """Forget the files of attempts of a run before that one: no more of them comes."""
        self._files = {
            number: (whose, file)
            for number, (whose, file) in self._files.items()
            if whose != run or not -1 < attempt_of(file) < attempt
        }
