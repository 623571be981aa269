"""Renders the output of `status`: a run with its origin, its start, its nodes and its workers; as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import (
    describe_duration,
    fold_ranks,
    format_duration,
    group_pairs,
    name_ranks,
    plural,
    signal_name,
)
from clusterctl.render.attempt_table import attempts_json, describe_next_attempt, render_attempts
from clusterctl.render.console import BOLD, DIM, GREEN, RED, YELLOW, Terminal, safe
from clusterctl.render.goodput_text import describe_goodput, goodput_json
from clusterctl.render.line_chart import render_trend
from clusterctl.render.log_output import format_local_time, format_rfc3339
from clusterctl.render.remaining_processes import render_remaining_processes
from clusterctl.render.run_messages import (
    UnattendedRun,
    cause_json,
    describe_worker,
    failure_line,
    format_step,
    health_message,
    idle_line,
    result_messages,
    stall_hints,
    stall_line,
)
from clusterctl.render.table import Cell, make_columns, render_table
from clusterctl.run.rules.even_choice import choose_evenly
from clusterctl.run.rules.goodput import Goodput
from clusterctl.run.rules.outcome import find_final_cause, list_end_warnings
from clusterctl.run.rules.state import RunPhase, RunState, WorkerState

if TYPE_CHECKING:
    from clusterctl.run.record.run_origin import Commit, Origin
    from clusterctl.run.record.start_durations import StartTimes, StepTime

STATE_STYLES: dict[str, tuple[str, ...]] = {
    "starting": (YELLOW,),
    "running": (GREEN,),
    "stalled": (RED, BOLD),
    "restarting": (YELLOW,),
    "stopping": (YELLOW,),
    "succeeded": (GREEN,),
    "failed": (RED,),
    "cancelled": (DIM,),
    "lost": (RED,),
    "unreachable": (RED,),
    "exited": (DIM,),
    "pending": (DIM,),
    "waiting": (DIM,),
}
_MOST_WORKERS = 32
_MOST_NODES = 16
_LOSS_COLUMNS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActivity:
    """The last known activity of a rank. Ages are in seconds; `None` means unknown."""

    step: int | None = None
    last_output_s: float | None = None
    last_progress_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The data about a run that `ps`, `status`, `top` and `report` show.

    Attributes:
        has_controller: Whether the controller of the run is alive.
        activity: The activity of each rank; unknown ranks are missing.
        verdict: The verdict of `why` on a present stall, as JSON; `None` if there is no stall.
        origin: User, command, file and commit of the start; `None` if unknown.
        stall_positions: The positions of the ranks of a stalled run, in a few lines.
        start_durations: The duration of each step of the start; only commands that show the durations read them.
        unattended_run: What happens to the run while no controller is alive.
        goodput: The goodput of the run so far; `None` before its first attempt.
        losses: The losses that the first rank has printed, oldest first; only `status` reads them.
        slow_ranks: Ranks for which the other ranks wait repeatedly, each with the likely reason ("" if unknown).
    """

    state: RunState
    has_controller: bool
    activity: Mapping[int, WorkerActivity] = field(default_factory=dict)
    verdict: Any = None
    origin: Origin | None = None
    stall_positions: Sequence[str] = ()
    start_durations: StartTimes | None = None
    goodput: Goodput | None = None
    losses: Sequence[float] = ()
    slow_ranks: Mapping[int, str] = field(default_factory=dict)
    unattended_run: UnattendedRun = field(default_factory=UnattendedRun)

    @property
    def step(self) -> int | None:
        """The step of the slowest rank."""
        return min((a.step for a in self.activity.values() if a.step is not None), default=None)

    @property
    def last_progress_s(self) -> float | None:
        """The age of the newest progress of all ranks."""
        return min((a.last_progress_s for a in self.activity.values() if a.last_progress_s is not None), default=None)


