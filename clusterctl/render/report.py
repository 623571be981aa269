"""How a run ended: the first observed failure on top, then the others folded, then what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.agent.protocol.requests import StopReason
from clusterctl.logs.clean import clean_block
from clusterctl.logs.select import end_lines
from clusterctl.render.errors import remaining_lines, start_failed_lines
from clusterctl.render.ranks import count, fold_nodes, fold_ranks
from clusterctl.render.terminal.console import DIM, GREEN, RED, YELLOW, safe
from clusterctl.render.words import failure_line, stall_line, summary, worker_state
from clusterctl.wording import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.rules.blame import Cause
    from clusterctl.run.rules.state import RunState, WorkerState

_MOST_TRACEBACK = 40
_MOST_LAST_LINES = 10
_MOST_GROUPS = 8


def render_report(state: RunState, terminal: Terminal, *, log_path: str | None = None) -> list[str]:
    """Return the report of a run that is over.

    Args:
        state: Its final state.
        terminal: Where it will stand.
        log_path: Where the output of all ranks lies, if that is to be told.
    """
    if state.phase.value == "succeeded":
        return [_success(state, terminal)]
    lines: list[str] = []
    if state.cause is not None and state.error is None:
        lines += _first_failure(state, state.cause, terminal)
    elif state.error is not None:
        lines += start_failed_lines(state.error, terminal)
    if state.stall is not None:
        lines.append(stall_line(state.stall))
    if state.remaining:
        nodes = fold_nodes(str(entry.get("node", "")) for entry in state.remaining)
        lines += [terminal.style(f"may still be there, on {nodes}:", YELLOW)]
        lines += remaining_lines(state.remaining, terminal)
    lines.append(_end_line(state, terminal))
    lines += _next_steps(state, terminal, log_path)
    return lines


# --- inside


def _success(state: RunState, terminal: Terminal) -> str:
    attempts = f", {count(state.attempt + 1, 'attempt')}" if state.attempt > 0 else ""
    size = f"{count(len(state.workers), 'rank')} on {count(len(state.nodes), 'node')}"
    sign = terminal.style(terminal.glyphs.ok, GREEN)
    return f"{sign} {state.run} succeeded: {size}{attempts}, {_duration(state)}"


def _duration(state: RunState) -> str:
    if state.created is None or state.ended is None:
        return "duration unknown"
    return duration(state.ended - state.created)


def _first_failure(state: RunState, cause: Cause, terminal: Terminal) -> list[str]:
    lines = [failure_line(cause, state.attempt, terminal)]
    worker = state.workers.get(cause.rank) if cause.rank is not None else None
    lines += _evidence(cause, worker, terminal)
    others = [
        w for rank in sorted(state.workers) if (w := state.workers[rank]).phase.value in ("exited", "lost")
        and rank != cause.rank
    ]  # fmt: skip
    lines += _others(others, state, terminal)
    return lines


def _evidence(cause: Cause, worker: WorkerState | None, terminal: Terminal) -> list[str]:
    """The worker's own traceback; without one, or where it ends differently, its last lines."""
    bar = terminal.style(f"  {terminal.glyphs.bar}", RED) + " "
    if cause.traceback:
        trace = clean_block(cause.traceback.encode("utf-8", "replace"))
        shown = _middle_cut(trace, terminal)
        return [bar + terminal.coloured(line) for line in shown]
    tail = end_lines(worker.tail)[-_MOST_LAST_LINES:] if worker is not None and worker.tail else []
    return [bar + terminal.coloured(line) for line in tail]


def _middle_cut(lines: Sequence[str], terminal: Terminal) -> list[str]:
    if len(lines) <= _MOST_TRACEBACK:
        return list(lines)
    head, tail = 5, _MOST_TRACEBACK - 5
    return [*lines[:head], f"  {terminal.glyphs.ellipsis} {len(lines) - head - tail} lines", *lines[-tail:]]


def _others(others: Sequence[WorkerState], state: RunState, terminal: Terminal) -> list[str]:
    """Fold the other failures by how they ended and what they said last; ranks that we stopped are only counted."""
    messages = {cause.rank: cause for cause in state.causes}
    groups: dict[tuple[str, str], list[WorkerState]] = {}
    for worker in others:
        if worker.failed or worker.phase.value == "lost":
            cause = messages.get(worker.rank)
            text = "" if cause is None else safe(cause.message)
            text = "" if text == worker_state(worker) else text
            groups.setdefault((worker_state(worker), text), []).append(worker)
    lines = [
        f"  then ranks {fold_ranks(w.rank for w in group)} on {fold_nodes(w.node for w in group)}: {how}"
        + (f": {text}" if text else "")
        for (how, text), group in list(groups.items())[:_MOST_GROUPS]
    ]
    if len(groups) > _MOST_GROUPS:
        rest = [w for group in list(groups.values())[_MOST_GROUPS:] for w in group]
        lines.append(f"  and ranks {fold_ranks(w.rank for w in rest)} in other ways: {summary(rest)}")
    lines = [line.replace("then ranks", "then rank", 1) if _single(line) else line for line in lines]
    if stopped := [w for w in others if w.stopped]:
        lines.append(terminal.style(f"  stopped by clusterctl: {_named(stopped)}", DIM))
    if well := [w for w in others if w.exit_code == 0 and not w.stopped]:
        lines.append(terminal.style(f"  ended well: {_named(well)}", DIM))
    return lines


def _single(line: str) -> bool:
    return line.startswith("  then ranks ") and line.split()[2].isdigit()


def _named(workers: Sequence[WorkerState]) -> str:
    noun = "rank" if len(workers) == 1 else "ranks"
    return f"{noun} {fold_ranks(w.rank for w in workers)}"


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
