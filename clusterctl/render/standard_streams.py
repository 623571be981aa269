"""Standard streams that outlive their readers.

`clusterctl ps | head -1`, or a terminal that was closed: what is written after the reader has gone is dropped, so a
command still does its work and ends with its own code. A command that does nothing but show something asks
`has_reader`, and leaves. An error of any other kind, such as a full disk, ends the command with its reason.
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
"""Milliseconds that poll can wait."""


def has_reader(descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether a descriptor has a reader: the other end of the pipe, or the terminal, is open.

    Args:
        descriptor: Which.
        seconds: Wait so long for the reader to go.
    """
    look = select.poll()
    # Registered for no event, poll still reports that the other end is closed.
    look.register(descriptor, 0)
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in look.poll(min(1000 * seconds, _LONGEST)))


class _Outliving(io.FileIO):
    """A descriptor that discards output once it has no reader."""

    @override
    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if has_reader(self.fileno()):
                name = {1: "standard output", 2: "standard error"}.get(self.fileno(), "the output")
                raise RefusedError(
                    f"cannot write to {name}: {error.strerror}",
                    hint="write to another place; runs are not affected: `clusterctl ps` lists them",
                ) from error
            return memoryview(data).nbytes


def replace_standard_streams() -> None:
    """Make stdin, stdout and stderr of this process usable, whatever its parent did with them."""
    _open_what_is_closed()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stdout, sys.stderr = _outliving(sys.stdout, 1), _outliving(sys.stderr, 2)


def _open_what_is_closed() -> None:
    """Let no file of ours become a standard stream: a parent may have closed some (`<&-`, `>&-`)."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)


def _outliving(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    errors = "strict" if descriptor == 1 else "backslashreplace"
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(descriptor, "w", closefd=False)),
        encoding=None if stream is None else stream.encoding,
        errors=errors if stream is None else stream.errors,
        line_buffering=True,
    )
