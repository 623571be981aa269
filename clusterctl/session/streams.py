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
        self._granted: dict[int, Callable[[int], None]] = {}

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

    def both_ways(self, listener: Listener, granted: Callable[[int], None]) -> int:
        """Return an unused number of a stream in which we send, too, as far as we are `granted` bytes of it."""
        number = self.name(listener, 1)
        self._granted[number] = granted
        return number

    def taken(self, number: int, count: int) -> None:
        """Take note that the node has taken so many bytes of a stream; of one that we have forgotten it is no news.

        Raises:
            FrameError: It is no stream in which we sent so many.
        """
        granted = self._granted.get(number)
        if granted is not None:
            granted(count)

    def forget(self, number: int) -> None:
        """Have nothing more to do with a stream of ours; what still comes in it is swallowed."""
        with self._lock:
            self._listeners[number] = _swallow
        self._granted.pop(number, None)

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


def _swallow(_data: Data) -> None:
    pass
