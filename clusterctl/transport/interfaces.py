"""The interface of all transports: each opens a byte stream to `/bin/sh` on a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from clusterctl.config.spec import HostSpec

EXEC_COMMAND = "/bin/sh"
"""The only command that ever runs in a login shell. User input is sent as data over the stream."""

STDERR_TAIL_BYTES = 4096
SEND_DEADLINE_FACTOR = 10
"""Total time limit of one `send`, as a multiple of its timeout, even if the peer takes data slowly but steadily."""

Progress = Callable[[str], None]
"""Called with the current stage ("connecting", "logged in"), so that the caller can show it."""


def ignore_progress(_stage: str) -> None:
    """Ignore the progress of a connection."""


class Channel(Protocol):
    """A stream to `/bin/sh` on a node. One thread may receive while others send."""

    login_note: str | None
    """A note about the login for the user (only a forwarded ssh-agent had the key), or `None`."""

    warnings: tuple[str, ...]
    """Requests that were carried out differently, one sentence each."""

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes for which the peer has made room so far. The number grows only when the peer itself takes data.

        Data in buffers of this kernel or of the network does not count. Always 0 if the transport cannot know.
        """

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        """Send all of `data`.

        Raises:
            OSError: The stream is closed, the peer took nothing for `timeout` seconds, or it did not take everything
                within `SEND_DEADLINE_FACTOR` times as long (`TimeoutError`).
        """

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        """Return up to `limit` bytes as soon as any are available; `b""` at the end of the stream.

        Raises:
            TimeoutError: Nothing came for `timeout` seconds.
        """

    def close(self) -> None:
        """Close the stream. Wakes a receiver, does not wait, may be called again."""

    def stderr_tail(self) -> str:
        """Return the end of standard error (at most `STDERR_TAIL_BYTES`)."""


class Transport(Protocol):
    """A way to connect to nodes. Many threads may call `open` at once."""

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> Channel:
        """Return a stream to `/bin/sh` on `host`, within the time limit of the transport.

        Raises:
            NodeError: The host cannot be reached, trusted or logged in to.
        """

    def close(self) -> None:
        """Close what the channels share, such as connections to jump hosts."""