def activity_from_sample(sample: Mapping[str, Any], age_s: float) -> dict[int, WorkerActivity]:
    """Return the activity of the ranks of a node from its newest sample.

    Args:
        sample: The sample, as the agent wrote it.
        age_s: The age of the sample in seconds.
    """
    out: dict[int, WorkerActivity] = {}
    for rank, looks in (sample.get("ranks") or {}).items():
        inside = looks.get("inside") or {}
        progress = inside.get("progress_age_s")
        out[int(rank)] = WorkerActivity(
            step=inside.get("step"), last_progress_s=None if progress is None else progress + age_s
        )
    return out


def render_status(snapshot: RunSnapshot, now: float, terminal: Terminal, *, all_rows: bool = False) -> list[str]:
    """Return the output of `status`: a line about the run, its problems, its nodes and its workers.

    If there are many workers, workers in the same state share a row; with `all_rows` each worker has a row.
    """
    headline, *wrong = render_run_summary(snapshot, now, terminal)
    origin = render_origin(snapshot.state, snapshot.origin, now, terminal)
    goodput = [f"  {line}" for line in describe_goodput(snapshot.goodput, terminal.glyphs)]
    losses = _describe_losses(snapshot, terminal)
    lines = [headline, *origin, *_describe_pythons(snapshot.state), *goodput, *losses, *wrong]
    if attempts := render_attempts(snapshot.state, snapshot.step, now, terminal):
        lines += ["", *attempts]
    if snapshot.state.nodes:
        lines += [
            "",
            *_node_table(snapshot, terminal, all_rows=all_rows),
            "",
            *_worker_table(snapshot, terminal, all_rows=all_rows),
        ]
    return lines


def _describe_losses(snapshot: RunSnapshot, terminal: Terminal) -> list[str]:
    """Return a line with the first and the last loss, and the curve between them."""
    losses = choose_evenly(snapshot.losses, _LOSS_COLUMNS)
    if len(losses) < 2:
        return []
    low, high = min(losses), max(losses)
    trend = render_trend([loss - low for loss in losses], _LOSS_COLUMNS, terminal.glyphs, high - low)
    arrow, plot = terminal.glyphs.arrow, f"`clusterctl plot {snapshot.state.run}`"
    return [f"  loss {losses[0]:.4g} {arrow} {losses[-1]:.4g} {trend}  {terminal.style(plot, DIM)}"]


def _describe_pythons(state: RunState) -> list[str]:
    """Return a line for each path of the workers' interpreter; the line names the nodes if the paths differ."""
    used = group_pairs(
        (f"{node.python} in {node.image}" if node.image else node.python, node.node)
        for node in state.nodes.values()
        if node.python
    )
    return [
        f"  python {safe(path)}" + (f" on {fold_hosts(nodes)}" if len(used) > 1 else "") for path, nodes in used.items()
    ]


def render_run_summary(snapshot: RunSnapshot, now: float, terminal: Terminal) -> list[str]:
    """Return a line about the run, and the lines about its problems."""
    state = snapshot.state
    lines = [_headline(snapshot, now, terminal)]
    if not snapshot.has_controller and not state.is_over:
        lines.append(f"  no controller is alive; {snapshot.unattended_run.message}")
        lines.append(f"  hint: clusterctl attach --adopt {state.run}")
    if state.phase is RunPhase.WAITING:
        lines += [f"  {safe(text)}" for text in state.waits_for]
    if state.phase is RunPhase.RESTARTING and state.restart_at is not None:
        lines.append(f"  {describe_next_attempt(state, now)}")
    if state.cause is not None:
        lines.append(f"  {failure_line(state.label_cause(state.cause), state.attempt, terminal)}")
    if state.stall is not None:
        hints = [] if state.is_over else stall_hints(state.run, state.stall.phase)
        lines += [
            f"  {line}"
            for line in (stall_line(state.stall), *(f"  {line}" for line in snapshot.stall_positions), *hints)
        ]
    if state.results is not None:
        lines += [f"  {line}" for line in result_messages(state.results)]
    lines += [f"  warn: {safe(text)}" for text in list_end_warnings(state)]
    if not state.is_over:
        lines += [f"  {idle_line(state.idle_since, now)}"] if state.idle_since is not None else []
        lines += [f"  {health_message(event)}" for event in state.troubles.values()]
        lines += [f"  {line}" for line in describe_slow_ranks(state, snapshot.slow_ranks)]
    if state.remaining:
        lines.append("  may still be there:")
        lines += [f"  {line}" for line in render_remaining_processes(state.remaining, terminal)]
        lines.append(f"  hint: clusterctl down {state.run}")
    return lines


