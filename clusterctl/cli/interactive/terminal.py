"""A terminal on a node, shown at the one that a person sits at."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import tty
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command
from clusterctl.cli.interactive.escape import Typed, sift
from clusterctl.cli.interactive.waker import Waker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.command_types import ExecAnswer
    from clusterctl.session.session import Session
    from clusterctl.session.streams import Duplex

_TYPED_BYTES = 4096


class LeftError(Exception):
    """The person left with `~.`, or their terminal is gone."""


def show(
    session: Session, program: command_types.ProgramArguments, beside: command_types.RankArguments | None, fd: int
) -> ExecAnswer:
    """Let a person work at a program on a node; return how it ended.

    Args:
        session: With the node.
        program: What runs there.
        beside: The rank whose folder and environment it gets, or `None`.
        fd: The person's terminal.

    Raises:
        LeftError: The person left before its end.
        NodeError: It cannot be begun, or the node was lost.
    """
    with Waker() as waker:
        stream = session.open_duplex(waker.wake)
        size = os.get_terminal_size(fd)
        asked: command_types.TerminalArguments = {
            **program,
            "beside": beside,
            "term": os.environ.get("TERM") or "dumb",
            "rows": size.lines,
            "columns": size.columns,
            "stream": stream.number,
        }
        ending = session.call_async(Command.TERMINAL, asked)
        ending.add_done_callback(lambda _: waker.wake())
        with _raw(fd), _resized(session, stream, fd):
            _pass_on(stream, ending, waker, fd)
        return ending.result()


def _pass_on(stream: Duplex, ending: Future[ExecAnswer], waker: Waker, fd: int) -> None:
    typed = Typed()
    while True:
        over = ending.done()
        while data := stream.read():
            _write(fd, data)
            stream.taken(len(data))
        if over:
            return
        keys = [fd] if stream.room > _TYPED_BYTES else []
        ready, _, _ = select.select([waker.fd, *keys], [], [])
        if waker.fd in ready:
            waker.heard()
        if fd in ready:
            typed, passed, leaves = sift(typed, _read(fd))
            if leaves:
                raise LeftError
            if passed:
                stream.send(passed)


def _read(fd: int) -> bytes:
    with contextlib.suppress(OSError):
        if data := os.read(fd, _TYPED_BYTES // 2):
            return data
    raise LeftError


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Hand every key on as it is, Ctrl-C too: it is for the program on the node."""
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSANOW)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(fd, termios.TCSANOW, before)


@contextlib.contextmanager
def _resized(session: Session, stream: Duplex, fd: int) -> Iterator[None]:
    def tell(*_: object) -> None:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(fd)
            session.post(Command.RESIZE, {"stream": stream.number, "rows": size.lines, "columns": size.columns})

    before = signal.signal(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
