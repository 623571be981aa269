"""What to do next with a run: a pure function of what is known and of the time. It performs nothing.

A controller may stop with partial sight; it starts a new attempt only when every node of the old one has reported swept
or its fence has expired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.requests import StopReason
from clusterctl.config.kinds import StallAction
from clusterctl.config.spec import RestartSpec
from clusterctl.errors import ExitCode
from clusterctl.formatting import duration_text
from clusterctl.run.rules import leftover
from clusterctl.run.rules.outcome import outcome
from clusterctl.run.rules.restarting import recent, why_enough
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, StallView, WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.protocol.process_types import RemainingProcess
    from clusterctl.config.spec import ClusterSpec

FENCE_MARGIN = 10.0
"""Seconds added to a fence: the node acts up to this much later than the clock says."""

STOPPING_MARGIN = 30.0
"""Seconds that a node may take beyond the grace for SIGKILL, the sweep, GPU memory and what the kernel needs."""

DIRTY_PATIENCE = 30.0
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
        return None if self.stop_after is None else self.stop_after + self.grace + FENCE_MARGIN

    def stopping_stalled(self) -> Limits:
        """Return these limits for a person who wants a stalled run gone: it is stopped and not tried again."""
        return replace(self, stall_action=StallAction.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
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

    silent: Mapping[str, float]
    cut: Mapping[str, float] = field(default_factory=dict)
    told: Mapping[str, float] = field(default_factory=dict)
    killed: float | None = None
    idle: float = 0.0
    cancelled: bool = False
    gathering: bool = False
    alike: int = 0
    spares: int = 0
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    doubtful: Mapping[str, str] = field(default_factory=dict)
    dirty: float = math.inf


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
    without: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over; `exit_code` is its own. `why_no_restart` is for people, where the file allows restarts."""

    phase: RunPhase
    exit_code: int
    remaining: tuple[RemainingProcess, ...] = ()
    why_no_restart: str = ""


Action = EndAttempt | GiveUpNode | Restart | Finish


def decide(state: RunState, limits: Limits, sight: Sight, now: float) -> Action | None:
    """Return what comes next, or `None` to go on watching.

    Args:
        state: What the journals tell.
        limits: What the user allowed.
        sight: What the controller sees.
        now: The head's clock, the one that stamps the controller's journal.
    """
    if state.over or state.attempt < 0 or state.phase is RunPhase.RESTARTING:
        return None
    if (lost := _newly_lost(state, limits, sight)) is not None:
        return lost
    if state.reason is None:
        end = _reason_to_end(state, limits, sight, now)
        if end is not None:
            return end
    if not _settled(state, limits, sight):
        return None
    return _conclude(state, limits, sight, now)


def _reason_to_end(state: RunState, limits: Limits, sight: Sight, now: float) -> EndAttempt | None:
    if sight.cancelled:
        return EndAttempt(reason=StopReason.CANCELLED)
    lost = [n.node for n in state.nodes.values() if n.link == "lost"]
    if lost:
        return EndAttempt(reason=StopReason.NODE_LOST, message=f"{lost[0]} is lost")
    taken = next((n for n in state.nodes.values() if n.intruder is not None), None)
    if taken is not None:
        return EndAttempt(reason=StopReason.PORT_TAKEN, message=f"{taken.node}: {taken.intruder}")
    if any(w.failed for w in state.workers.values()):
        return EndAttempt(reason=StopReason.PEER_FAILED)
    fenced = [n for n in state.nodes.values() if n.stop_reason == StopReason.FENCE.value]
    if fenced:
        return EndAttempt(reason=StopReason.FENCE, message=f"{fenced[0].node} heard no controller and stopped")
    if sight.unhealthy and why_not_again(state, limits, sight, "unhealthy", now) is None:
        return EndAttempt(reason=StopReason.UNHEALTHY, message=_unhealthy_message(sight.unhealthy))
    if limits.max_duration is not None and now - (state.created or now) >= limits.max_duration:
        return EndAttempt(reason=StopReason.TIME_LIMIT, message=f"max_duration of {limits.max_duration:g} s is over")
    if _left_alone(state) and sight.idle >= limits.finish_grace:
        return EndAttempt(reason=StopReason.PEER_FAILED, message="a rank ended early and the others stand still")
    if state.phase is not RunPhase.STALLED or state.stall is None or sight.gathering:
        return None
    if limits.stall_action is StallAction.REPORT:
        return None
    return EndAttempt(reason=StopReason.STALLED, message=_stall_message(state.stall, now))


def _unhealthy_message(unhealthy: Mapping[str, str]) -> str:
    return "; ".join(f"{node}: {why}" for node, why in sorted(unhealthy.items()))


def _stall_message(stall: StallView, now: float) -> str:
    # Kept for good: for how long it was when the run was ended, not when the rule changed its mind.
    since, limit = duration_text(stall.grown(now).since_s), duration_text(stall.limit_s)
    return f"{stall.reason or 'no progress'} for {since} (limit {limit})"


def _left_alone(state: RunState) -> bool:
    """Return whether some ranks have ended well while others are still there."""
    phases = {w.phase for w in state.workers.values()}
    return WorkerPhase.EXITED in phases and WorkerPhase.RUNNING in phases


def _newly_lost(state: RunState, limits: Limits, sight: Sight) -> GiveUpNode | None:
    """Return a node to give up: silent for too long while another node of the run answers."""
    waiting = [n for n in state.nodes.values() if not n.swept and n.link != "lost"]
    if not waiting:
        return None
    # Where none answers it is our own link, and giving up would be wrong for all; a person's wish to end goes before.
    if all(name in sight.silent for name in state.nodes) and not sight.cancelled:
        return None
    for node in waiting:
        silent = sight.silent.get(node.node)
        if silent is not None and (silent >= limits.node_lost_after or _past_kill(sight)):
            return GiveUpNode(node=node.node, why=node.unheard(silent))
    return None


