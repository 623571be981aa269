"""Sentences about workers, causes and stalls, as every command says them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from clusterctl.render.terminal.console import BOLD, RED, safe
from clusterctl.wording import signal_name, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.terminal.console import Terminal
    from clusterctl.run.rules.blame import Cause
    from clusterctl.run.rules.events import Health, StallSeen
    from clusterctl.run.rules.state import StallView, WorkerState


def failure_line(cause: Cause, attempt: int, terminal: Terminal) -> str:
    """Return the first observed failure in one line; says so where another may have come first."""
    word = "first observed failure" if cause.certain else "first observed failure (ambiguous: others overlap in time)"
    place = [f"rank {cause.rank}"] if cause.rank is not None else []
    place += [f"on {safe(cause.node)}"] if cause.node else []
    place += [f"attempt {attempt}"] if attempt > 0 else []
    where = ", ".join(filter(None, [" ".join(place[:2]), *place[2:]]))
    message = f": {safe(cause.message)}" if cause.message and cause.message != how_it_ended(cause) else ""
    parts = [part for part in (where, how_it_ended(cause)) if part]
    return f"{terminal.style(word, RED, BOLD)}: {', '.join(parts)}{message}"


def how_it_ended(cause: Cause) -> str:
    """Return the exit code or the signal's name, in words."""
    if cause.kind == "oom":
        return f"killed by {cause.signal} for lack of memory" if cause.signal else "killed for lack of memory"
    if cause.signal:
        return f"killed by {cause.signal}"
    words = {
        "exited_early": "exit code 0 while the others went on",
        "unknown": "exit status unknown",
        "node_lost": "",
        "start_failed": "did not start",
    }
    if cause.kind in words:
        return words[cause.kind]
    return "exit status unknown" if cause.exit_code is None else f"exit code {cause.exit_code}"


_REMEDIES = {
    "REBOOT_NODE": "reboot the node",
    "RESET_GPU": "reset the GPU",
    "RMA": "replace the GPU",
    "RESTART_FABRICMANAGER": "restart nvidia-imex or the fabric manager",
    "CHECK_POWER_COOLING": "check its power and cooling",
    "FREE_SPACE": "free some space",
    "CONTACT_SUPPORT": "ask your vendor",
}


def health_news(event: Health) -> str:
    """Return what the log view says when trouble of a node begins, and when it is over."""
    word = {"FAIL": "unhealthy", "WARN": "warn"}.get(event.status, "ok")
    return f"{word}: {health_line(event)}"


def health_line(event: Health) -> str:
    """Return the trouble of a node in a line, with what to do about it."""
    remedy = _REMEDIES.get(event.action)
    return f"{safe(event.message)} ({remedy})" if remedy else safe(event.message)


def stall_line(stall: StallView) -> str:
    """Return what the stall rule says: `no progress for 40 s (limit 60 s)`, after `stalled: ` once it is sure."""
    return _stall_text(stall.phase, stall.reason, stall.since_s, stall.limit_s)


def stall_hints(run: str, phase: str) -> list[str]:
    """Return what a person can do about a stall."""
    from clusterctl.run.rules.stalls.rule import HINT

    end = "; `clusterctl down --stalled` ends it" if phase == "confirmed" else ""
    return [f"hint: `clusterctl stacks {run}` shows where every rank is{end}", f"hint: {HINT}"]


def stall_news(event: StallSeen, run: str) -> list[str]:
    """Return what the live view says when the stall rule says something new."""
    if event.phase == "none":
        return ["progress again"]
    text = _stall_text(event.phase, event.reason, event.since_s, event.limit_s)
    where = f"; evidence of every rank is kept in {event.evidence}" if event.evidence else ""
    return [text + where, *(stall_hints(run, event.phase) if event.phase == "confirmed" else [])]


def _stall_text(phase: str, reason: str, since_s: float, limit_s: float) -> str:
    certain = "stalled: " if phase == "confirmed" else ""
    return f"{certain}{safe(reason) or 'no progress'} for {span(since_s)} (limit {span(limit_s)})"


def worker_state(worker: WorkerState) -> str:
    """Return what a worker does, or how it ended, in a few words."""
    if worker.phase.value != "exited":
        return worker.phase.value
    if worker.stopped:
        return "stopped"
    if worker.oom:
        return "killed: out of memory"
    if worker.signal is not None:
        return f"killed by {signal_name(worker.signal)}"
    return "exit unknown" if worker.exit_code is None else f"exit {worker.exit_code}"


def summary(workers: Sequence[WorkerState]) -> str:
    """Return how many workers are in which state: `6 stopped, 2 exit 1`."""
    counted = Counter(worker_state(worker) for worker in workers)
    return ", ".join(f"{number} {text}" for text, number in counted.most_common())
