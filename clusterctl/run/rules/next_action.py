"""Decides what the controller does next: continue, stop the attempt, give up a node, restart or finish. Pure.

A controller may stop an attempt although some nodes do not answer. It starts a new attempt only after each node of the
old attempt has reported that all processes have ended, or after the fence of the node has expired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.field_types import IdleAction, StallAction
from clusterctl.config.spec import ClusterSpec, HostSpec, RestartSpec
from clusterctl.errors import ExitCode
from clusterctl.formatting import describe_duration
from clusterctl.run.rules import outcome
from clusterctl.run.rules.failure_causes import Cause
from clusterctl.run.rules.outcome import determine_outcome
from clusterctl.run.rules.self_stop_time import compute_fence_s
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase

LONG_ATTEMPT_S = 600.0
"""Without a checkpoint pattern, an attempt of at least this many seconds counts as progress."""

_USAGE_EXIT_CODE = 2
"""The exit code of argparse for wrong arguments."""

_FRAME = re.compile(r'^\s*(?:\[?rank\d+\]?:?)?\s*(File ".*", line \d+.*)$')
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def build_failure_signature(state: RunState, *, checkpoints: bool, now: float) -> str:
    """Return a text that is equal for attempts that failed in the same way.

    Args:
        state: The state of the run, whose attempt is over.
        checkpoints: Whether the cluster file names the checkpoints. New checkpoints then show progress. Without them, a
            long attempt counts as progress, and its signature differs from all others.
        now: The head's clock.
    """
    began = state.running_since
    if not checkpoints and began is not None and now - began >= LONG_ATTEMPT_S:
        return f"attempt {state.attempt} went on for {now - began:.0f} s"
    cause = state.cause
    if cause is None:
        return state.reason or ""
    if cause.kind == "node_lost":
        return f"{cause.kind} {cause.node}"
    error = _VARYING.sub("#", cause.message)
    if cause.traceback:
        # Use only the frames and the type of the exception, because the message may differ each time.
        lines = cause.traceback.strip().splitlines()
        frames = [frame[1] for line in lines if (frame := _FRAME.match(line))]
        error = "\n".join([*frames, lines[-1].partition(":")[0] if lines else ""])
    return f"{cause.kind} {cause.exit_code} {cause.signal} {error}"


def list_counted_restarts(state: RunState, rules: RestartSpec, now: float) -> list[float]:
    """Return the times of the restarts that count against `max_restarts`."""
    return [t for t in state.restarts if rules.window is None or now - t < rules.window]


def count_repeated_failures(state: RunState, signature: str) -> int:
    """Return how many attempts directly before this attempt failed in the same way, without a newer checkpoint."""
    count = 0
    for past in reversed(state.failure_signatures):
        if past != (signature, state.newest_checkpoint):
            break
        count += 1
    return count


def describe_repeated_failures(count: int, cause: Cause | None) -> str:
    """Return why no attempt follows so many equal failures, and which setting avoids such restarts.

    An exit code of 2 does not prove wrong arguments: some programs use it for other errors.
    """
    repeated = f"{count} attempts failed alike, without a newer checkpoint between"
    if cause is None or cause.exit_code != _USAGE_EXIT_CODE:
        return repeated
    return f"{repeated}; if it rejects its arguments, `restart.never_codes: [{_USAGE_EXIT_CODE}]` avoids the restarts"


def list_free_spares(spec: ClusterSpec, state: RunState, usable: Collection[str]) -> list[HostSpec]:
    """Return the usable spares that no attempt has used yet, in their order."""
    return [
        h for h in spec.spare_hosts if h.name in usable and h.name not in state.nodes and h.name not in state.retired
    ]


def choose_next_nodes(
    state: RunState, excluded: Mapping[str, str], spares: Collection[HostSpec]
) -> tuple[list[str], list[str]]:
    """Return the nodes of the next attempt in order of node rank, and a message for each replaced node.

    Args:
        state: The state after the previous attempt.
        excluded: The nodes that must not take part, and why.
        spares: The free spares, at least one for each excluded node.
    """
    waiting, chosen, replaced = list(spares), [], []
    for node in sorted(state.nodes.values(), key=lambda n: n.node_rank):
        if node.node not in excluded:
            chosen.append(node.node)
            continue
        spare = waiting.pop(0).name
        chosen.append(spare)
        replaced.append(f"{spare} takes the place of {node.node}, which is {excluded[node.node]}")
    return chosen, replaced


STOP_MARGIN_S = 30.0
"""Seconds that a node may need after the grace: for SIGKILL, the sweep, and the release of GPU memory by the kernel."""

MAX_DIRTY_NODE_S = 30.0
"""Seconds to wait until remaining processes on a node have ended. After this time, a restart is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """The limits that the user has set. Durations are in seconds."""

    grace: float = 10.0
    finish_grace: float = 300.0
    max_duration: float | None = None
    node_lost_after: float = 120.0
    stop_after: float | None = None
    stall_action: StallAction = StallAction.REPORT
    max_gpu_idle_s: float | None = None
    restart: RestartSpec = field(default_factory=RestartSpec)

    @property
    def fence(self) -> float | None:
        """Seconds from the controller's last frame until a silent node has stopped its workers; `None` for never."""
        return compute_fence_s(self.stop_after, self.grace)

    def with_stop_on_stall(self) -> RunLimits:
        """Return the limits with which a stall ends the run without a restart."""
        return replace(self, stall_action=StallAction.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservations:
    """Observations of the controller that no journal contains.

    Attributes:
        silent_s: Seconds since the last frame of each silent node. Nodes that answer are absent.
        unreachable_s: For each unreachable node: the seconds since the last time that a frame of the controller may
            have arrived there. The number is less than `silent_s` if the node receives frames but its answers are lost.
            Fences count from this moment.
        stopping_s: For each node: the seconds that it has been connected since its stop request.
        kill_wait_s: Seconds since a person demanded an immediate end, or `None`.
        idle_s: Seconds since an unfinished rank last showed activity.
        gpu_idle_s: Seconds in which no GPU of the run has worked.
        cancelled: A person cancelled the run.
        is_evidence_pending: The evidence of the stall is incomplete, or this controller has not confirmed the stall
            yet.
        repeated_failures: How many attempts directly before this attempt failed in the same way without a new
            checkpoint.
        spare_count: How many hosts could replace a node now.
        unhealthy: Nodes that failed a health check during the run, and why.
        degraded: Nodes that may finish this attempt but should not take part in the next attempt, and why.
        dirty_node_s: Seconds for which a node of the attempt has reported remaining processes.
    """

    silent_s: Mapping[str, float]
    unreachable_s: Mapping[str, float] = field(default_factory=dict)
    stopping_s: Mapping[str, float] = field(default_factory=dict)
    kill_wait_s: float | None = None
    idle_s: float = 0.0
    gpu_idle_s: float = 0.0
    cancelled: bool = False
    is_evidence_pending: bool = False
    repeated_failures: int = 0
    spare_count: int = 0
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    degraded: Mapping[str, str] = field(default_factory=dict)
    dirty_node_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """Stop all processes of the attempt on all nodes that can be reached."""

    reason: StopReason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpNode:
    """Count this node as lost."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Begin a new attempt at the time `at`, without the excluded nodes."""

    at: float
    why: str
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the run with this exit code.

    `why_no_restart` tells people why no restart follows although the cluster file allows restarts.
    """

    phase: RunPhase
    exit_code: int
    remaining: tuple[RemainingProcess, ...] = ()
    why_no_restart: str = ""


Action = EndAttempt | GiveUpNode | Restart | Finish


def decide_action(state: RunState, limits: RunLimits, observations: RunObservations, now: float) -> Action | None:
    """Return the next action, or `None` to continue watching.

    Args:
        state: The state that the journals give.
        limits: The limits that the user has set.
        observations: The observations that no journal contains.
        now: The head's clock, which stamps the controller's journal.
    """
    if state.is_over or state.attempt < 0 or state.phase is RunPhase.RESTARTING:
        return None
    if (lost := _find_lost_node(state, limits, observations)) is not None:
        return lost
    if state.reason is None:
        end = _find_end_reason(state, limits, observations, now)
        if end is not None:
            return end
    if not all(_is_node_settled(state, node, limits, observations) for node in state.nodes.values()):
        return None
    kind = _find_restart_kind(state)
    obstacle = "" if kind is None else find_restart_obstacle(state, limits, observations, kind, now)
    if kind is not None and obstacle is None:
        rules = limits.restart
        # The pause doubles with every counted restart. After a long time without failures, no restart counts.
        count = state.attempt if rules.window is None else len(list_counted_restarts(state, rules, now))
        pause_s = float(min(rules.backoff * 2**count, max(rules.backoff_max, rules.backoff)))
        return Restart(at=now + pause_s, why=kind, excluded=tuple(sorted(choose_excluded_nodes(state, observations))))
    if kind is not None and not observations.cancelled and observations.dirty_node_s < MAX_DIRTY_NODE_S:
        clean = {name: replace(node, remaining=()) for name, node in state.nodes.items()}
        if find_restart_obstacle(replace(state, nodes=clean), limits, observations, kind, now) is None:
            return None  # only nodes that have been dirty for a short while prevent the restart
    phase, code = determine_outcome(state)
    overdue = [node for node in state.nodes.values() if _is_overdue(state, node, limits, observations)]
    remaining = outcome.list_remaining_processes(state, overdue)
    return Finish(phase=phase, exit_code=int(code), remaining=remaining, why_no_restart=obstacle or "")


def _find_end_reason(
    state: RunState, limits: RunLimits, observations: RunObservations, now: float
) -> EndAttempt | None:
    nodes = state.nodes.values()
    if observations.cancelled:
        return EndAttempt(reason=StopReason.CANCELLED)
    if lost := next((node.node for node in nodes if node.link == "lost"), None):
        return EndAttempt(reason=StopReason.NODE_LOST, message=f"{lost} is lost")
    taken = next((node for node in nodes if node.port_conflict is not None), None)
    if taken is not None:
        return EndAttempt(reason=StopReason.PORT_TAKEN, message=f"{taken.node}: {taken.port_conflict}")
    main = state.main_workers
    if len(main) < len(state.workers) and all(w.ended_well for w in main):
        ended, needed = (
            list(dict.fromkeys(node.role for node in nodes if node.is_service is is_service))
            for is_service in (False, True)
        )
        have = "has" if len(ended) == 1 else "have"
        message = f"{', '.join(ended)} {have} ended: stopping {', '.join(needed)}"
        return EndAttempt(reason=StopReason.ROLES_DONE, message=message)
    if any(w.failed for w in state.workers.values()):
        return EndAttempt(reason=StopReason.PEER_FAILED)
    if fenced := next((node.node for node in nodes if node.stop_reason == StopReason.FENCE.value), None):
        return EndAttempt(
            reason=StopReason.FENCE, message=f"{fenced} had no contact with a controller and stopped its workers"
        )
    if observations.unhealthy and find_restart_obstacle(state, limits, observations, "unhealthy", now) is None:
        message = "; ".join(f"{node}: {why}" for node, why in sorted(observations.unhealthy.items()))
        return EndAttempt(reason=StopReason.UNHEALTHY, message=message)
    if limits.max_duration is not None and now - (state.created or now) >= limits.max_duration:
        return EndAttempt(reason=StopReason.TIME_LIMIT, message=f"max_duration of {limits.max_duration:g} s is over")
    if limits.max_gpu_idle_s is not None and observations.gpu_idle_s >= limits.max_gpu_idle_s:
        message = f"no GPU has done anything for {describe_duration(observations.gpu_idle_s)}"
        return EndAttempt(
            reason=StopReason.IDLE, message=f"{message} (idle.after {describe_duration(limits.max_gpu_idle_s)})"
        )
    phases = {w.phase for w in state.workers.values()}
    if {WorkerPhase.EXITED, WorkerPhase.RUNNING} <= phases and observations.idle_s >= limits.finish_grace:
        return EndAttempt(
            reason=StopReason.PEER_FAILED, message="a rank ended early and the other ranks make no progress"
        )
    if state.phase is not RunPhase.STALLED or state.stall is None or observations.is_evidence_pending:
        return None
    if limits.stall_action is StallAction.REPORT:
        return None
    # The journal keeps this message, so the message states how long the stall was when the attempt ended.
    since, limit = (
        describe_duration(state.stall.at_time(now).since_s),
        describe_duration(state.stall.limit_s),
    )
    message = f"{state.stall.reason or 'no progress'} for {since} (limit {limit})"
    return EndAttempt(reason=StopReason.STALLED, message=message)


def _find_lost_node(state: RunState, limits: RunLimits, observations: RunObservations) -> GiveUpNode | None:
    """Return a node to give up, because it has been silent for too long while another node of the run answers."""
    # If no node answers, the head's own network is down. Then no node is given up, except if a person ends the run.
    if all(name in observations.silent_s for name in state.nodes) and not observations.cancelled:
        return None
    for node in state.nodes.values():
        silent_s = observations.silent_s.get(node.node)
        if node.swept or node.link == "lost" or silent_s is None:
            continue
        if silent_s >= limits.node_lost_after or _is_kill_overdue(observations):
            return GiveUpNode(node=node.node, why=node.describe_silence(silent_s))
    return None


def _is_kill_overdue(observations: RunObservations) -> bool:
    """Return whether a person demanded an immediate end, and the time that nodes have for it is over."""
    return observations.kill_wait_s is not None and observations.kill_wait_s >= STOP_MARGIN_S


def _is_node_settled(state: RunState, node: NodeState, limits: RunLimits, observations: RunObservations) -> bool:
    """Return whether all processes of the attempt on a node have ended, as far as the controller can know."""
    if node.swept or _is_overdue(state, node, limits, observations):
        return True
    if node.link != "lost":
        return False
    # A fence protects the next attempt. No attempt follows if a person cancelled the run.
    return (
        limits.fence is None or observations.cancelled or observations.unreachable_s.get(node.node, 0.0) >= limits.fence
    )


def _is_overdue(state: RunState, node: NodeState, limits: RunLimits, observations: RunObservations) -> bool:
    """Return whether a reachable node has not reported the end of all processes in time."""
    if node.swept or node.link == "lost" or state.reason is None:
        # Without a reason the attempt is not stopping, and the times in `stopping_s` are from an earlier attempt.
        return False
    return _is_kill_overdue(observations) or observations.stopping_s.get(node.node, 0.0) >= limits.grace + STOP_MARGIN_S


def finish_cancelled(state: RunState) -> Finish:
    """Return the action that ends a run which a person cancelled between two attempts."""
    return Finish(
        phase=RunPhase.CANCELLED, exit_code=int(ExitCode.CANCELLED), remaining=outcome.list_remaining_processes(state)
    )


def list_unusable_nodes(state: RunState) -> dict[str, str]:
    """Return the nodes that cannot take part in another attempt, each with the reason."""
    reasons = {n.node: "dirty: processes of the run could not be ended" for n in state.nodes.values() if n.remaining}
    return reasons | {n.node: "lost" for n in state.nodes.values() if n.link == "lost"}


def choose_excluded_nodes(state: RunState, observations: RunObservations) -> dict[str, str]:
    """Return the nodes that the next attempt does not use, and why.

    An unhealthy node is excluded only if a spare can replace it. Otherwise the run uses the node again: the next
    attempt may succeed, and repeated failures end the run soon.
    """
    bad = list_unusable_nodes(state)
    why = {**observations.degraded, **observations.unhealthy}
    sick = sorted((node not in observations.unhealthy, node) for node in why if node not in bad and node in state.nodes)
    chosen = [node for _, node in sick][: max(0, observations.spare_count - len(bad))]
    return bad | {node: f"unhealthy: {why[node]}" for node in chosen}


def _find_restart_kind(state: RunState) -> str | None:
    """Return the kind of the attempt's end as a word of `restart.on`, or `None` if such an end allows no restart."""
    if all(w.ended_well for w in state.main_workers):
        return None
    match state.reason:
        case None | StopReason.PEER_FAILED.value | StopReason.PORT_TAKEN.value:
            return "crash"
        case StopReason.STALLED.value:
            return "stall"
        case StopReason.NODE_LOST.value | StopReason.FENCE.value:
            return "node_lost"
        case StopReason.UNHEALTHY.value:
            return "unhealthy"
        case _:
            return None


def find_restart_obstacle(
    state: RunState, limits: RunLimits, observations: RunObservations, kind: str, now: float
) -> str | None:
    """Return why no restart follows this end; "" if the user wants no restart, `None` if nothing prevents one."""
    rules = limits.restart
    if rules.max_restarts == 0 or kind not in rules.on:
        return ""
    if kind == "stall" and limits.stall_action is not StallAction.RESTART:
        return ""
    if len(list_counted_restarts(state, rules, now)) >= rules.max_restarts:
        within = "" if rules.window is None else f" within {rules.window:g} s"
        return f"all {rules.max_restarts} restarts{within} are used up"
    if observations.repeated_failures >= 2:
        return describe_repeated_failures(observations.repeated_failures + 1, state.cause)
    if state.cause is not None and state.cause.exit_code in rules.never_codes:
        return f"exit code {state.cause.exit_code} is one of `restart.never_codes`"
    overdue = [n.node for n in state.nodes.values() if _is_overdue(state, n, limits, observations)]
    if overdue:
        return f"{overdue[0]} has not reported that all processes have ended"
    bad = list_unusable_nodes(state)
    if "lost" in bad.values() and limits.fence is None:
        return "a lost node may still run workers: `on_controller_loss: {stop_after: ...}` would stop them"
    if kind == "unhealthy":
        bad = dict.fromkeys(observations.unhealthy, "unhealthy") | bad
    if len(bad) > observations.spare_count:
        return f"{min(bad)} is {bad[min(bad)]}, and no spare can take its place"
    return None


def build_run_limits(spec: ClusterSpec) -> RunLimits:
    """Return the limits that a cluster file sets."""
    job = spec.job
    assert job is not None, "a run has a job"
    return RunLimits(
        grace=job.grace,
        finish_grace=job.finish_grace,
        max_duration=job.max_duration,
        node_lost_after=spec.network.node_lost_after,
        stop_after=spec.stop_after_controller_loss,
        stall_action=spec.stall.action,
        max_gpu_idle_s=spec.idle.after if spec.idle.action is IdleAction.END else None,
        restart=spec.restart,
    )


MAX_STEP_S = 5.0
"""The most seconds that count between two updates. In a longer gap, this process was suspended and received nothing."""


class StopTimers:
    """Measures for how long each node has been connected since its stop request. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._updated_at: float | None = None
        self._kill_at: float | None = None

    def reset(self) -> None:
        """Remove the timers of all nodes before the next attempt."""
        self._seconds.clear()

    def start(self, node: str) -> None:
        """Start the timer of a node that gets a stop request. A second call changes nothing."""
        self._seconds.setdefault(node, 0.0)

    def start_kill_timer(self, now: float) -> None:
        """Start the timer of an immediate end, which a person demanded."""
        self._kill_at = now

    def measure_kill_wait_s(self, now: float) -> float | None:
        """Return the seconds since a person demanded an immediate end, or `None`."""
        return None if self._kill_at is None else now - self._kill_at

    def update(self, connected: Collection[str], now: float) -> dict[str, float]:
        """Add the time since the last update to the nodes that are connected; return the seconds of each node."""
        passed = 0.0 if self._updated_at is None else min(now - self._updated_at, MAX_STEP_S)
        self._updated_at = now
        for node in self._seconds:
            if node in connected:
                self._seconds[node] += passed
        return dict(self._seconds)


MAX_VIOLATIONS = 3
VIOLATION_WINDOW_S = 3600.0


class ProtocolViolationCounter:
    """Counts the protocol violations of each node of a run."""

    def __init__(self) -> None:
        self._moments: dict[str, list[float]] = {}
        self._texts: set[tuple[str, str]] = set()

    def add_violation(self, node: str, now: float) -> bool:
        """Count a violation; return whether the node has reached the limit. `now` is monotonic."""
        moments = [moment for moment in self._moments.get(node, []) if now - moment < VIOLATION_WINDOW_S]
        self._moments[node] = [*moments, now][-MAX_VIOLATIONS:]
        return len(moments) + 1 >= MAX_VIOLATIONS

    def is_new_message(self, node: str, text: str) -> bool:
        """Return whether a message about a node is new.

        After a few different messages of a node, no further message counts as new.
        """
        new = (node, text) not in self._texts and sum(n == node for n, _ in self._texts) < MAX_VIOLATIONS
        if new:
            self._texts.add((node, text))
        return new
