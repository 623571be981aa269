"""Where an attempt begins and ends among the lines of a run that had several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import format_duration
from clusterctl.render.story.attempts import cause_words
from clusterctl.render.terminal.console import DIM, safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.logs.fold import FoldedLine
    from clusterctl.logs.line import LogLine
    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.rules.state import RunState


def rule(text: str, terminal: Terminal) -> str:
    """Return a line that is none of any worker's."""
    dash = terminal.glyphs.rule * 2
    return terminal.style(f"{dash} {safe(text)} {dash}", DIM)


class Marks:
    """Says between lines which attempt they are of, where there were several.

    Args:
        terminal: Where the lines are written.
        attempt: The only attempt of which lines are shown, or `None`.
        first: Lines are shown from the first attempt on; else from that of the first line.
    """

    def __init__(self, terminal: Terminal, *, attempt: int | None = None, first: bool = True) -> None:
        self._terminal = terminal
        self._only = attempt
        self._told = (attempt or 0) - 1 if first or attempt is not None else None
        self._ended: set[int] = set()

    def before(
        self, lines: Sequence[LogLine | FoldedLine], state: RunState
    ) -> Iterator[str | Sequence[LogLine | FoldedLine]]:
        """Yield lines in pieces, and between them what begins and what has ended there."""
        start = 0
        for number, line in enumerate(lines):
            if self._told is None or line.attempt > self._told:
                if number > start:
                    yield lines[start:number]
                start = number
                yield from self._up_to(line.attempt, state)
        if start < len(lines):
            yield lines[start:]

    def rest(self, state: RunState) -> Iterator[str]:
        """Yield what is left to say once all lines are shown."""
        if self._only is None and state.past_attempts:
            yield from self._up_to(state.attempt, state)
        elif self._only is not None and state.past_attempts:
            yield from self._up_to(self._only, state)
            yield from self._end(self._only, state)

    def _up_to(self, attempt: int, state: RunState) -> Iterator[str]:
        joined = self._told is None
        first = attempt if self._told is None else self._told + 1
        self._told = max(attempt, first - 1)
        if not state.past_attempts:
            return
        for number in range(first, attempt + 1):
            if self._only is None and not (joined and number == first):
                yield from self._end(number - 1, state)
            yield rule(_begin(number, state), self._terminal)

    def _end(self, number: int, state: RunState) -> Iterator[str]:
        past = next((one for one in state.past_attempts if one.number == number), None)
        if past is None or number in self._ended:
            return
        self._ended.add(number)
        took = "" if past.began is None else f" after {format_duration(past.ended - past.began)}"
        why = cause_words(past.cause, past.why, message=True)
        yield rule(f"attempt {number} ended{took}: {why}", self._terminal)


def _begin(number: int, state: RunState) -> str:
    past = next((one for one in state.past_attempts if one.number == number), None)
    resume_from = state.resume_from if number == state.attempt else past.resume_from if past is not None else None
    return f"attempt {number}" + (f", from {resume_from}" if resume_from else "")
