"""The names of the files of a run, which a replica on the head keeps, and what follows from their sizes alone."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable


JOURNAL_FILE = "journal.jsonl"

SAMPLES_FILE = "samples.jsonl"

MAX_SAMPLES_BYTES = 64 * 1024 * 1024
"""Bytes of its samples that a node keeps at most (see `first_kept`)."""

INDEX_SUFFIX = ".idx"

INDEX_RECORD = struct.Struct("<Qd")
"""One record of a time index: the size of the output file (bytes), and the wall clock (seconds) when it was seen."""


def format_output_path(attempt: int, rank: int) -> str:
    """Where a worker's stdout and stderr lie, relative to the run directory of its node."""
    return f"attempt-{attempt}/rank-{rank}.log"


def format_index_path(attempt: int, rank: int) -> str:
    """Where the time index of that output lies: `INDEX_RECORD` after `INDEX_RECORD`."""
    return f"attempt-{attempt}/rank-{rank}{INDEX_SUFFIX}"


def parse_attempt_and_rank(name: str, form: Callable[[int, int], str] = format_output_path) -> tuple[int, int] | None:
    """Return which attempt and rank a file is of whose name has that form, or `None` for any other file."""
    folder, _, file = name.partition("/")
    numbers = folder[len("attempt-") :], file[len("rank-") :].partition(".")[0]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    attempt, rank = map(int, numbers)
    return (attempt, rank) if name == form(attempt, rank) else None


def parse_attempt(name: str) -> int:
    """Return the attempt in whose folder a file of a run lies, -1 where it is of none."""
    number = name.partition("/")[0][len("attempt-") :]
    return int(number) if name.startswith("attempt-") and number.isascii() and number.isdecimal() else -1


def find_first_kept_byte(size: int, most: int) -> int:
    """Return the first byte that is kept of a file of `size` bytes whose front gives way: always the last `most / 2`.

    It follows from the size alone, so that whoever reads the file knows without being told what is gone.
    """
    half = most // 2
    return max(0, size // half - 1) * half
