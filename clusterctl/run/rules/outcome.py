"""Determines how a run ended: its phase, its exit code, its cause, and warnings about remaining processes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from clusterctl.agent.protocol.events import Exited
from clusterctl.agent.protocol.record_types import LeftoverProcess, RemainingProcess
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.errors import ExitCode
from clusterctl.formatting import describe_duration, fold_ranks, group_pairs, name_ranks, plural, signal_name
from clusterctl.run.rules.failure_causes import Cause, describe_leftover_process, is_peer_loss
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState
from clusterctl.why.crash import normalize_message
from clusterctl.why.verdict import shorten


def determine_outcome(state: RunState) -> tuple[RunPhase, ExitCode]:
    """Return the final phase and the exit code of a run whose last attempt is over."""
    match state.reason:
        case StopReason.CANCELLED.value:
            return RunPhase.CANCELLED, ExitCode.CANCELLED
        case StopReason.STALLED.value:
            return RunPhase.FAILED, ExitCode.STALLED
        case StopReason.TIME_LIMIT.value:
            return RunPhase.FAILED, ExitCode.TIME_LIMIT
        case StopReason.IDLE.value:
            return RunPhase.FAILED, ExitCode.IDLE
        case StopReason.NODE_LOST.value:
            return RunPhase.LOST, ExitCode.LOST
        case StopReason.UNHEALTHY.value:
            return RunPhase.FAILED, ExitCode.UNHEALTHY
        case _:
            pass
    if any(n.link == "lost" for n in state.nodes.values()):
        return RunPhase.LOST, ExitCode.LOST
    if state.cause is not None and state.cause.kind == "unknown":
        return RunPhase.LOST, ExitCode.LOST
    done = all(w.ended_well for w in state.main_workers) and not state.has_left_work
    return (RunPhase.SUCCEEDED, ExitCode.OK) if done else (RunPhase.FAILED, ExitCode.FAILED)


_RULE_REASONS = (
    StopReason.STALLED.value,
    StopReason.TIME_LIMIT.value,
    StopReason.IDLE.value,
    StopReason.UNHEALTHY.value,
    StopReason.FENCE.value,
)


def find_final_cause(state: RunState) -> Cause | None:
    """Return the first observed failure of a run, or the rule that ended the run if no rank failed.

    If another process took a port of the run, this is the cause, because ranks can only report that the port was in
    use.
    """
    by_rule = state.cause is None and state.reason in _RULE_REASONS
    if state.reason is not None and (by_rule or state.reason == StopReason.PORT_TAKEN.value):
        return Cause(kind=state.reason, message=state.reason_text, certain=True)
    return state.cause


NODE_LOST = "node lost"
OVERDUE = "its node has not reported its end"


def list_remaining_processes(state: RunState, overdue: Sequence[NodeState] = ()) -> tuple[RemainingProcess, ...]:
    """Return the processes of a run that could not be ended, and the processes that may still run.

    Args:
        state: The state of the run after its last attempt.
        overdue: Connected nodes that have not reported the end of all processes.
    """
    processes: list[RemainingProcess] = []
    # A restart is planned only after the fences of lost nodes have expired (see `next_action`).
    fenced = state.phase is RunPhase.RESTARTING
    for node in (*state.retired.values(), *state.nodes.values()):
        processes += node.remaining
        if node in overdue:
            processes += _list_unconfirmed(state, node, WorkerPhase.RUNNING, OVERDUE) or [
                build_remaining_process(node.node, None, OVERDUE)
            ]
        elif node.node not in state.retired and node.link == "lost" and not (node.swept or fenced):
            processes += _list_unconfirmed(state, node, WorkerPhase.LOST, NODE_LOST) or [
                build_remaining_process(node.node, None, NODE_LOST)
            ]
    return tuple(processes)


def is_teardown_incomplete(state: RunState) -> bool:
    """Return whether exit code 7 (something may still run) replaces the exit code of an ended run."""
    lost = state.phase is RunPhase.LOST
    return any(not lost or item.get("why") != NODE_LOST for item in state.remaining)


def _list_unconfirmed(state: RunState, node: NodeState, phase: WorkerPhase, why: str) -> list[RemainingProcess]:
    """Return the workers of a node that are in this phase. It is unknown whether these workers still run."""
    workers = [state.workers[rank] for rank in node.ranks]
    return [build_remaining_process(node.node, w, why) for w in workers if w.phase is phase and w.pid is not None]


def build_remaining_process(node: str, worker: WorkerState | None, why: str) -> RemainingProcess:
    """Return one item of `RunState.remaining`; pid and start time are `None` if no process is known."""
    pid, start_time = (None, None) if worker is None else (worker.pid, worker.start_time)
    return {"node": node, "pid": pid, "start_time": start_time, "command": None, "why": why}


_MAX_REACTION_S = 600.0
"""A program that still runs this many seconds after a signal ignores the signal. Large checkpoints take less time."""
_MAX_LINES = _MAX_NAMES = 4


def list_end_warnings(state: RunState) -> list[str]:
    """Return warnings about a run that seems to have ended well, one sentence each."""
    nodes, workers = list(state.nodes.values()), state.workers.values()
    ends = [(worker, worker.exited) for worker in workers if worker.ended_well and worker.exited is not None]
    exits = [exited for _, exited in ends]
    lines: list[str] = []
    if len(workers) > 1 and len(exits) == len(workers) and all(exited.worked_alone for exited in exits):
        lines.append(f"the {len(workers)} ranks formed no process group with each other: each worked for itself")
    else:
        for role in group_pairs((node.role, node) for node in nodes).values():
            lines += _warn_of_separate_groups(role, sum(len(node.ranks) for node in role))
    swallowed = {
        w.rank: w.swallowed_exception for w, exited in ends if w.swallowed_exception and exited.failed_child is None
    }
    lines += _group_messages(swallowed, "last output is a traceback: {}", "tracebacks of ranks that ended with 0")
    lines += _warn_of_failed_children(exits)
    shell_errors = {exited.rank: shorten(exited.shell_error) for exited in exits if exited.shell_error}
    lines += _group_messages(
        shell_errors,
        "shell said `{}`: `set -e` ends a script where a command fails",
        "errors of shells below ranks that ended with 0",
    )
    if exits and not state.has_left_work and len(exits) == len(workers) and all(e.lacks_python for e in exits):
        who = "the rank started no" if len(workers) == 1 else f"none of the {len(workers)} ranks started a"
        lines.append(f"{who} Python, though the job names one: nothing was trained")
    failures = {w.rank: shorten(e.output_failure) for w, e in ends if e.output_failure and not w.swallowed_exception}
    lost = {rank: message for rank, message in failures.items() if is_peer_loss(message)}
    own = {rank: message for rank, message in failures.items() if rank not in lost}
    what = "failures in the output of ranks that ended with 0"
    lines += _group_messages(own, f"output says{' first' if lost and own else ''}: {{}}", what)
    lines += _group_messages(lost, f"output says{' that it then lost a peer' if own else ''}: {{}}", what)
    lines += _warn_of_outside_signals(exits)
    lines += [] if state.has_left_work else _warn_of_leftovers(nodes)
    return [*lines, *_warn_of_kills(nodes)]


def _group_messages(messages: Mapping[int, str], text: str, others: str) -> Iterator[str]:
    """Yield one sentence for each group of equal messages of ranks that ended with 0.

    Messages that differ only in numbers are equal.

    Args:
        messages: The message of each rank.
        text: The end of the sentence, after "its" or "their", with `{}` for the message.
        others: The noun for further messages. These messages are counted and not shown.
    """
    by_message: dict[str, list[int]] = {}
    for rank, message in messages.items():
        by_message.setdefault(normalize_message(message), []).append(rank)
    for ranks in list(by_message.values())[:_MAX_LINES]:
        whose = "their" if len(ranks) > 1 else "its"
        yield f"{name_ranks(ranks)} ended with 0, but {whose} {text.format(messages[ranks[0]])}"
    if len(by_message) > _MAX_LINES:
        yield f"and {len(by_message) - _MAX_LINES} other {others}"


def _warn_of_separate_groups(nodes: Sequence[NodeState], world_size: int) -> Iterator[str]:
    """Warn if nodes formed separate process groups: two ranks have one number, or a group is smaller than the run."""
    grouped = [(node.node, *node.group) for node in nodes if node.group is not None]
    ranks = [rank for _, own, _ in grouped for rank in own]
    sizes = {size for _, _, size in grouped}
    if len(set(ranks)) == len(ranks) and len(sizes) <= 1 and min(sizes, default=world_size) >= world_size:
        return
    names = [f"of {name}" for name, _, _ in grouped[:_MAX_NAMES]]
    more = f" and {plural(len(grouped) - _MAX_NAMES, 'more node')}" if len(grouped) > _MAX_NAMES else ""
    whose = " and ".join(names) if not more else ", ".join(names) + more
    count = {1: "", 2: ", twice"}.get(len(grouped), f", {len(grouped)} times")
    size = f"world {min(sizes)}{count}" if len(sizes) == 1 else f"worlds of {min(sizes)} to {max(sizes)}"
    yield f"ranks {whose} formed {'a group' if len(grouped) == 1 else 'groups'} of their own ({size})"


def _warn_of_outside_signals(exits: Iterable[Exited]) -> Iterator[str]:
    """Warn of ranks that ended with 0 after a signal from outside clusterctl. Their work may be unfinished."""
    by_signal: dict[str, dict[int, float]] = {}
    for exited in exits:
        received = exited.outside_signal
        if received is not None and received["before_s"] <= _MAX_REACTION_S:
            by_signal.setdefault(signal_name(received["signal"]), {})[exited.rank] = max(received["before_s"], 1.0)
    for name, times in by_signal.items():
        they, time = "they" if len(times) > 1 else "it", describe_duration(max(times.values()))
        yield f"{name_ranks(times)} received {name} from outside clusterctl {time} before {they} ended with 0"


def _warn_of_failed_children(exits: Iterable[Exited]) -> Iterator[str]:
    """Warn of child processes that failed although their rank ended with 0.

    The warnings about child processes that lost a peer come last.
    """
    by_message: dict[str, list[tuple[int, int, str]]] = {}
    for exited in exits:
        if exited.failed_child is not None:
            pid, message = exited.failed_child["pid"], exited.failed_child["message"]
            by_message.setdefault(normalize_message(message), []).append((exited.rank, pid, message))
    groups = sorted(by_message.values(), key=lambda group: is_peer_loss(group[0][2]))
    for group in groups[:_MAX_LINES]:
        rank, pid, message = group[0]
        if message.startswith("future: "):
            whose = "their futures, which" if len(group) > 1 else "its future, which"
            error = shorten(message.removeprefix("future: "))
            names = name_ranks(each[0] for each in group)
            yield f"{names} ended with 0, but nothing read the result of {whose} raised {error}"
            continue
        preposition = "with" if message.startswith("exit code ") else "by"
        how = f"ended {preposition} {shorten(message.splitlines()[0])}"
        if len(group) == 1:
            yield f"rank {rank}: its child process {pid} {how}, and the rank ended with 0"
        else:
            yield f"ranks {fold_ranks(each[0] for each in group)}: their child processes {how}, and they ended with 0"
    if len(groups) > _MAX_LINES:
        yield f"and {len(groups) - _MAX_LINES} other failures of child processes"


def _warn_of_leftovers(nodes: Iterable[NodeState]) -> Iterator[str]:
    by_command: dict[str, list[tuple[str, LeftoverProcess]]] = {}
    for node in nodes:
        for one in node.leftovers:
            by_command.setdefault(one["command"], []).append((node.node, one))
    for processes in list(by_command.values())[:_MAX_LINES]:
        yield (
            f"{_name_ranks(processes)} ended with 0 and left {describe_leftover_process(processes[0][1])} at work, "
            "which was ended"
        )
    if len(by_command) > _MAX_LINES:
        yield f"and {len(by_command) - _MAX_LINES} other commands were left at work"


def _warn_of_kills(nodes: Iterable[NodeState]) -> Iterator[str]:
    processes = [(node, one) for node in nodes for one in node.past_grace]
    if processes:
        more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
        what = f"{describe_leftover_process(processes[0][1])}{more}"
        whose = _name_ranks([(node.label, one) for node, one in processes])
        grace = describe_duration(processes[0][0].grace_s)
        yield (
            f"{whose}: {what} had not ended {grace} after the stop signal (`job.grace`) and "
            f"{'was' if len(processes) == 1 else 'were'} killed: what was being saved may be incomplete"
        )


def _name_ranks(processes: list[tuple[str, LeftoverProcess]]) -> str:
    ranks = {one["rank"] for _, one in processes if one["rank"] is not None}
    names = sorted({node for node, _ in processes})
    where = names[0] if len(names) == 1 else plural(len(names), "node")
    return f"{name_ranks(ranks)} on {where}" if ranks else f"a rank on {where}"