def describe_slow_ranks(state: RunState, slow_ranks: Mapping[int, str]) -> list[str]:
    """Return lines about slow ranks; ranks of a node with the same reason share a line."""
    alike = group_pairs(((state.workers[rank].node, reason), rank) for rank, reason in slow_ranks.items())
    return [
        f"slow: {name_ranks(ranks)} on {safe(node)}, for which the others wait"
        + (f": {safe(reason)}" if reason else "")
        for (node, reason), ranks in alike.items()
    ]


def _headline(snapshot: RunSnapshot, now: float, terminal: Terminal) -> str:
    state = snapshot.state
    dot = f" {terminal.glyphs.dot} "
    parts = [terminal.style(state.phase.value, *STATE_STYLES.get(state.phase.value, ()))]
    if state.exit_code is not None:
        parts[0] += f" ({state.exit_code})"
    if state.attempt > 0 and snapshot.step is None:
        parts.append(f"attempt {state.attempt}")
    if state.nodes:
        parts.append(f"{plural(len(state.nodes), 'node')}, {plural(len(state.workers), 'rank')}")
    if snapshot.step is not None:
        parts.append(f"step {format_step(snapshot.step, state.attempt)}")
    if state.created is not None:
        parts.append(f"{format_duration((now if state.ended is None else state.ended) - state.created)}")
    return f"{terminal.style(state.run, BOLD)}  {dot.join(parts)}"


def _node_table(snapshot: RunSnapshot, terminal: Terminal, *, all_rows: bool) -> list[str]:
    """Return a row for each node; if there are many nodes, a row for each state."""
    if len(snapshot.state.nodes) > _MOST_NODES and not all_rows:
        return _folded_nodes(snapshot, terminal)
    nodes = sorted(snapshot.state.nodes.values(), key=lambda n: n.node_rank)
    has_roles = any(node.role for node in nodes)
    columns = make_columns("~NODE", ">NODE RANK", *(["ROLE"] if has_roles else []), "STATE", "RANKS", "~ADDRESS")
    rows: list[list[Cell | str]] = [
        [
            node.node,
            str(node.node_rank),
            *([node.role] if has_roles else []),
            state_cell(snapshot.state.find_node_phase(node.node).value),
            fold_ranks(node.ranks) or "-",
            node.address or "-",
        ]
        for node in nodes
    ]
    return render_table(columns, rows, terminal)


def _folded_nodes(snapshot: RunSnapshot, terminal: Terminal) -> list[str]:
    nodes = sorted(snapshot.state.nodes.values(), key=lambda n: n.node_rank)
    groups = group_pairs((snapshot.state.find_node_phase(node.node).value, node.node) for node in nodes)
    columns = make_columns(">NODES", "STATE", "~NAMES")
    rows: list[list[Cell | str]] = [
        [str(len(names)), state_cell(state), fold_hosts(names)] for state, names in groups.items()
    ]
    return render_table(columns, rows, terminal)


def has_row_per_rank(state: RunState, *, all_rows: bool) -> bool:
    """Return whether the table has a row for each rank, instead of a row for all ranks in the same state."""
    return all_rows or len(state.workers) <= _MOST_WORKERS


