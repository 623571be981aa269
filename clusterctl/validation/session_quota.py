"""Limits on the amount of data that a node may send in one session; docs/protocol.md lists all limits. Pure."""

from __future__ import annotations

from clusterctl.agent.protocol.command_messages import FIRST_AGENT_STREAM, Command
from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES, FrameError

MAX_MESSAGE_BYTES = 1 << 20
"""The maximum size of a message. While an answer to one of `_LARGE_ANSWER_COMMANDS` is due, the frame limit applies."""
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
"""The commands whose answer may be as large as a frame."""
MAX_STREAMS = 65536
"""The maximum number of files in one session. A large run with many attempts has fewer files."""
EVENT_BURST_BYTES, EVENT_RATE_BYTES_PER_S = 16 << 20, 64 << 10
"""The limits on the events of one session: the bytes at once, and the bytes per second in the long term. If the head
ends a session because of these limits, the next session continues after the last event that the head received.
"""
MAX_UNSUBSCRIBED_BYTES = 16 << 20
"""The maximum number of bytes in streams of the head without a listener."""
MAX_FILE_BYTES = 1 << 44
"""The maximum size of a file of a run, which is the limit of common file systems. Offsets also count deleted bytes."""
MAX_JOURNAL_BYTES = 1 << 30
"""The maximum size of a node's journal on the head."""


class SessionQuota:
    """The amount of data that a node may still send in a session.

    Every method that counts data of the node raises `FrameError` if the node has sent more than the limit.
    """

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
        """Count the answer to a request, even if the request has timed out."""
        if isinstance(number, int):
            self._large_requests.discard(number)

    def add_credit(self, count: int) -> None:
        """Allow the node to send `count` more bytes of output."""
        self._credit += count

    def get_max_message_bytes(self, frame_bytes: int) -> int:
        """Return the current maximum size of a message. `frame_bytes` is the maximum size of a frame."""
        return frame_bytes if self._large_requests else MAX_MESSAGE_BYTES

    # --- data of the node

    def count_output(self, count: int) -> None:
        """Count bytes of a file of the run. These bytes use up credit."""
        self._credit -= count
        if self._credit < 0 or count == 0:
            raise FrameError(f"{-self._credit} bytes of output beyond its credit")

    def count_bytes_without_listener(self, count: int) -> None:
        """Count bytes of a stream of the head that has no listener."""
        self._unsubscribed_bytes += count
        if self._unsubscribed_bytes > MAX_UNSUBSCRIBED_BYTES:
            raise FrameError(f"over {MAX_UNSUBSCRIBED_BYTES >> 20} MiB in streams without a listener")

    def count_stream(self, number: int, open_files: int) -> None:
        """Count a stream that the node announces while `open_files` other files may still grow."""
        if not self._followed:
            raise FrameError("it announces a stream before the request `follow`")
        if open_files >= MAX_STREAMS or number < FIRST_AGENT_STREAM:
            raise FrameError(f"over {MAX_STREAMS} streams in one session")

    def count_event(self, size: int, now: float) -> None:
        """Count the bytes of an event. `now` is the monotonic time in seconds."""
        if not self._followed:
            raise FrameError("it sends an event before the request `follow`")
        more = (now - (self._filled_at or now)) * EVENT_RATE_BYTES_PER_S
        self._filled_at = now
        self._event_bytes = min(float(EVENT_BURST_BYTES), self._event_bytes + more) - size
        if self._event_bytes < 0:
            raise FrameError(f"over {EVENT_BURST_BYTES >> 20} MiB of events at once")


def _parse_count(value: object) -> int:
    return value if isinstance(value, int) else 0
