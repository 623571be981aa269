"""Renders the attempts of a run, with the reason of each end: as a line, a table, JSON, or a separator in output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import describe_duration, format_duration
from clusterctl.logs.fold import FoldedLine
from clusterctl.logs.log_line import LogLine
from clusterctl.render.console import DIM, Terminal, safe
from clusterctl.render.log_output import format_rfc3339
from clusterctl.render.run_messages import cause_json, describe_exit, failure_line
from clusterctl.render.table import Cell, Column, make_columns, render_table
from clusterctl.run.rules.controller_events import RestartPlanned
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import RunState, cause_from_json

_WORDS = {
    "stalled": "stalled",
    "time_limit": "the time limit was reached",
    "idle": "its GPUs were idle",
    "unhealthy": "a node was unhealthy",
    "fence": "no controller was heard",
    "port_taken": "a port of the run was taken",
}


def describe_cause(cause: Cause | None, fallback: str = "", *, with_message: bool = False) -> str:
    """Return why an attempt ended, in a few words: `rank 1 on gpu02: killed by SIGKILL`.

    Args:
        cause: The first observed failure of the attempt.
        fallback: The text to return if no cause is known: a word of `restart.on`.
        with_message: Whether to add the error message of the worker.
    """
    if cause is None:
        return fallback
    if cause.kind == "node_lost":
        return f"{safe(cause.node)} was lost"
    with_message = with_message and bool(cause.message) and cause.message != describe_exit(cause)
    message = f": {safe(cause.message)}" if with_message else ""
    if cause.kind in _WORDS:
        return _WORDS[cause.kind] + message
    place = f"rank {cause.rank} on {safe(cause.node)}: " if cause.rank is not None else ""
    if message and cause.kind == "exit":
        # The message comes first: it says more than the exit code, and a narrow table cuts the end of a text.
        return f"{place}{safe(cause.message)} ({describe_exit(cause)})"
    return f"{place}{describe_exit(cause)}{message}"


def describe_cause_briefly(cause: Cause) -> str:
    """Return why an attempt ended: the failure, then the rank, because a narrow column cuts the end of the text."""
    if cause.rank is None or cause.kind in (*_WORDS, "node_lost"):
        return describe_cause(cause, with_message=True)
    match cause.kind:
        case "oom":
            how = "out of memory"
        case "signal" if cause.signal:
            how = cause.signal
        case _:
            how = safe(cause.message) or describe_exit(cause)
    return f"{how} (rank {cause.rank} on {safe(cause.node)})"


def describe_restart(time: float, event: RestartPlanned, terminal: Terminal) -> list[str]:
    """Return the lines of the live view for a restart: why the last attempt ended, and when the next one begins."""
    cause = cause_from_json(event.cause)
    lines = []
    if cause is not None and (cause.rank is not None or cause.kind == "node_lost"):
        lines.append(failure_line(cause, event.attempt - 1, terminal))
    pause = event.at - time
    when = f"in {describe_duration(pause)}" if pause >= 0.5 else "now"
    which = f"restart {event.number} of {event.budget} {when}" if event.budget else f"attempt {event.attempt} {when}"
    return [*lines, f"{which} ({describe_cause(cause, event.why)})"]


def describe_next_attempt(state: RunState, now: float) -> str:
    """Return a sentence about the next attempt: when it begins, and on which nodes."""
    pause = max(0.0, (state.restart_at or now) - now)
    nodes = fold_hosts(state.next_nodes)
    when = f"in {describe_duration(pause)} on {nodes}" if pause >= 0.5 else f"once there is a connection to {nodes}"
    return f"attempt {state.attempt + 1} begins {when}"


class _Attempt(NamedTuple):
    """An attempt. For the current attempt, `ended` is `None`, and `why` is the phase of the run."""

    number: int
    began: float | None
    ended: float | None
    step: int | None
    resume_from: str | None
    cause: Cause | None
    why: str


def _list_attempts(state: RunState, step: int | None) -> list[_Attempt]:
    attempts = [_Attempt(*(getattr(past, key) for key in _Attempt._fields)) for past in state.earlier_attempts]
    if state.attempt < 0 or any(past.number == state.attempt for past in attempts):
        return attempts
    cause, why, began = find_final_cause(state), state.phase.value, state.running_since
    return [*attempts, _Attempt(state.attempt, began, state.ended, step, state.resume_from, cause, why)]


def list_attempt_spans(state: RunState) -> list[tuple[int, float | None, float | None, str]]:
    """Return number, start, end and reason of the end of each attempt; times are wall clock times."""
    return [
        (each.number, each.began, each.ended, describe_cause(each.cause, each.why, with_message=True))
        for each in _list_attempts(state, None)
    ]


def render_attempts(state: RunState, step: int | None, now: float, terminal: Terminal) -> list[str]:
    """Return the table of attempts; no lines if the run has a single attempt.

    Args:
        state: The state of the run.
        step: The step that the current attempt has reached.
        now: The head's wall clock.
        terminal: The terminal that will show the table.
    """
    if not state.earlier_attempts:
        return []
    columns = [
        *make_columns(">ATTEMPT", ">TOOK", ">STEPS", "~FROM"),
        Column(title="END", shrink=True, wraps=True),
    ]
    rows: list[list[Cell | str]] = [
        [
            str(row.number),
            "-" if row.began is None else format_duration((now if row.ended is None else row.ended) - row.began),
            "-" if row.step is None else str(row.step),
            row.resume_from or "-",
            describe_cause(row.cause, row.why, with_message=True),
        ]
        for row in _list_attempts(state, step)
    ]
    return render_table(columns, rows, terminal)


def attempts_json(state: RunState, step: int | None) -> list[dict[str, Any]]:
    """Return the field `attempts` of `status --json`."""
    return [
        {
            "attempt": row.number,
            "started": None if row.began is None else format_rfc3339(row.began),
            "ended": None if row.ended is None else format_rfc3339(row.ended),
            "cause": cause_json(row.cause),
            "step": row.step,
            "resume_from": row.resume_from,
        }
        for row in _list_attempts(state, step)
    ]


def render_separator(text: str, terminal: Terminal) -> str:
    """Return a line that separates the output of attempts."""
    dash = terminal.glyphs.rule * 2
    return terminal.style(f"{dash} {safe(text)} {dash}", DIM)


class AttemptSeparators:
    """Inserts separators between the output lines of different attempts.

    Args:
        terminal: The terminal that shows the lines.
        attempt: The only attempt whose lines are shown; `None` shows all attempts.
        first: Whether to print the separator of the first attempt even if the selected output has no line of it.
    """

    def __init__(self, terminal: Terminal, *, attempt: int | None = None, first: bool = True) -> None:
        self._terminal = terminal
        self._only = attempt
        self._last_attempt = (attempt or 0) - 1 if first or attempt is not None else None
        self._ended: set[int] = set()

    def insert_separators(
        self, lines: Sequence[LogLine | FoldedLine], state: RunState
    ) -> Iterator[str | Sequence[LogLine | FoldedLine]]:
        """Yield the lines in groups, with a separator before the first group of each attempt."""
        start = 0
        for number, line in enumerate(lines):
            if self._last_attempt is None or line.attempt > self._last_attempt:
                if number > start:
                    yield lines[start:number]
                start = number
                yield from self._up_to(line.attempt, state)
        if start < len(lines):
            yield lines[start:]

    def list_remaining_separators(self, state: RunState) -> Iterator[str]:
        """Yield the separators of attempts that began after the last line of output."""
        if self._only is None and state.earlier_attempts:
            yield from self._up_to(state.attempt, state)
        elif self._only is not None and state.earlier_attempts:
            yield from self._up_to(self._only, state)
            yield from self._end(self._only, state)

    def _up_to(self, attempt: int, state: RunState) -> Iterator[str]:
        joined = self._last_attempt is None
        first = attempt if self._last_attempt is None else self._last_attempt + 1
        self._last_attempt = max(attempt, first - 1)
        if not state.earlier_attempts:
            return
        for number in range(first, attempt + 1):
            if self._only is None and not (joined and number == first):
                yield from self._end(number - 1, state)
            yield render_separator(_begin(number, state), self._terminal)

    def _end(self, number: int, state: RunState) -> Iterator[str]:
        past = next((one for one in state.earlier_attempts if one.number == number), None)
        if past is None or number in self._ended:
            return
        self._ended.add(number)
        took = "" if past.began is None else f" after {format_duration(past.ended - past.began)}"
        why = describe_cause(past.cause, past.why, with_message=True)
        yield render_separator(f"attempt {number} ended{took}: {why}", self._terminal)


def _begin(number: int, state: RunState) -> str:
    past = next((one for one in state.earlier_attempts if one.number == number), None)
    resume_from = state.resume_from if number == state.attempt else past.resume_from if past is not None else None
    return f"attempt {number}" + (f", from {resume_from}" if resume_from else "")
