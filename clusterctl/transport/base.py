"""What every way to reach a node has in common: it opens a byte stream to `/bin/sh` there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from clusterctl.config.spec import HostSpec

EXEC_COMMAND = "/bin/sh"
"""All that is ever executed through a login shell. What a user wrote travels as data, over the stream."""

STDERR_TAIL_BYTES = 4096
SEND_DEADLINE_FACTOR = 10
"""How many times its limit a sending may take in all, however steadily the peer takes a little."""

Progress = Callable[[str], None]
"""Called with a stage in words ("connecting", "logged in"), so that whoever waits can say what for."""


def ignore_progress(_stage: str) -> None:
    """Be told of progress and do nothing with it."""


class Channel(Protocol):
    """A stream to `/bin/sh` on a node. One thread may receive while others send."""

    auth_note: str | None
    """What a person should know of how the login was done (only a forwarded ssh-agent helped), or `None`."""

    warnings: tuple[str, ...]
    """What was done otherwise than asked for, a sentence each."""

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes that the peer is known to have made room for; it grows only when the peer itself takes something.

        What the kernel here or the network has in its buffers does not count. Zero where nothing can be known.
        """

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        """Send all of `data`.

        Raises:
            OSError: The stream is closed, or the peer took nothing for `timeout` seconds, or not all
                within `IN_ALL` times as long (`TimeoutError`).
        """

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        """Return up to `limit` bytes as soon as there are any; `b""` at the end of the stream.

        Raises:
            TimeoutError: Nothing came for `timeout` seconds.
        """

    def close(self) -> None:
        """End the stream. Wakes who receives, waits for nobody, may be repeated."""

    def stderr_tail(self) -> str:
        """Return the end of what came on standard error (at most `STDERR_TAIL_BYTES`)."""


class Transport(Protocol):
    """A way to reach nodes. `open` may be called from many threads at once."""

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> Channel:
        """Return a stream to `/bin/sh` on `host`, within the transport's time limit.

        Raises:
            NodeError: It cannot be reached, trusted or logged in to.
        """

    def close(self) -> None:
        """Close what is shared between channels, such as connections to jump hosts."""
