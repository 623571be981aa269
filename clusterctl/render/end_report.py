"""The report about the end of a run: the first observed failure, the other failures in groups, commands to run next."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import describe_duration, format_duration, group_pairs, name_ranks, plural
from clusterctl.logs.failure_tails import select_cause_lines
from clusterctl.logs.fold import FoldedLine
from clusterctl.logs.log_line import LogLine
from clusterctl.logs.safe_text import clean_block, strip_colours
from clusterctl.render.console import BOLD, DIM, GREEN, RED, YELLOW, Terminal, safe
from clusterctl.render.error_messages import render_start_error
from clusterctl.render.remaining_processes import render_remaining_processes
from clusterctl.render.run_messages import (
    count_worker_states,
    describe_worker,
    failure_line,
    shared_failure_line,
    stall_line,
)
from clusterctl.render.stack_report import find_raised_error, fold_traceback
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.outcome import list_end_warnings
from clusterctl.run.rules.state import RunState, WorkerState
from clusterctl.why.verdict import Confidence, ProblemKind, Verdict, format_verdict_lines

_SCREEN_LINES = 100
"""The assumed number of lines that a person sees on the screen."""


class OutputTail:
    """The last lines of output that were written to a screen."""

    def __init__(self) -> None:
        self._lines: deque[LogLine | FoldedLine] = deque(maxlen=_SCREEN_LINES)

    def add(self, lines: Sequence[LogLine | FoldedLine]) -> None:
        """Add lines that were written to the screen."""
        self._lines.extend(lines[-_SCREEN_LINES:])

    def lines_of_attempt(self, attempt: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Return ranks and text of each line of an attempt, oldest first."""
        return tuple(
            (line.ranks if isinstance(line, FoldedLine) else (line.rank,), line.text)
            for line in self._lines
            if line.attempt == attempt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleOutput:
    """Output that is visible on the screen.

    Attributes:
        ranks: The ranks whose whole output is shown.
        lines: The last lines of the attempt that ended, oldest first, each with its ranks.
    """

    ranks: frozenset[int] = frozenset()
    lines: tuple[tuple[tuple[int, ...], str], ...] = ()

    def find_rank_with_traceback(self, cause: Cause) -> int | None:
        """Return a rank whose visible output contains the traceback of a failure; `None` if there is no such rank.

        The traceback of another rank counts too, if it raised the same error in the same line of the same function.
        """
        if cause.rank is not None and cause.rank in self.ranks:
            return cause.rank
        wanted = find_raised_error(clean_block((cause.traceback or "").encode("utf-8", "replace")))
        if wanted is None:
            return None
        for rank in sorted({rank for ranks, _ in self.lines for rank in ranks}):
            if wanted == find_raised_error([strip_colours(text) for ranks, text in self.lines if rank in ranks]):
                return rank
        return None

    def shows_tail(self, rank: int, lines: Sequence[str]) -> bool:
        """Return whether these last lines of a rank are visible, which is the case if the last of them is visible."""
        own = [strip_colours(text) for ranks, text in self.lines if rank in ranks]
        return rank in self.ranks and bool(lines) and lines[-1] in own


_MOST_TRACEBACK = 40
_MOST_LAST_LINES = 10
_SIGTERM_CODES = (None, 0, 128 + signal.SIGTERM)
"""Exit codes of a worker that SIGTERM ended; `None` means that the signal itself ended the worker."""
_MOST_GROUPS = 8
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContext:
    """Information for the report that the state of the run does not contain.

    Attributes:
        log_path: The folder with the output of all ranks; `None` if the report should not name it.
        folders: The folders of the code on the nodes.
        shown: Output that is visible on the screen above the report.
        node_memory: The used memory of the node in percent, and the seconds between this measurement and the kill.
    """

    log_path: str | None = None
    folders: frozenset[str] = frozenset()
    visible_output: VisibleOutput = field(default_factory=VisibleOutput)
    node_memory: tuple[float, float] | None = None


_NO_CONTEXT = ReportContext()


def render_end_report(state: RunState, terminal: Terminal, context: ReportContext = _NO_CONTEXT) -> list[str]:
    """Return the report of a run that is over.

    Args:
        state: The final state of the run.
        terminal: The terminal that will show the report.
        context: Information that the state of the run does not contain.
    """
    if state.phase.value == "succeeded":
        return [*_warnings(state, terminal), _success(state, terminal)]
    lines: list[str] = []
    if state.cause is not None and state.error is None:
        lines += _first_failure(state, state.cause, terminal, context)
    elif state.error is not None:
        lines += render_start_error(state.error, terminal)
    if state.stall is not None:
        lines.append(stall_line(state.stall))
    if state.remaining:
        nodes = fold_hosts(str(entry.get("node", "")) for entry in state.remaining)
        lines += [terminal.style(f"may still be there, on {nodes}:", YELLOW)]
        lines += render_remaining_processes(state.remaining, terminal)
    lines += [*_warnings(state, terminal), _end_line(state, terminal)]
    lines += _next_steps(state, terminal, context.log_path)
    return lines


# --- inside


def _warnings(state: RunState, terminal: Terminal) -> list[str]:
    return [terminal.style(f"warn: {safe(text)}", YELLOW) for text in list_end_warnings(state)]


def _success(state: RunState, terminal: Terminal) -> str:
    attempts = f", {plural(state.attempt + 1, 'attempt')}" if state.attempt > 0 else ""
    size = f"{plural(len(state.workers), 'rank')} on {plural(len(state.nodes), 'node')}"
    sign = terminal.style(terminal.glyphs.ok, GREEN)
    return f"{sign} {state.run} succeeded: {size}{attempts}, {_duration(state)}"


def _duration(state: RunState) -> str:
    if state.created is None or state.ended is None:
        return "duration unknown"
    return format_duration(state.ended - state.created)


def _first_failure(state: RunState, cause: Cause, terminal: Terminal, context: ReportContext) -> list[str]:
    same = _find_same_failures(state, cause)
    if len(same) > 1:
        lines = [shared_failure_line(cause, same, [state.workers[rank].node for rank in same], state.attempt, terminal)]
    else:
        lines = [failure_line(state.label_cause(cause), state.attempt, terminal)]
    if context.node_memory is not None:
        full, age = context.node_memory
        lines.append(f"  memory of {safe(cause.node)} was {full:.0f}% full {describe_duration(age)} before")
    worker = state.workers.get(cause.rank) if cause.rank is not None else None
    above = context.visible_output.find_rank_with_traceback(cause) if cause.traceback else None
    if above is None:
        lines += _evidence(cause, worker, terminal, context)
    elif above != cause.rank:
        lines.append(terminal.style(f"  its traceback ends as that of rank {above} above", DIM))
    others = [
        w for rank in sorted(state.workers) if (w := state.workers[rank]).phase.value in ("exited", "lost")
        and rank not in same and rank != cause.rank
    ]  # fmt: skip
    lines += _others(others, state, terminal)
    return lines


def _find_same_failures(state: RunState, cause: Cause) -> list[int]:
    """Return the ranks that ended with exactly the same error as the first failure."""
    if cause.secondary or not cause.message or cause.rank is None:
        return []
    how = (cause.kind, cause.exit_code, cause.signal, cause.message)
    causes = [c for c in state.causes if (c.kind, c.exit_code, c.signal, c.message) == how]
    return sorted(c.rank for c in causes if c.rank is not None and c.rank in state.workers)


def _evidence(cause: Cause, worker: WorkerState | None, terminal: Terminal, context: ReportContext) -> list[str]:
    """Return the traceback of a failed worker; without a traceback, the worker's last lines of output."""
    bar = terminal.style(f"  {terminal.glyphs.bar}", RED) + " "
    if cause.traceback:
        trace = clean_block(cause.traceback.encode("utf-8", "replace"))
        folded = fold_traceback(trace, context.folders, ellipsis=terminal.glyphs.ellipsis)
        return [bar + terminal.filter_colours(line) for line in _omit_middle_lines(folded, terminal)]
    tail = select_cause_lines(worker.tail)[-_MOST_LAST_LINES:] if worker is not None and worker.tail else []
    if worker is not None and context.visible_output.shows_tail(worker.rank, [strip_colours(line) for line in tail]):
        return []
    return [bar + terminal.filter_colours(line) for line in tail]


def _omit_middle_lines(lines: Sequence[str], terminal: Terminal) -> list[str]:
    if len(lines) <= _MOST_TRACEBACK:
        return list(lines)
    head, tail = 5, _MOST_TRACEBACK - 5
    return [*lines[:head], f"  {terminal.glyphs.ellipsis} {len(lines) - head - tail} lines", *lines[-tail:]]


def _others(others: Sequence[WorkerState], state: RunState, terminal: Terminal) -> list[str]:
    """Return lines about the other failures, grouped by exit and message; stopped ranks are only listed."""
    messages = {cause.rank: cause for cause in state.causes}
    groups: dict[tuple[str, str], tuple[str, list[WorkerState]]] = {}
    for worker in others:
        if worker.failed or worker.phase.value == "lost":
            cause = messages.get(worker.rank)
            text = "" if cause is None else safe(cause.message)
            text = "" if text == describe_worker(worker) else text
            # Messages about lost peers differ in ports and addresses, so ports and addresses are not compared.
            key = (describe_worker(worker), _VARYING.sub("#", text))
            groups.setdefault(key, (text, []))[1].append(worker)
    lines = [
        f"  then {name_ranks(w.rank for w in group)} on {fold_hosts(w.node for w in group)}: {how}"
        + (f": {text}" if text else "")
        for (how, _), (text, group) in list(groups.items())[:_MOST_GROUPS]
    ]
    if len(groups) > _MOST_GROUPS:
        rest = [w for _, group in list(groups.values())[_MOST_GROUPS:] for w in group]
        lines.append(f"  and {name_ranks(w.rank for w in rest)} in other ways: {count_worker_states(rest)}")
    lines += [terminal.style(f"  {line}", DIM) for line in _stopped_lines([w for w in others if w.stopped])]
    if well := [w for w in others if w.ended_well]:
        lines.append(terminal.style(f"  ended well: {name_ranks(w.rank for w in well)}", DIM))
    return lines


def _stopped_lines(stopped: Sequence[WorkerState]) -> list[str]:
    """Return the stopped ranks by exit code. The first failure may also have caused an unexpected exit code."""
    codes = group_pairs((None if w.exit_code in _SIGTERM_CODES else w.exit_code, w.rank) for w in stopped)
    return [
        f"{'stopped by clusterctl' if code is None else f'exit code {code} while being stopped'}: {name_ranks(ranks)}"
        for code, ranks in codes.items()
    ]


def _end_line(state: RunState, terminal: Terminal) -> str:
    code = "" if state.exit_code is None else f" (exit code {state.exit_code})"
    attempts = f" in attempt {state.attempt}" if state.attempt > 0 else ""
    tells = state.cause is None or state.reason == StopReason.PORT_TAKEN.value
    reason = f": {safe(state.reason_text)}" if state.reason_text and tells else ""
    style = (YELLOW,) if state.phase.value == "cancelled" else (RED,)
    sign = terminal.glyphs.warn if state.phase.value == "cancelled" else terminal.glyphs.fail
    text = f"{state.run} {state.phase.value}{attempts} after {_duration(state)}{code}{reason}"
    return f"{terminal.style(sign, *style)} {text}"


def _next_steps(state: RunState, terminal: Terminal, log_path: str | None) -> list[str]:
    if state.error is not None or state.phase.value == "cancelled":
        return []
    cause = state.cause
    which = f" --rank {cause.rank}" if cause is not None and cause.rank is not None else ""
    lines = [f"  clusterctl logs {state.run}{which} -n 200"]
    if log_path:
        lines.append(f"  all output: {log_path}")
    return [terminal.style(line, DIM) for line in lines]


def render_verdict(verdict: Verdict, terminal: Terminal) -> list[str]:
    """Return a verdict as lines."""
    if verdict.kind is ProblemKind.NONE:
        return [f"{terminal.style(terminal.glyphs.ok, GREEN)} {safe(verdict.summary)}"]
    colour = RED if verdict.confidence in (Confidence.CERTAIN, Confidence.LIKELY) else YELLOW
    (_, first), *rest = format_verdict_lines(verdict)
    head, _, text = first.partition(": ")
    return [
        f"{terminal.style(safe(head), BOLD, colour)}: {safe(text)}",
        *(f"  {terminal.style(f'{label:6}', DIM)} {safe(line)}" for label, line in rest),
    ]
