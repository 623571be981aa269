"""Reads a piece of a worker's output, or notices that the file is not what it was: a worker may have emptied it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import run_files
from clusterctl.agent.record import timeindex

if TYPE_CHECKING:
    from clusterctl.agent.record.tally import Tallies, Tally


@dataclass(frozen=True)
class Piece:
    """Bytes of an output. Offsets are bytes of the output, not of its file.

    Attributes:
        offset: Where they begin.
        size: How much output there is.
        first_valid: What lies before it is gone.
    """

    offset: int
    data: bytes
    size: int
    first_valid: int


def read(
    path: str, tallies: Tallies, rank: int, offset: int, length: int, *, first_valid: int = 0, sending: bool = False
) -> Piece | None:
    """Return what an output holds from `offset` on, or from its first valid byte where that lies behind it.

    Args:
        path: Its file.
        tallies: Of its attempt.
        rank: Whose.
        offset: Where to begin; below 0 counted from its end.
        length: How many bytes at most.
        first_valid: What the journal says is gone.
        sending: The bytes are for a controller's replica. Up to where they go is written down before they are known
            good, so that whatever follows in a file that is emptied gets offsets behind them.

    Returns:
        `None` where the file was emptied and its supervisor has yet to see that: its bytes have no offset until then.

    Raises:
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if offset < 0:
            offset = max(0, tallies.of(rank).base + os.fstat(fd).st_size + offset)
        while True:
            tally = tallies.of(rank)
            begin = max(offset, tally.first_valid, first_valid)
            data = os.pread(fd, length, begin - tally.base)
            now, size = _look(fd, tallies, rank)
            if size is not None and sending and begin + len(data) > now.sent and _same(tally, now):
                tallies.note_sent(rank, begin + len(data))
                now, size = _look(fd, tallies, rank)
            if size is None:
                return None
            if _same(tally, now):
                return Piece(begin, data, size, max(tally.first_valid, first_valid))
    finally:
        os.close(fd)


def plain(path: str, name: str, offset: int, length: int) -> Piece:
    """Return what a file holds that only grows; offsets are as for `read`.

    Args:
        path: The file.
        name: What it is to the run: it says which of its front is gone, if any.
        offset: Where to begin.
        length: How many bytes at most.

    Raises:
        OSError: It cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        start = offset if offset >= 0 else max(0, size + offset)
        while True:
            first = _first_of(name, fd, size)
            begin = max(start, first)
            data = os.pread(fd, length, begin)
            size = os.fstat(fd).st_size
            # What of the samples is gone follows from the size, which grows before anything goes.
            if _first_of(name, fd, size) <= begin:
                return Piece(begin, data, size, first)


def _first_of(name: str, fd: int, size: int) -> int:
    if name == run_files.SAMPLES_FILE:
        return run_files.find_first_kept_byte(size, run_files.MAX_SAMPLES_BYTES)
    return timeindex.first_valid(fd, size) if name.endswith(run_files.INDEX_SUFFIX) else 0


def _look(fd: int, tallies: Tallies, rank: int) -> tuple[Tally, int | None]:
    """Return what is known of an output now, and how long it is; `None` where its file was emptied."""
    status = os.fstat(fd)
    # Asked after the file: what is given up, and what begins anew, stands there before it is done.
    now = tallies.of(rank)
    emptied = now.emptied(status, lambda count: os.pread(fd, count, 0))
    return now, None if emptied else now.base + status.st_size


def _same(before: Tally, now: Tally) -> bool:
    return (before.base, before.first_valid) == (now.base, now.first_valid)
