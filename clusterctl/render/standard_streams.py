"""Standard streams that keep working after their reader has gone.

A reader is gone if `head -1` has ended or the terminal is closed. Later output is discarded, so the command
still does its work and ends with its own exit code. A command that only shows output calls `has_reader` to end early.
Any other error of a stream, such as a full disk, ends the command with an error message.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TextIO

from typing_extensions import Buffer, override

from clusterctl.errors import RefusedError

_LONGEST = 2**31 - 1
"""The largest number of milliseconds that poll can wait."""


def has_reader(descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether the other end of a pipe, or a terminal, is open.

    Args:
        descriptor: The descriptor of this end.
        seconds: Wait at most this long for the other end to close.
    """
    poll = select.poll()
    # Without any requested event, poll still reports that the other end is closed.
    poll.register(descriptor, 0)
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(min(1000 * seconds, _LONGEST)))


class _DiscardingFile(io.FileIO):
    """A file that discards output after its reader has gone."""

    @override
    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if has_reader(self.fileno()):
                name = {1: "standard output", 2: "standard error"}.get(self.fileno(), "the output")
                raise RefusedError(
                    f"cannot write to {name}: {error.strerror}",
                    hint="redirect the output elsewhere; runs are not affected: `clusterctl ps` lists them",
                ) from error
            return memoryview(data).nbytes


def replace_standard_streams() -> None:
    """Make stdin, stdout and stderr of this process usable, even if its parent closed them."""
    _open_closed_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stdout, sys.stderr = _make_discarding_stream(sys.stdout, 1), _make_discarding_stream(sys.stderr, 2)


def _open_closed_descriptors() -> None:
    """Open descriptors 0 to 2 that the parent has closed, so that no other file gets one of these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` takes the lowest free number, which is the number of this descriptor.
            os.open(os.devnull, os.O_RDWR)


def _make_discarding_stream(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    errors = "strict" if descriptor == 1 else "backslashreplace"
    return io.TextIOWrapper(
        io.BufferedWriter(_DiscardingFile(descriptor, "w", closefd=False)),
        encoding=None if stream is None else stream.encoding,
        errors=errors if stream is None else stream.errors,
        line_buffering=True,
    )
