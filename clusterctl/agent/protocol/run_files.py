"""The names of a run's files on the node and in the replica on the head, and the first byte of a shortened file."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable


JOURNAL_FILE = "journal.jsonl"

SAMPLES_FILE = "samples.jsonl"

MAX_SAMPLES_BYTES = 64 * 1024 * 1024
"""The maximum size of the samples that a node keeps (see `find_first_kept_byte`)."""

INDEX_SUFFIX = ".idx"

INDEX_RECORD = struct.Struct("<Qd")
"""A record of a time index: the size of the output file (bytes), and the wall clock (seconds) at that size."""


def format_output_path(attempt: int, rank: int) -> str:
    """Return the path of a worker's output, relative to the run directory of its node."""
    return f"attempt-{attempt}/rank-{rank}.log"


def format_index_path(attempt: int, rank: int) -> str:
    """Return the path of the time index of a worker's output. The file is a sequence of `INDEX_RECORD`."""
    return f"attempt-{attempt}/rank-{rank}{INDEX_SUFFIX}"


def parse_attempt_and_rank(
    name: str, format_path: Callable[[int, int], str] = format_output_path
) -> tuple[int, int] | None:
    """Return the attempt and rank in a path that `format_path` has made, or `None` for any other path."""
    folder, _, file = name.partition("/")
    numbers = folder[len("attempt-") :], file[len("rank-") :].partition(".")[0]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    attempt, rank = map(int, numbers)
    return (attempt, rank) if name == format_path(attempt, rank) else None


def parse_attempt(name: str) -> int:
    """Return the attempt to whose folder a file belongs; -1 for a file outside the attempts' folders."""
    number = name.partition("/")[0][len("attempt-") :]
    return int(number) if name.startswith("attempt-") and number.isascii() and number.isdecimal() else -1


def find_first_kept_byte(size: int, max_bytes: int) -> int:
    """Return the offset of the first byte that a node keeps of a file to which it has written `size` bytes.

    A node keeps at least half of `max_bytes`. The result depends on the size only, so a reader of the file can compute
    it.
    """
    half = max_bytes // 2
    return max(0, size // half - 1) * half
