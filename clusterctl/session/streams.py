"""The streams of a session: those that our requests name, and the files that the agent announces."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.agent.protocol.run_files import parse_attempt

Listener = Callable[[StreamData], None]


class Streams:
    """The streams of one session. Any thread may allocate; only the reader thread announces and looks up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._named = 0
        self._listeners: dict[int, Listener] = {}
        self._files: dict[int, tuple[str, str]] = {}

    @property
    def announced(self) -> int:
        """How many announced files may still grow."""
        return len(self._files)

    def allocate(self, listener: Listener | None, count: int) -> int:
        """Allocate `count` numbers in a row for one listener and return the first."""
        with self._lock:
            numbers = [next(self._numbers) for _ in range(count)]
            self._named = numbers[-1]
            if listener is not None:
                self._listeners.update(dict.fromkeys(numbers, listener))
        return numbers[0]

    def listener(self, number: int) -> Listener | None:
        """Return the listener of a stream of ours; `None` if its data goes into the inbox.

        Raises:
            FrameError: No request named this stream.
        """
        if not 0 < number <= self._named:
            raise FrameError(f"data of stream {number}, which nobody has named")
        return self._listeners.get(number)

    def announce(self, number: int, run: str, file: str) -> None:
        """Record which file a stream of the agent carries."""
        self._files[number] = (run, file)

    def file(self, number: int) -> tuple[str, str]:
        """Return run and file of a stream of the agent.

        Raises:
            FrameError: The agent never announced this stream.
        """
        if number not in self._files:
            raise FrameError(f"data of stream {number}, which was never announced")
        return self._files[number]

    def end_before(self, run: str, attempt: int) -> None:
        """Forget the files of a run's attempts below `attempt`: they do not grow any more."""
        self._files = {
            number: (whose, file)
            for number, (whose, file) in self._files.items()
            if whose != run or not -1 < parse_attempt(file) < attempt
        }
