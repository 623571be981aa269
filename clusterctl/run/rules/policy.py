"""What the controller does next: go on, stop the attempt, give up a node, restart or finish. Pure.

A controller may stop an attempt although it does not hear from all nodes. It starts a new attempt only after every node
of the old one has reported that its processes are gone, or its fence has expired.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from clusterctl.agent.protocol.record_types import RemainingProcess
from clusterctl.agent.protocol.requests import StopReason
from clusterctl.config.field_types import StallAction
from clusterctl.config.spec import ClusterSpec, HostSpec, RestartSpec
from clusterctl.errors import ExitCode
from clusterctl.formatting import duration_text
from clusterctl.run.rules import outcome
from clusterctl.run.rules.blame import Cause
from clusterctl.run.rules.outcome import determine_outcome
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, StallView, WorkerPhase

LONG_ATTEMPT_S = 600.0
"""Seconds after which an attempt has got somewhere, where no checkpoint pattern could show it."""

_USAGE_EXIT_CODE = 2
"""What argparse ends with."""

_FRAME = re.compile(r'^\s*(?:\[?rank\d+\]?:?)?\s*(File ".*", line \d+.*)$')
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def build_failure_signature(state: RunState, *, checkpoints: bool, now: float) -> str:
    """Return how an attempt ended, in words that are equal for attempts that ended alike.

    Args:
        state: The attempt is over.
        checkpoints: The file says where checkpoints appear, so that progress can be seen by them. Without them, an
            attempt that went on for long is like no other.
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
    error = _traceback_signature(cause.traceback) if cause.traceback else _VARYING.sub("#", cause.message)
    return f"{cause.kind} {cause.exit_code} {cause.signal} {error}"


def _traceback_signature(text: str) -> str:
    """Return the places of a traceback and the type of the exception; its message may differ each time."""
    lines = text.strip().splitlines()
    places = [frame[1] for line in lines if (frame := _FRAME.match(line))]
    return "\n".join([*places, lines[-1].partition(":")[0] if lines else ""])


def list_counted_restarts(state: RunState, rules: RestartSpec, now: float) -> list[float]:
    """Return when the restarts took place that count against `max_restarts`."""
    return [t for t in state.restarts if rules.window is None or now - t < rules.window]


def count_repeated_failures(state: RunState, ending: str) -> int:
    """Return how many attempts before this one ended like it in a row, without a newer checkpoint between."""
    count = 0
    for past in reversed(state.endings):
        if past != (ending, state.newest_checkpoint):
            break
        count += 1
    return count


def describe_repeated_failures(count: int, cause: Cause | None) -> str:
    """Return why no attempt follows so many that ended alike, and what would have spared them.

    That a code is one of usage is no proof by itself: other programs end with it by other faults.
    """
    repeated = f"{count} attempts failed alike, without a newer checkpoint between"
    if cause is None or cause.exit_code != _USAGE_EXIT_CODE:
        return repeated
    return f"{repeated}; if it refuses its arguments, `restart.never_codes: [{_USAGE_EXIT_CODE}]` spares the restarts"


def list_free_spares(spec: ClusterSpec, state: RunState, usable: Collection[str]) -> list[HostSpec]:
    """Return the spares that have not taken part yet and could now, in their order."""
    return [h for h in spec.spares if h.name in usable and h.name not in state.nodes and h.name not in state.retired]


