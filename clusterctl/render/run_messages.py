"""Sentences about workers, causes, stalls and steps of a run, which all commands share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import describe_duration, fold_ranks, format_size, plural, signal_name
from clusterctl.render.console import BOLD, RED, Terminal, safe
from clusterctl.run.rules.controller_events import (
    AttemptEndDecided,
    HealthChanged,
    LinkChanged,
    ResultsFetched,
    StallChanged,
)
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, StallState, WorkerState

_DECLARATION_HINT = (
    "work of one rank alone looks like a stall from outside; declare it by"
    ' `with clusterctl.phase("checkpoint", limit="15m")`, `clusterctl.progress()`, or its files under `stall.watch`'
)


def failure_line(cause: Cause, attempt: int, terminal: Terminal) -> str:
    """Return the first observed failure in one line, with a note if another failure may have come first."""
    is_clear = cause.certain or cause.kind == "stopped"
    word = "first observed failure" if is_clear else "first observed failure (ambiguous: others overlap in time)"
    place = [f"rank {cause.rank}"] if cause.rank is not None else []
    place += [f"on {safe(cause.node)}"] if cause.node else []
    place += [f"attempt {attempt}"] if attempt > 0 else []
    where = ", ".join(filter(None, [" ".join(place[:2]), *place[2:]]))
    message = f": {safe(cause.message)}" if cause.message and cause.message != describe_exit(cause) else ""
    parts = [part for part in (where, describe_exit(cause) + _by_whom(cause)) if part]
    return f"{terminal.style(word, RED, BOLD)}: {', '.join(parts)}{message}"


def _by_whom(cause: Cause) -> str:
    """Return the known facts about an unexplained SIGKILL; "" for any other cause."""
    unexplained = cause.kind == "signal" and cause.signal == "SIGKILL"
    return " (not by clusterctl, no OOM kill in the kernel log)" if unexplained else ""


def shared_failure_line(
    cause: Cause, ranks: Sequence[int], nodes: Sequence[str], attempt: int, terminal: Terminal
) -> str:
    """Return the first observed failure of several ranks: `ranks 0-1,3 on gpu[01-03] failed alike`."""
    place = f"ranks {fold_ranks(ranks)} on {fold_hosts(nodes)} failed alike"
    which = f", attempt {attempt}" if attempt > 0 else ""
    said = f": {safe(cause.message)}" if cause.message != describe_exit(cause) else ""
    how = describe_exit(cause) + _by_whom(cause)
    return f"{terminal.style('first observed failure', RED, BOLD)}: {place}{which}, {how}{said}"


def cause_json(cause: Cause | None) -> dict[str, Any] | None:
    """Return the first observed failure as JSON."""
    if cause is None:
        return None
    keys = ("kind", "node", "rank", "exit_code", "signal", "message", "traceback", "certain")
    return {key: getattr(cause, key) for key in keys}


def describe_exit(cause: Cause) -> str:
    """Return the exit code or the signal's name, in words."""
    if cause.kind == "oom":
        return f"killed by {cause.signal} for lack of memory" if cause.signal else "killed for lack of memory"
    if cause.signal:
        return f"killed by {cause.signal}"
    words = {
        "exited_early": "exit code 0 while the others went on",
        "failed_inside": "its Python failed, although its command ended with 0",
        "stopped": "stopped by clusterctl before it ended by itself",
        "left_work": "ended with 0 within seconds, before its work was done",
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


def health_message(event: HealthChanged) -> str:
    """Return the line of the log view for the start or the end of a health problem of a node."""
    word = {"FAIL": "unhealthy", "WARN": "warn"}.get(event.status, "ok")
    remedy = _REMEDIES.get(event.action)
    return f"{word}: {safe(event.message)}" + (f" ({remedy})" if remedy else "")


def idle_line(idle_since: float, now: float) -> str:
    """Return the line about a run whose GPUs are idle. Times are on the head's wall clock."""
    return f"idle: no GPU of the run has done anything for {describe_duration(now - idle_since)}"


def stall_line(stall: StallState) -> str:
    """Return the state of a stall: `no progress for 40 s (limit 60 s)`; a confirmed stall begins with `stalled: `."""
    return _stall_text(stall.phase, stall.reason, stall.since_s, stall.limit_s)


def stall_hints(run: str, phase: str) -> list[str]:
    """Return hints about a stall; `phase` is `suspected` or `confirmed`."""
    end = "; `clusterctl down --stalled` ends it" if phase == "confirmed" else ""
    return [f"hint: `clusterctl stacks {run}` shows where every rank is{end}", f"hint: {_DECLARATION_HINT}"]


def stall_messages(event: StallChanged, run: str) -> list[str]:
    """Return the lines of the live view for a change of the stall state."""
    if event.phase == "none":
        return ["progress again"]
    text = _stall_text(event.phase, event.reason, event.since_s, event.limit_s)
    where = f"; the stacks of all ranks are stored, and `clusterctl why {run}` explains them" if event.evidence else ""
    return [text + where, *(stall_hints(run, event.phase) if event.phase == "confirmed" else [])]


def _stall_text(phase: str, reason: str, since_s: float, limit_s: float) -> str:
    text = f"{safe(reason) or 'no progress'} for {describe_duration(since_s)} (limit {describe_duration(limit_s)})"
    return f"stalled: {text}" if phase == "confirmed" else text


def describe_worker(worker: WorkerState) -> str:
    """Return the state of a worker, or its end, in a few words."""
    if worker.phase.value != "exited":
        return worker.phase.value
    if worker.stopped:
        return "stopped"
    if worker.exited is not None and worker.exited.oom:
        return "killed: out of memory"
    if worker.signal is not None:
        return f"killed by {signal_name(worker.signal)}"
    if worker.has_failed_inside:
        return "exit 0, its Python failed"
    return "exit unknown" if worker.exit_code is None else f"exit {worker.exit_code}"


def count_worker_states(workers: Sequence[WorkerState]) -> str:
    """Return the number of workers by state: `6 stopped, 2 exit 1`."""
    counted = Counter(describe_worker(worker) for worker in workers)
    return ", ".join(f"{number} {text}" for text, number in counted.most_common())


# --- events of a run in the live view

_DECISIONS = {
    StopReason.PEER_FAILED.value: "a worker failed: stopping the others",
    StopReason.CANCELLED.value: "stopping every worker",
    StopReason.STALLED.value: "stalled: stopping every worker",
    StopReason.TIME_LIMIT.value: "time limit reached: stopping every worker",
    StopReason.IDLE.value: "idle GPUs: stopping every worker",
    StopReason.NODE_LOST.value: "a node is lost: stopping the other workers",
    StopReason.UNHEALTHY.value: "a node is unhealthy: stopping every worker",
    StopReason.PORT_TAKEN.value: "a port of the run is taken: stopping every worker",
    StopReason.START_FAILED.value: "the start failed: stopping what had started",
}


def format_decision(event: AttemptEndDecided, state: RunState) -> str:
    """Return the decision of the controller and its reason, with the failed worker of the current attempt."""
    if event.reason == StopReason.ROLES_DONE.value:
        return event.message
    text = _DECISIONS.get(event.reason, f"{event.reason}: stopping every worker")
    if event.reason == StopReason.PEER_FAILED.value and len(state.workers) == 1:
        text = "the worker failed"
    cause = state.cause if event.attempt == state.attempt else None
    if event.reason == StopReason.PEER_FAILED.value and not event.message and cause is not None:
        where = "" if cause.node is None else state.describe_node(cause.node)
        return f"{text} (rank {cause.rank} on {safe(where)}: {describe_exit(cause)})"
    return f"{text} ({event.message})" if event.message else text


def unreachable_message(event: LinkChanged) -> str:
    """Return a sentence about a silent node: when it counts as lost, and what its workers do until then."""
    node = NodeState(node=event.node, node_rank=0, link_why=event.why)
    parts = [f"{event.node}: {node.describe_silence(event.seconds)}"]
    if event.lost_in is not None:
        parts.append(f"given up in {describe_duration(event.lost_in)} (network.node_lost_after)")
    if event.stop_in is None:
        parts.append("its workers go on")
    else:
        parts.append(
            f"its workers are stopped there in {describe_duration(event.stop_in)} (on_controller_loss.stop_after)"
        )
    return "; ".join(parts)


EVENTS_WITHOUT_MESSAGE = (
    node_events.Prepared,
    node_events.Started,
    node_events.Exited,
    node_events.GroupJoined,
    node_events.Swept,
)
"""The most frequent events of nodes, for which `node_event_messages` returns nothing."""


def node_event_messages(node: str, stamp: node_events.Stamp, event: node_events.Event, state: RunState) -> list[str]:
    """Return the lines for a node's event in the default view; most events have no line."""
    match event:
        case node_events.Alarm():
            where = f"{node} GPU {event.gpu}" if event.gpu is not None else node
            return [f"{event.severity}: {where}: {event.message}"]
        case node_events.OutputDropped() if event.lost:
            return [f"warning: {node} r{event.rank}: {event.lost} bytes of output were dropped ({event.why})"]
        case node_events.RunAdopted():
            return [f"{node}: {_adoption(node, stamp, state)}"]
        case _:
            return []


def _adoption(node: str, stamp: node_events.Stamp, state: RunState) -> str:
    """Return a sentence about a new supervisor of a node. If the node was rebooted, its workers have ended."""
    last_boot = state.nodes[node].boot if node in state.nodes else ""
    if last_boot and stamp.boot != last_boot:
        return "the machine has rebooted, and its workers are gone"
    return "a new supervisor has started; the workers were not affected"


def format_step(step: int, attempt: int) -> str:
    """Return a step as `120` or `120 (attempt 2)`: clusterctl counts the steps of each attempt from 0."""
    return str(step) if attempt <= 0 else f"{step} (attempt {attempt})"


def verbose_node_event_message(event: node_events.Event) -> str:
    """Return the sentence for a node's event in the verbose view; "" for events without a sentence."""
    match event:
        case node_events.Prepared():
            return f"ready for attempt {event.attempt}"
        case node_events.Started():
            return f"r{event.rank} started, pid {event.pid}"
        case node_events.Exited():
            how = "ended, exit code unknown" if event.exit_code is None else f"ended with exit code {event.exit_code}"
            how = how if event.signal is None else f"ended by {signal_name(event.signal)}"
            inside = ", its Python failed" if event.exit_code == 0 and event.error is not None else ""
            return f"r{event.rank} {how}{inside}" + (", stopped" if event.stopped else "")
        case node_events.Stopping():
            return f"stop signal to all of attempt {event.attempt}, {event.grace:g} s grace"
        case node_events.Swept():
            left = (
                f"{plural(len(event.remaining), 'process', 'processes')} could not be ended"
                if event.remaining
                else "nothing is left"
            )
            return f"{left} of attempt {event.attempt}" + (f", {event.killed} killed" if event.killed else "")
        case _:
            return ""


def result_messages(results: ResultsFetched) -> list[str]:
    """Return the lines about fetched results: the folder, and warnings about missing results."""
    came = f"results: {plural(results.files, 'file')}, {format_size(results.bytes)} in {safe(results.to)}"
    return [*([came] if results.files else []), *(f"warn: results: {safe(text)}" for text in results.missing)]


class UnattendedOutlook(Enum):
    """Texts about what happens to a run without a controller: a sentence, and a few words for a column."""

    GOES_ON = ("the run goes on", "unattended")
    WILL_STOP = ("its nodes stop the workers in {pause} unless it is adopted", "unattended: stops in {pause}")
    STOPPING = ("its nodes stop the workers now{rule}", "unattended: stops now")
    STOPPED = ("its nodes have stopped the workers by now{rule}", "unattended: stopped")
    WAITS = ("no worker runs until it is adopted", "unattended: waits")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnattendedRun:
    """A run without a controller.

    Attributes:
        outlook: What the nodes do with the workers.
        stop_in_s: Seconds until the nodes stop the workers; 0 if they do not.
        stop_after_s: `on_controller_loss.stop_after`; `None` if the nodes keep the workers.
    """

    outlook: UnattendedOutlook = UnattendedOutlook.GOES_ON
    stop_in_s: float = 0.0
    stop_after_s: float | None = None

    @property
    def message(self) -> str:
        """The sentence that follows `no controller is alive; `."""
        return self._fill_in(self.outlook.value[0])

    @property
    def short_text(self) -> str:
        """A few words, for a table, on what happens to the run."""
        return self._fill_in(self.outlook.value[1])

    def _fill_in(self, template: str) -> str:
        after = self.stop_after_s
        rule = "" if after is None else f" (on_controller_loss.stop_after {describe_duration(after)})"
        return template.format(pause=describe_duration(self.stop_in_s), rule=rule)

    def describe_error(self, run: str) -> str:
        """Return the error message of a command that follows a run and finds no controller."""
        if self.outlook is UnattendedOutlook.GOES_ON:
            return f"{run} goes on without a controller"
        return f"{run} has no controller: {self.message}"


def predict_unattended(
    phase: RunPhase, silent_s: float, stop_after_s: float | None, fence_s: float | None
) -> UnattendedRun:
    """Return what happens to a run without a controller.

    Args:
        phase: The phase of the run when its controller last wrote.
        silent_s: Seconds since the last sign of the controller.
        stop_after_s: Seconds after which the nodes stop the workers; `None` if they do not stop them.
        fence_s: Seconds after which the nodes have certainly stopped the workers (`RunLimits.fence`).
    """
    if phase is RunPhase.RESTARTING:
        return UnattendedRun(outlook=UnattendedOutlook.WAITS)
    if stop_after_s is None or fence_s is None:
        return UnattendedRun()
    # The controller's last sign is in the future if the head's clock was set back.
    left = stop_after_s - max(0.0, silent_s)
    if left > 0:
        return UnattendedRun(outlook=UnattendedOutlook.WILL_STOP, stop_in_s=left, stop_after_s=stop_after_s)
    outlook = UnattendedOutlook.STOPPED if silent_s >= fence_s else UnattendedOutlook.STOPPING
    return UnattendedRun(outlook=outlook, stop_after_s=stop_after_s)
