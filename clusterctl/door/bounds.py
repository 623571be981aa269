"""How much a node may say in one session. Pure; all bounds stand in docs/protocol.md."""

from __future__ import annotations

from clusterctl.agent.protocol.commands import FIRST_AGENT_STREAM, Command
from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES, FrameError
from clusterctl.door.answers import LARGE, MOST_MESSAGE

MOST_STREAMS = 65536
"""Files that one session may send: ten thousands of workers in many attempts have fewer."""
BYTES_AT_ONCE, BYTES_A_SECOND = 16 << 20, 64 << 10
"""Of events in one session: what may have gathered while nobody listened, and what may be added to it for long. The
session after one that is ended for it goes on behind what was heard."""
MOST_UNHEARD = 16 << 20
"""Bytes in streams of ours to which nobody listens."""
MOST_FILE = 1 << 44
"""Bytes of a file of a run: what common file systems hold. Offsets leave out what is gone, so they may be far ahead."""
MOST_JOURNAL = 1 << 30
"""Bytes of a node's journal that the head keeps."""


class Allowance:
    """What a node may still say in a session. Every method raises `FrameError` where it says more."""

    def __init__(self) -> None:
        self._credit = 0
        self._followed = False
        self._large: set[int] = set()
        self._streams = self._unheard = 0
        self._bytes, self._filled = float(BYTES_AT_ONCE), 0.0

    # --- what we ask for

    def asked(self, number: int, command: Command, arguments: dict[str, object]) -> None:
        """Take note of a request."""
        if command in LARGE:
            self._large.add(number)
        elif command is Command.FOLLOW:
            self._followed = True
            self.granted(_count(arguments.get("credit", INITIAL_CREDIT_BYTES)))
        elif command is Command.CREDIT:
            self.granted(_count(arguments.get("bytes")))

    def answered(self, number: object) -> None:
        """Take note of an answer, also where nobody waits for it any more."""
        if isinstance(number, int):
            self._large.discard(number)

    def granted(self, count: int) -> None:
        """Allow so many more bytes of output."""
        self._credit += count

    def largest(self, whole: int) -> int:
        """Return the bytes that a message may have now; `whole` is what a frame holds."""
        return whole if self._large else MOST_MESSAGE

    # --- what the node says

    def output(self, count: int) -> None:
        """Count bytes of a file of the run, which are on credit."""
        self._credit -= count
        if self._credit < 0 or count == 0:
            raise FrameError(f"{-self._credit} bytes of output beyond its credit")

    def unheard(self, count: int) -> None:
        """Count bytes of a stream of ours to which nobody listens."""
        self._unheard += count
        if self._unheard > MOST_UNHEARD:
            raise FrameError(f"over {MOST_UNHEARD >> 20} MiB that nobody has asked for")

    def stream(self, number: int, files: int) -> None:
        """Count a stream that it announces, where it has announced `files`."""
        if not self._followed:
            raise FrameError("it announces a stream, and nobody follows it")
        if files >= MOST_STREAMS or number < FIRST_AGENT_STREAM:
            raise FrameError(f"over {MOST_STREAMS} streams in one session")

    def event(self, size: int, now: float) -> None:
        """Count the bytes of an event; `now` is monotonic."""
        if not self._followed:
            raise FrameError("it sends an event, and nobody follows it")
        more = (now - (self._filled or now)) * BYTES_A_SECOND
        self._filled = now
        self._bytes = min(float(BYTES_AT_ONCE), self._bytes + more) - size
        if self._bytes < 0:
            raise FrameError(f"over {BYTES_AT_ONCE >> 20} MiB of events at once")


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