def _worker_table(snapshot: RunSnapshot, terminal: Terminal, *, all_rows: bool) -> list[str]:
    """Return a row for each rank; if there are many ranks, a row for each state."""
    workers = [snapshot.state.workers[rank] for rank in sorted(snapshot.state.workers)]
    if not has_row_per_rank(snapshot.state, all_rows=all_rows):
        return _folded_workers(workers, snapshot, terminal)
    columns = make_columns(">RANK", "~NODE", ">LOCAL RANK", ">PID", "STATE", ">STEP", ">OUTPUT")
    rows: list[list[Cell | str]] = []
    for worker in workers:
        activity = snapshot.activity.get(worker.rank, WorkerActivity())
        pid, step = _number(worker.pid), _number(activity.step)
        output = None if snapshot.state.is_over else activity.last_output_s
        ago = "-" if output is None else f"{format_duration(output)} ago"
        rows.append([str(worker.rank), worker.node, str(worker.local_rank), pid, worker_cell(worker), step, ago])
    return render_table(columns, rows, terminal)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _folded_workers(workers: Sequence[WorkerState], snapshot: RunSnapshot, terminal: Terminal) -> list[str]:
    groups = group_pairs((describe_worker(worker), worker) for worker in workers)
    columns = make_columns("~RANKS", "STATE", ">STEP", "~NODES")
    rows: list[list[Cell | str]] = []
    for text, group in groups.items():
        steps = [s for w in group if (s := snapshot.activity.get(w.rank, WorkerActivity()).step) is not None]
        span = "-" if not steps else str(min(steps)) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"
        ranks = fold_ranks(w.rank for w in group)
        rows.append([ranks, Cell(text, _worker_style(group[0])), span, fold_hosts(w.node for w in group)])
    return render_table(columns, rows, terminal)


def worker_cell(worker: WorkerState) -> Cell:
    """Return a cell with the state of a worker, in the colour of the state."""
    return Cell(describe_worker(worker), _worker_style(worker))


def _worker_style(worker: WorkerState) -> tuple[str, ...]:
    if worker.phase.value != "exited":
        return STATE_STYLES.get(worker.phase.value, ())
    return (RED,) if worker.failed else (DIM,)


def state_cell(state: str, word: str | None = None) -> Cell:
    """Return a cell in the colour of a state. The text of the cell is `word`, by default the state."""
    return Cell(word or state, STATE_STYLES.get(state, ()))


