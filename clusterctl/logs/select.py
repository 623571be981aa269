"""What the default view shows besides rank 0: how the workers that failed came to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.logs.clean import clean_block, strip_colours
from clusterctl.logs.line import LogLine

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from clusterctl.agent.protocol.events import Exited

TAIL_LINES = 20
TRACEBACK_LINES = 60
FULL_ENDS = 4

_TRACEBACK = "Traceback (most recent call last)"


def default_ranks(world_size: int) -> frozenset[int]:
    """Return the ranks that are shown in full unless the user chose others."""
    return frozenset({0}) if world_size else frozenset()


def is_failure(exited: Exited) -> bool:
    """Say whether a worker failed by itself: not well, and not because we stopped it."""
    return not exited.stopped and (exited.signal is not None or exited.exit_code != 0)


def end_lines(tail: str) -> list[str]:
    """Return what of a failed worker's last output tells why: from its last traceback on, else the last lines."""
    lines = [line for line in clean_block(tail.encode("utf-8", "replace")) if strip_colours(line).strip()]
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if begins and len(lines) - begins[-1] <= TRACEBACK_LINES:
        # "During handling of the above exception …" chains tracebacks: the first of a chain is the cause.
        return lines[max(_chain_start(lines, begins), len(lines) - TRACEBACK_LINES) :]
    return lines[-TAIL_LINES:]


def _chain_start(lines: list[str], begins: list[int]) -> int:
    start = begins[-1]
    for earlier in reversed(begins[:-1]):
        between = lines[start - 1]
        if "above exception" not in between:
            break
        start = earlier
    return start


class FailingEnds:
    """Decides what to show of ranks that are not shown in full, once each, when they fail.

    Pure. The first few different ends of an attempt are shown whole, of the others the last line.

    Args:
        shown: Ranks whose output is shown in full anyway; `None` for all.
    """

    def __init__(self, shown: Collection[int] | None) -> None:
        self._shown = shown
        self._done: set[tuple[int, int]] = set()
        self._ends: dict[int, set[tuple[str, ...]]] = {}

    def lines(self, exits: Iterable[tuple[str, float, Exited]]) -> list[LogLine]:
        """Return what to show now, in the order of the exits.

        Args:
            exits: Node, wall clock in seconds, and event of each worker that is gone.
        """
        out: list[LogLine] = []
        for node, time, exited in exits:
            key = (exited.attempt, exited.rank)
            if key in self._done or self._shown is None or exited.rank in self._shown or not is_failure(exited):
                continue
            self._done.add(key)
            # Some frameworks put the rank before each line, so that equal ends would differ.
            last_lines = [line.removeprefix(f"[rank{exited.rank}]: ") for line in end_lines(exited.tail)]
            texts = self._choose(exited.attempt, last_lines)
            out += [LogLine(time, node, exited.rank, exited.attempt, text) for text in texts]
        return out

    def _choose(self, attempt: int, lines: list[str]) -> list[str]:
        ends = self._ends.setdefault(attempt, set())
        if tuple(lines) in ends:
            return lines  # folds with the same end of another rank
        if len(ends) >= FULL_ENDS:
            return lines[-1:]
        ends.add(tuple(lines))
        return lines
