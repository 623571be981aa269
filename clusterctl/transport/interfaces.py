"""The interface of all transports. A transport opens a byte stream to `/bin/sh` on a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from clusterctl.config.spec import HostSpec

EXEC_COMMAND = "/bin/sh"
"""The only command that a login shell on a node gets. User input travels as data over the stream."""

STDERR_TAIL_BYTES = 4096
SEND_DEADLINE_FACTOR = 10
"""Time limit of one `send`, as a multiple of its timeout. The limit also ends a `send` whose peer reads too slowly."""

Progress = Callable[[str], None]
"""A function that shows the current stage of a connection ("connecting", "logging in")."""


def ignore_progress(_stage: str) -> None:
    """Ignore the progress of a connection."""


class Channel(Protocol):
    """A byte stream to `/bin/sh` on a node. One thread may receive while other threads send."""

    login_note: str | None
    """A note about the login for the user (such as: only a forwarded ssh-agent had the key), or `None`."""

    host_key: str | None
    """The fingerprint of the node's host key, as `ssh-keygen -l` prints it, or `None`."""

    warnings: tuple[str, ...]
    """Warnings for the user about settings that clusterctl could not follow exactly, one sentence each."""

    @property
    def acknowledged_bytes(self) -> int:
        """A number of bytes that grows only when the peer reads data; always 0 if the transport cannot know.

        Data in buffers of this kernel or of the network does not count.
        """

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        """Send all of `data`.

        Raises:
            OSError: The stream is closed.
            TimeoutError: The peer read nothing for `timeout` seconds, or did not read all of `data` within
                `SEND_DEADLINE_FACTOR * timeout` seconds.
        """

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        """Return up to `limit` bytes as soon as data is available; `b""` at the end of the stream.

        Raises:
            TimeoutError: No data arrived for `timeout` seconds.
        """

    def close(self) -> None:
        """Close the stream without waiting. A waiting receiver wakes up. Further calls have no effect."""

    def stderr_tail(self) -> str:
        """Return the end of standard error (at most `STDERR_TAIL_BYTES`)."""


class Transport(Protocol):
    """Opens streams to nodes. Many threads may call `open` at the same time."""

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> Channel:
        """Return a stream to `/bin/sh` on `host`, within the time limit of the transport.

        Raises:
            NodeError: The connection failed, the host key is not trusted, or the login failed.
        """

    def close(self) -> None:
        """Close everything that channels share, such as connections to jump hosts."""