def run_json(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the fields that `ps --json` and `status --json` share."""
    state, stall = snapshot.state, snapshot.state.stall
    stall_keys = ("since_s", "limit_s", "phase")
    return {
        "run": state.run,
        "name": state.name,
        "state": state.phase.value,
        "attended": snapshot.has_controller,
        "attempt": state.attempt,
        "exit_code": state.exit_code,
        "cause": cause_json(find_final_cause(state)),
        "idle_since": None if state.idle_since is None else format_rfc3339(state.idle_since),
        "stall": None
        if stall is None
        else {key: getattr(stall, key) for key in stall_keys} | {"verdict": snapshot.verdict},
        "remaining": list(state.remaining),
        "started": time_json(state.created),
        "ended": time_json(state.ended),
    }


def status_json(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the output of `status --json`."""
    state, results = snapshot.state, snapshot.state.results
    health_keys = ("node", "gpu", "check", "status", "message", "action")
    nodes = sorted(state.nodes.values(), key=lambda node: node.node_rank)
    return run_json(snapshot) | {
        "health": [{key: getattr(event, key) for key in health_keys} for event in state.troubles.values()],
        "warnings": list_end_warnings(state),
        "results": None
        if results is None
        else {"to": results.to, "files": results.files, "bytes": results.bytes, "lacking": list(results.missing)},
        "origin": origin_json(snapshot.origin),
        "start": timings_json(snapshot.start_durations),
        "goodput": goodput_json(snapshot.goodput),
        "attempts": attempts_json(state, snapshot.step),
        "nodes": [
            {key: getattr(node, key) for key in ("node", "node_rank", "address")}
            | {
                "python": node.python or None,
                "image": node.image or None,
                "role": node.role or None,
                "state": state.find_node_phase(node.node).value,
            }
            for node in nodes
        ],
        "workers": [_worker_json(state.workers[rank], snapshot) for rank in sorted(state.workers)],
    }


def _worker_json(worker: WorkerState, snapshot: RunSnapshot) -> dict[str, Any]:
    activity = snapshot.activity.get(worker.rank, WorkerActivity())
    return {key: getattr(worker, key) for key in ("rank", "local_rank", "node", "pid")} | {
        "state": worker.phase.value,
        "exit_code": worker.exit_code,
        "signal": None if worker.signal is None else signal_name(worker.signal),
        "stopped": worker.stopped,
        "step": activity.step,
        "last_output_s": round_seconds(activity.last_output_s),
        "slow": snapshot.slow_ranks.get(worker.rank),
    }


def round_seconds(value: float | None) -> float | None:
    """Return seconds, rounded to milliseconds."""
    return None if value is None else round(value, 3)


_SHORT = 10


def render_origin(state: RunState, origin: Origin | None, now: float, terminal: Terminal) -> list[str]:
    """Return lines with user, time, command, file and commit of the start of a run; nothing if they are unknown."""
    if origin is None:
        return []
    dot = f" {terminal.glyphs.dot} "
    began = (
        ""
        if state.created is None
        else f"started {format_local_time(state.created)} ({format_duration(now - state.created)} ago) "
    )
    who = f"by {safe(origin.user)}@{safe(origin.host)}" if origin.user else ""
    ended = "" if state.ended is None else f"ended {format_local_time(state.ended)}"
    commit = "" if origin.commit is None else describe_commit(origin.commit)
    lines = [(f"{began}{who}".strip(), ended), (safe(origin.command),), (safe(origin.file), commit)]
    return [f"  {dot.join(filter(None, parts))}" for parts in lines if any(parts)]


def describe_commit(commit: Commit) -> str:
    """Return a commit as text, such as `commit 3f2a1c07b9 (main) + 2 changes`."""
    branch = f" ({safe(commit.branch)})" if commit.branch else ""
    changes = f" + {plural(commit.changes, 'change')}" if commit.changes else ""
    return f"commit {safe(commit.commit)[:_SHORT]}{branch}{changes}"


def origin_json(origin: Origin | None) -> dict[str, Any] | None:
    """Return the origin of a run as JSON."""
    if origin is None:
        return None
    commit = origin.commit
    return {key: getattr(origin, key) for key in ("user", "host", "file", "folder", "command")} | {
        "commit": None if commit is None else commit.commit,
        "branch": None if commit is None else commit.branch or None,
        "changes": None if commit is None else commit.changes,
    }


def time_json(time: float | None) -> str | None:
    """Return a wall clock time in the format of RFC 3339."""
    return None if time is None else format_rfc3339(time)


SLOW_SECONDS = 60.0
"""The minimum duration in seconds of a start that counts as slow."""


def render_timings(times: StartTimes, terminal: Terminal) -> list[str]:
    """Return the table of `up --timings`."""
    columns = make_columns("STEP", ">ALL", ">MEDIAN", "~SLOWEST")
    rows = [
        [step.name, _seconds(step.seconds), _seconds(median(step.nodes.values())) if step.nodes else "", _slowest(step)]
        for step in times.steps
    ]
    return render_table(columns, [*rows, ["in all", _seconds(times.seconds), "", ""]], terminal)


def describe_slow_start(times: StartTimes | None) -> list[str]:
    """Return a line about a slow start; nothing if the start was not slow."""
    if times is None or times.seconds < SLOW_SECONDS:
        return []
    longest = max(times.steps, key=lambda step: step.seconds)
    slowest = _slowest(longest)
    named = f", slowest {slowest}" if slowest else ""
    total, part = describe_duration(times.seconds), describe_duration(longest.seconds)
    return [f"the start took {total}, {part} of it to {longest.name}{named}"]


def timings_json(times: StartTimes | None) -> dict[str, Any] | None:
    """Return the field `start` of `status --json`."""
    if times is None:
        return None
    steps = [
        {
            "step": step.name,
            "seconds": round(step.seconds, 3),
            "slowest": step.slowest,
            "nodes": dict(step.nodes),
            "longest": {node: {"what": what, "seconds": seconds} for node, (what, seconds) in step.parts.items()},
        }
        for step in times.steps
    ]
    return {"seconds": round(times.seconds, 3), "steps": steps}


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _slowest(step: StepTime) -> str:
    if step.slowest is None:
        return ""
    what, seconds = step.parts.get(step.slowest, ("", 0.0))
    of = f" ({_seconds(seconds)}: {safe(what)})" if what else ""
    return f"{safe(step.slowest)} {_seconds(step.nodes[step.slowest])}{of}"
