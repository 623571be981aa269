"""Limits of what a node may send in one session. Pure; docs/protocol.md lists all limits."""

from __future__ import annotations

from clusterctl.agent.protocol.command_messages import FIRST_AGENT_STREAM, Command
from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES, FrameError

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum of each message, except for the answers to `_LARGE_ANSWER_COMMANDS`."""
_LARGE_ANSWER_COMMANDS = frozenset(
    {
        Command.EVIDENCE,
        Command.PROBE,
        Command.READ,
        Command.FETCH,
        Command.MANIFEST,
        Command.COPY,
        Command.CHECKPOINTS,
        Command.CODE,
        Command.RUNS,
    }
)
"""Commands whose answer may fill a frame."""
MAX_STREAMS = 65536
"""Files that one session may send: more than tens of thousands of workers write in many attempts."""
EVENT_BURST_BYTES, EVENT_RATE_BYTES_PER_S = 16 << 20, 64 << 10
"""Events of one session: the bytes that may have gathered without a reader, and the rate that is allowed for long. If
the head ends a session for this, the next one continues behind the last event received.
"""
MAX_UNSUBSCRIBED_BYTES = 16 << 20
"""Bytes in our streams that have no listener."""
MAX_FILE_BYTES = 1 << 44
"""Size of a file of a run: the limit of common file systems. Offsets count deleted bytes, so they may be far ahead."""
MAX_JOURNAL_BYTES = 1 << 30
"""Bytes of a node's journal that the head keeps."""


class SessionQuota:
    """What a node may still send in a session. Every method raises `FrameError` if the node sends more."""

    def __init__(self) -> None:
        self._credit = 0
        self._followed = False
        self._large_requests: set[int] = set()
        self._streams = self._unsubscribed_bytes = 0
        self._event_bytes, self._filled_at = float(EVENT_BURST_BYTES), 0.0

    # --- requests and credit of the head

    def count_request(self, number: int, command: Command, arguments: dict[str, object]) -> None:
        """Count a request of the head."""
        if command in _LARGE_ANSWER_COMMANDS:
            self._large_requests.add(number)
        elif command is Command.FOLLOW:
            self._followed = True
            self.add_credit(_parse_count(arguments.get("credit", INITIAL_CREDIT_BYTES)))
        elif command is Command.CREDIT:
            self.add_credit(_parse_count(arguments.get("bytes")))

    def end_request(self, number: object) -> None:
        """Count an answer, even if its request has timed out."""
        if isinstance(number, int):
            self._large_requests.discard(number)

    def add_credit(self, count: int) -> None:
        """Allow `count` more bytes of output."""
        self._credit += count

    def max_message_bytes(self, frame_bytes: int) -> int:
        """Return the current maximum of a message; `frame_bytes` is the maximum of a frame."""
        return frame_bytes if self._large_requests else MAX_MESSAGE_BYTES

    # --- what the node sends

    def count_output(self, count: int) -> None:
        """Count bytes of a file of the run, which need credit."""
        self._credit -= count
        if self._credit < 0 or count == 0:
            raise FrameError(f"{-self._credit} bytes of output beyond its credit")

    def count_unsubscribed(self, count: int) -> None:
        """Count bytes of one of our streams that has no listener."""
        self._unsubscribed_bytes += count
        if self._unsubscribed_bytes > MAX_UNSUBSCRIBED_BYTES:
            raise FrameError(f"over {MAX_UNSUBSCRIBED_BYTES >> 20} MiB in streams without a listener")

    def count_stream(self, number: int, files: int) -> None:
        """Count a stream that the node announces, after `files` earlier ones."""
        if not self._followed:
            raise FrameError("it announces a stream before the head follows it")
        if files >= MAX_STREAMS or number < FIRST_AGENT_STREAM:
            raise FrameError(f"over {MAX_STREAMS} streams in one session")

    def count_event(self, size: int, now: float) -> None:
        """Count the bytes of an event; `now` is monotonic time in seconds."""
        if not self._followed:
            raise FrameError("it sends an event before the head follows it")
        more = (now - (self._filled_at or now)) * EVENT_RATE_BYTES_PER_S
        self._filled_at = now
        self._event_bytes = min(float(EVENT_BURST_BYTES), self._event_bytes + more) - size
        if self._event_bytes < 0:
            raise FrameError(f"over {EVENT_BURST_BYTES >> 20} MiB of events at once")


def _parse_count(value: object) -> int:
    return value if isinstance(value, int) else 0
