"""The names of a run's files, equal on the node and in the replica on the head, and what their sizes imply."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable


JOURNAL_FILE = "journal.jsonl"

SAMPLES_FILE = "samples.jsonl"

MAX_SAMPLES_BYTES = 64 * 1024 * 1024
"""The most bytes of samples that a node keeps (see `find_first_kept_byte`)."""

INDEX_SUFFIX = ".idx"

INDEX_RECORD = struct.Struct("<Qd")
"""A record of a time index: the size of the output file (bytes), and the wall clock (seconds) at that size."""


def format_output_path(attempt: int, rank: int) -> str:
    """Return the path of a worker's output, relative to the run directory of its node."""
    return f"attempt-{attempt}/rank-{rank}.log"


def format_index_path(attempt: int, rank: int) -> str:
    """Return the path of the time index of that output, a sequence of `INDEX_RECORD`."""
    return f"attempt-{attempt}/rank-{rank}{INDEX_SUFFIX}"


def parse_attempt_and_rank(name: str, form: Callable[[int, int], str] = format_output_path) -> tuple[int, int] | None:
    """Return attempt and rank of a file whose name has this form, or `None` for any other file."""
    folder, _, file = name.partition("/")
    numbers = folder[len("attempt-") :], file[len("rank-") :].partition(".")[0]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    attempt, rank = map(int, numbers)
    return (attempt, rank) if name == form(attempt, rank) else None


def parse_attempt(name: str) -> int:
    """Return the attempt in whose folder a file of a run lies; -1 for any other file."""
    number = name.partition("/")[0][len("attempt-") :]
    return int(number) if name.startswith("attempt-") and number.isascii() and number.isdecimal() else -1


def find_first_kept_byte(size: int, max_bytes: int) -> int:
    """Return the first byte that is kept of a file of `size` bytes that discards its front.

    At least half of `max_bytes` stays. The result depends on the size only, so a reader of the file can compute it.
    """
    half = max_bytes // 2
    return max(0, size // half - 1) * half