def _past_kill(sight: Sight) -> bool:
    """Return whether a person who wanted the end at once has waited long enough."""
    return sight.killed is not None and sight.killed >= STOPPING_MARGIN


def _settled(state: RunState, limits: Limits, sight: Sight) -> bool:
    """Return whether nothing of the attempt is running any more, as far as it can ever be known."""
    return all(_node_settled(state, n, limits, sight) for n in state.nodes.values())


def _node_settled(state: RunState, node: NodeState, limits: Limits, sight: Sight) -> bool:
    if node.swept or _overdue(state, node, limits, sight):
        return True
    if node.link != "lost":
        return False
    # A fence matters to the attempt that follows; none does where a person wants the end.
    return limits.fence is None or sight.cancelled or sight.cut.get(node.node, 0.0) >= limits.fence


def _overdue(state: RunState, node: NodeState, limits: Limits, sight: Sight) -> bool:
    """Return whether a node that can be reached should have ended all long ago, and does not say that it has."""
    if node.swept or node.link == "lost" or state.reason is None:
        # What it was told of an earlier attempt is none of this one, which nobody stops.
        return False
    return _past_kill(sight) or sight.told.get(node.node, 0.0) >= limits.grace + STOPPING_MARGIN


def _conclude(state: RunState, limits: Limits, sight: Sight, now: float) -> Action | None:
    kind = _restart_kind(state)
    refusal = "" if kind is None else why_not_again(state, limits, sight, kind, now)
    if kind is not None and refusal is None:
        pause = _pause(state, limits.restart, now)
        return Restart(at=now + pause, why=kind, without=tuple(sorted(left_out(state, sight))))
    if kind is not None and _may_come_clean(state, limits, sight, kind, now):
        return None
    phase, code = outcome(state)
    left = leftover.remaining(state, [n for n in state.nodes.values() if _overdue(state, n, limits, sight)])
    return Finish(phase=phase, exit_code=int(code), remaining=left, why_no_restart=refusal or "")


def cancelled(state: RunState) -> Finish:
    """Return the end of a run that a person wants between two attempts, when nothing is at work."""
    return Finish(phase=RunPhase.CANCELLED, exit_code=int(ExitCode.CANCELLED), remaining=leftover.remaining(state))


def _may_come_clean(state: RunState, limits: Limits, sight: Sight, kind: str, now: float) -> bool:
    """Return whether nothing but nodes that have been dirty for a short while keep another attempt from following."""
    if sight.cancelled or sight.dirty >= DIRTY_PATIENCE:
        return False
    clean = {name: replace(node, remaining=()) for name, node in state.nodes.items()}
    return why_not_again(replace(state, nodes=clean), limits, sight, kind, now) is None


def _pause(state: RunState, rules: RestartSpec, now: float) -> float:
    """Return the seconds to wait: they double with every restart that counts, so a long good time starts anew."""
    number = state.attempt if rules.window is None else len(recent(state, rules, now))
    return float(min(rules.backoff * 2**number, max(rules.backoff_max, rules.backoff)))


def unusable(state: RunState) -> dict[str, str]:
    """Return the nodes that cannot take part in another attempt, and why, in a word."""
    reasons = {n.node: "dirty: processes of the run could not be ended" for n in state.nodes.values() if n.remaining}
    return reasons | {n.node: "lost" for n in state.nodes.values() if n.link == "lost"}


def left_out(state: RunState, sight: Sight) -> dict[str, str]:
    """Return the nodes that another attempt does without, and why.

    One that is only unhealthy is left out where a spare can take its place: a run with a sick GPU may get further than
    none, and attempts that fail alike end soon.
    """
    bad = unusable(state)
    why = {**sight.doubtful, **sight.unhealthy}
    sick = sorted((node not in sight.unhealthy, node) for node in why if node not in bad and node in state.nodes)
    chosen = [node for _, node in sick][: max(0, sight.spares - len(bad))]
    return bad | {node: f"unhealthy: {why[node]}" for node in chosen}


def _restart_kind(state: RunState) -> str | None:
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


def why_not_again(state: RunState, limits: Limits, sight: Sight, kind: str, now: float) -> str | None:
    """Return why no attempt may follow an end of that kind; `None` if one may, "" where nobody expects one."""
    rules = limits.restart
    if rules.max_restarts == 0 or kind not in rules.on:
        return ""
    if kind == "stall" and limits.stall_action is not StallAction.RESTART:
        return ""
    if len(recent(state, rules, now)) >= rules.max_restarts:
        within = "" if rules.window is None else f" within {rules.window:g} s"
        return f"all {rules.max_restarts} restarts{within} are used up"
    if sight.alike >= 2:
        return why_enough(sight.alike + 1, state.cause)
    if state.cause is not None and state.cause.exit_code in rules.never_codes:
        return f"exit code {state.cause.exit_code} is one of `restart.never_codes`"
    overdue = [n.node for n in state.nodes.values() if _overdue(state, n, limits, sight)]
    if overdue:
        return f"{overdue[0]} does not say that all has ended there"
    bad = unusable(state)
    if "lost" in bad.values() and limits.fence is None:
        return "a lost node may still be at work: `on_controller_loss: {stop_after: ...}` would fence it"
    if kind == "unhealthy":
        bad = dict.fromkeys(sight.unhealthy, "unhealthy") | bad
    if len(bad) > sight.spares:
        return f"{min(bad)} is {bad[min(bad)]}, and no spare can take its place"
    return None


def limits_of(spec: ClusterSpec) -> Limits:
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