def choose_next_nodes(
    state: RunState, excluded: Mapping[str, str], spares: Collection[HostSpec]
) -> tuple[list[str], list[str]]:
    """Return the nodes of the next attempt in order of node rank, and what to say about those that were replaced.

    Args:
        state: The attempt before.
        excluded: Nodes that must not take part, and why.
        spares: At least as many.
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


FENCE_MARGIN_S = 10.0
"""Seconds added to a fence: the node acts up to this much later than the clock says."""

STOP_MARGIN_S = 30.0
"""Seconds that a node may take beyond the grace for SIGKILL, the sweep, GPU memory and what the kernel needs."""

MAX_DIRTY_S = 30.0
"""Seconds for which nodes may go on to be dirty before a restart is refused for it: they look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allowed. Durations in seconds."""

    grace: float = 10.0
    finish_grace: float = 300.0
    max_duration: float | None = None
    node_lost_after: float = 120.0
    stop_after: float | None = None
    stall_action: StallAction = StallAction.REPORT
    restart: RestartSpec = field(default_factory=RestartSpec)

    @property
    def fence(self) -> float | None:
        """Seconds after the last frame from which a silent node has surely stopped, or `None` where it never does."""
        return None if self.stop_after is None else self.stop_after + self.grace + FENCE_MARGIN_S

    def stopping_stalled(self) -> Limits:
        """Return these limits for a person who wants a stalled run gone: it is stopped and not tried again."""
        return replace(self, stall_action=StallAction.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """What the controller sees that no journal tells.

    Attributes:
        silent: Node to seconds since its last frame; nodes that answer are absent.
        cut: Node to seconds since the last moment at which anything that we sent could have reached it. It is less
            than `silent` where only the way back is broken; fences count from it.
        told: Node to seconds for which it has been connected since it was told to stop.
        killed: Seconds since a person wanted the end at once, or `None`.
        idle: Seconds since any unfinished rank showed activity.
        cancelled: A person asked for the end.
        gathering: Evidence of a stall is on its way, or a new controller has not yet seen for itself that it is one.
        alike: How many attempts in a row before this one failed like it, without a newer checkpoint.
        spares: Hosts that could replace a node now.
        unhealthy: Nodes that a check condemned during the run, and why.
        doubtful: Nodes that may go on, and had better be left out of the next attempt, and why.
        dirty: For how many seconds a node of the attempt has been seen to be dirty.
    """

    silent_s: Mapping[str, float]
    unreachable_s: Mapping[str, float] = field(default_factory=dict)
    stopping_s: Mapping[str, float] = field(default_factory=dict)
    kill_wait_s: float | None = None
    idle_s: float = 0.0
    cancelled: bool = False
    is_gathering_evidence: bool = False
    repeated_failures: int = 0
    spare_count: int = 0
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    degraded: Mapping[str, str] = field(default_factory=dict)
    dirty_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """Stop everything of the attempt, everywhere that can be reached."""

    reason: StopReason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpNode:
    """Count this node as lost."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Begin a new attempt at `at`, without the nodes in `without`."""

    at: float
    why: str
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over; `exit_code` is its own. `why_no_restart` is for people, where the file allows restarts."""

    phase: RunPhase
    exit_code: int
    remaining: tuple[RemainingProcess, ...] = ()
    why_no_restart: str = ""


Action = EndAttempt | GiveUpNode | Restart | Finish


def decide_action(state: RunState, limits: Limits, observations: Observations, now: float) -> Action | None:
    """Return what comes next, or `None` to go on watching.

    Args:
        state: What the journals tell.
        limits: What the user allowed.
        observations: What the controller sees.
        now: The head's clock, the one that stamps the controller's journal.
    """
    if state.over or state.attempt < 0 or state.phase is RunPhase.RESTARTING:
        return None
    if (lost := _find_lost_node(state, limits, observations)) is not None:
        return lost
    if state.reason is None:
        end = _find_end_reason(state, limits, observations, now)
        if end is not None:
            return end
    if not _is_settled(state, limits, observations):
        return None
    return _conclude(state, limits, observations, now)


def _find_end_reason(state: RunState, limits: Limits, observations: Observations, now: float) -> EndAttempt | None:
    if observations.cancelled:
        return EndAttempt(reason=StopReason.CANCELLED)
    lost = [n.node for n in state.nodes.values() if n.link == "lost"]
    if lost:
        return EndAttempt(reason=StopReason.NODE_LOST, message=f"{lost[0]} is lost")
    taken = next((n for n in state.nodes.values() if n.port_conflict is not None), None)
    if taken is not None:
        return EndAttempt(reason=StopReason.PORT_TAKEN, message=f"{taken.node}: {taken.port_conflict}")
    if any(w.failed for w in state.workers.values()):
        return EndAttempt(reason=StopReason.PEER_FAILED)
    fenced = [n for n in state.nodes.values() if n.stop_reason == StopReason.FENCE.value]
    if fenced:
        return EndAttempt(reason=StopReason.FENCE, message=f"{fenced[0].node} heard no controller and stopped")
    if observations.unhealthy and find_restart_obstacle(state, limits, observations, "unhealthy", now) is None:
        return EndAttempt(reason=StopReason.UNHEALTHY, message=_unhealthy_message(observations.unhealthy))
    if limits.max_duration is not None and now - (state.created or now) >= limits.max_duration:
        return EndAttempt(reason=StopReason.TIME_LIMIT, message=f"max_duration of {limits.max_duration:g} s is over")
    if _is_partly_ended(state) and observations.idle_s >= limits.finish_grace:
        return EndAttempt(reason=StopReason.PEER_FAILED, message="a rank ended early and the others stand still")
    if state.phase is not RunPhase.STALLED or state.stall is None or observations.is_gathering_evidence:
        return None
    if limits.stall_action is StallAction.REPORT:
        return None
    return EndAttempt(reason=StopReason.STALLED, message=_stall_message(state.stall, now))


def _unhealthy_message(unhealthy: Mapping[str, str]) -> str:
    return "; ".join(f"{node}: {why}" for node, why in sorted(unhealthy.items()))


def _stall_message(stall: StallView, now: float) -> str:
    # Kept for good: for how long it was when the run was ended, not when the rule changed its mind.
    since, limit = duration_text(stall.at_time(now).since_s), duration_text(stall.limit_s)
    return f"{stall.reason or 'no progress'} for {since} (limit {limit})"


def _is_partly_ended(state: RunState) -> bool:
    """Return whether some ranks have ended well while others are still there."""
    phases = {w.phase for w in state.workers.values()}
    return WorkerPhase.EXITED in phases and WorkerPhase.RUNNING in phases


def _find_lost_node(state: RunState, limits: Limits, observations: Observations) -> GiveUpNode | None:
    """Return a node to give up: silent for too long while another node of the run answers."""
    waiting = [n for n in state.nodes.values() if not n.swept and n.link != "lost"]
    if not waiting:
        return None
    # Where none answers it is our own link, and giving up would be wrong for all; a person's wish to end goes before.
    if all(name in observations.silent_s for name in state.nodes) and not observations.cancelled:
        return None
    for node in waiting:
        silent = observations.silent_s.get(node.node)
        if silent is not None and (silent >= limits.node_lost_after or _is_kill_overdue(observations)):
            return GiveUpNode(node=node.node, why=node.describe_silence(silent))
    return None


def _is_kill_overdue(observations: Observations) -> bool:
    """Return whether a person who wanted the end at once has waited long enough."""
    return observations.kill_wait_s is not None and observations.kill_wait_s >= STOP_MARGIN_S


def _is_settled(state: RunState, limits: Limits, observations: Observations) -> bool:
    """Return whether nothing of the attempt is running any more, as far as it can ever be known."""
    return all(_is_node_settled(state, n, limits, observations) for n in state.nodes.values())


def _is_node_settled(state: RunState, node: NodeState, limits: Limits, observations: Observations) -> bool:
    if node.swept or _is_overdue(state, node, limits, observations):
        return True
    if node.link != "lost":
        return False
    # A fence matters to the attempt that follows; none does where a person wants the end.
    return (
        limits.fence is None or observations.cancelled or observations.unreachable_s.get(node.node, 0.0) >= limits.fence
    )


def _is_overdue(state: RunState, node: NodeState, limits: Limits, observations: Observations) -> bool:
    """Return whether a node that can be reached should have ended all long ago, and does not say that it has."""
    if node.swept or node.link == "lost" or state.reason is None:
        # What it was told of an earlier attempt is none of this one, which nobody stops.
        return False
    return _is_kill_overdue(observations) or observations.stopping_s.get(node.node, 0.0) >= limits.grace + STOP_MARGIN_S


def _conclude(state: RunState, limits: Limits, observations: Observations, now: float) -> Action | None:
    kind = _find_restart_kind(state)
    refusal = "" if kind is None else find_restart_obstacle(state, limits, observations, kind, now)
    if kind is not None and refusal is None:
        pause = _compute_pause_s(state, limits.restart, now)
        return Restart(at=now + pause, why=kind, excluded=tuple(sorted(choose_excluded_nodes(state, observations))))
    if kind is not None and _may_become_clean(state, limits, observations, kind, now):
        return None
    phase, code = determine_outcome(state)
    remaining = outcome.list_remaining_processes(
        state, [n for n in state.nodes.values() if _is_overdue(state, n, limits, observations)]
    )
    return Finish(phase=phase, exit_code=int(code), remaining=remaining, why_no_restart=refusal or "")


def finish_cancelled(state: RunState) -> Finish:
    """Return the end of a run that a person wants between two attempts, when nothing is at work."""
    return Finish(
        phase=RunPhase.CANCELLED, exit_code=int(ExitCode.CANCELLED), remaining=outcome.list_remaining_processes(state)
    )


def _may_become_clean(state: RunState, limits: Limits, observations: Observations, kind: str, now: float) -> bool:
    """Return whether nothing but nodes that have been dirty for a short while keep another attempt from following."""
    if observations.cancelled or observations.dirty_s >= MAX_DIRTY_S:
        return False
    clean = {name: replace(node, remaining=()) for name, node in state.nodes.items()}
    return find_restart_obstacle(replace(state, nodes=clean), limits, observations, kind, now) is None


def _compute_pause_s(state: RunState, rules: RestartSpec, now: float) -> float:
    """Return the seconds to wait: they double with every restart that counts, so a long good time starts anew."""
    number = state.attempt if rules.window is None else len(list_counted_restarts(state, rules, now))
    return float(min(rules.backoff * 2**number, max(rules.backoff_max, rules.backoff)))


def list_unusable_nodes(state: RunState) -> dict[str, str]:
    """Return the nodes that cannot take part in another attempt, and why, in a word."""
    reasons = {n.node: "dirty: processes of the run could not be ended" for n in state.nodes.values() if n.remaining}
    return reasons | {n.node: "lost" for n in state.nodes.values() if n.link == "lost"}


def choose_excluded_nodes(state: RunState, observations: Observations) -> dict[str, str]:
    """Return the nodes that another attempt does without, and why.

    One that is only unhealthy is left out where a spare can take its place: a run with a sick GPU may get further than
    none, and attempts that fail alike end soon.
    """
    bad = list_unusable_nodes(state)
    why = {**observations.degraded, **observations.unhealthy}
    sick = sorted((node not in observations.unhealthy, node) for node in why if node not in bad and node in state.nodes)
    chosen = [node for _, node in sick][: max(0, observations.spare_count - len(bad))]
    return bad | {node: f"unhealthy: {why[node]}" for node in chosen}


def _find_restart_kind(state: RunState) -> str | None:
    """Return the word of `restart.on` under which this end falls, or `None` where it is no reason to try again."""
    if all(w.ended_well for w in state.workers.values()):
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
    state: RunState, limits: Limits, observations: Observations, kind: str, now: float
) -> str | None:
    """Return why no attempt may follow an end of that kind; `None` if one may, "" where nobody expects one."""
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
        return f"{overdue[0]} does not say that all has ended there"
    bad = list_unusable_nodes(state)
    if "lost" in bad.values() and limits.fence is None:
        return "a lost node may still be at work: `on_controller_loss: {stop_after: ...}` would fence it"
    if kind == "unhealthy":
        bad = dict.fromkeys(observations.unhealthy, "unhealthy") | bad
    if len(bad) > observations.spare_count:
        return f"{min(bad)} is {bad[min(bad)]}, and no spare can take its place"
    return None


def limits_from_spec(spec: ClusterSpec) -> Limits:
    """Return what the policy needs of a spec."""
    job = spec.job
    assert job is not None, "a run has a job"
    return Limits(
        grace=job.grace,
        finish_grace=job.finish_grace,
        max_duration=job.max_duration,
        node_lost_after=spec.network.node_lost_after,
        stop_after=spec.stop_after,
        stall_action=spec.stall.action,
        restart=spec.restart,
    )


MAX_STEP_S = 5.0
"""Seconds that count at most between two looks: where this process did not run, nobody was heard."""


class StopTimers:
    """Counts the seconds for which each node that was told has been connected: in those it could act and say so.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._updated_at: float | None = None
        self._kill_at: float | None = None

    def reset(self) -> None:
        """Begin anew: another attempt is to stop."""
        self._seconds.clear()

    def start(self, node: str) -> None:
        """Take note that a node is told to stop; repeating it changes nothing."""
        self._seconds.setdefault(node, 0.0)

    def start_kill(self, now: float) -> None:
        """Take note that a person wants the end at once."""
        self._kill_at = now

    def kill_wait_s(self, now: float) -> float | None:
        """Return the seconds since a person wanted the end at once; `None` where nobody does."""
        return None if self._kill_at is None else now - self._kill_at

    def update(self, connected: Collection[str], now: float) -> dict[str, float]:
        """Return for how long each node has known it, given who is connected and has been since the last look."""
        passed = 0.0 if self._updated_at is None else min(now - self._updated_at, MAX_STEP_S)
        self._updated_at = now
        for node in self._seconds:
            if node in connected:
                self._seconds[node] += passed
        return dict(self._seconds)


MAX_VIOLATIONS = 3
VIOLATION_WINDOW_S = 3600.0


class ViolationCounter:
    """Counts for each node of a run what it said that no node says."""

    def __init__(self) -> None:
        self._moments: dict[str, list[float]] = {}
        self._texts: set[tuple[str, str]] = set()

    def add(self, node: str, now: float) -> bool:
        """Take note of one; return whether the node has used up its chances. `now` is monotonic."""
        moments = [moment for moment in self._moments.get(node, []) if now - moment < VIOLATION_WINDOW_S]
        self._moments[node] = [*moments, now][-MAX_VIOLATIONS:]
        return len(moments) + 1 >= MAX_VIOLATIONS

    def is_new(self, node: str, text: str) -> bool:
        """Return whether this was not said of the node before; what varies in it does not make it so for ever."""
        new = (node, text) not in self._texts and sum(n == node for n, _ in self._texts) < MAX_VIOLATIONS
        if new:
            self._texts.add((node, text))
        return new
