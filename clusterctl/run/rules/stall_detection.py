"""Decides whether a run stalls, from the samples of its ranks. Pure.

A stall is suspected if the run has been idle for longer than a limit, and confirmed if a later judgement agrees. The
idle time ends with:

* **Progress** of a worker: steps, collectives, `clusterctl.progress`, and the numbers of printed steps.
* A **declared phase**, until the limit of the phase is over.
* **Activity**: output, transfers, watched files, CPU time of *all* ranks. After the first progress, and while a rank
  waits for others, activity counts only for a limited time: a rank that retries and prints all the time must not hide
  that the group is stuck. A rank waits for others in a collective, or if its main thread has been in one call for the
  limit, and the kernel says that this thread waits for another thread or for a network socket.

All times are arguments, measured on the head's monotonic clock. A run is judged at the last moment at which *every*
live rank had a sample. So a controller without samples neither suspects nor confirms a stall.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.record_types import ActivitySample, RankActivity, WorkerStatusSample
from clusterctl.formatting import describe_duration
from clusterctl.validation import node_samples

if TYPE_CHECKING:
    from clusterctl.config.spec import StallSpec

BUSY_CORES = 0.05
"""A rank that uses fewer cores does no work. Even a waiting worker uses some CPU for heartbeats and its status file."""
RUNNABLE_SHARE = 0.5
"""A rank is active if it uses a CPU, or waits for a CPU, for at least this share of the time."""
TRANSFER_BYTES_S = 16 * 1024
FRESH_S, FRESH_FOR_S = 2.5, 6.0
"""A main thread computes if it returns to Python at least every 2.5 s for 6 s.

A thread that polls every 5 s only waits.
"""
_PEER_WAITS = ("futex", "sk_wait_data", "inet_", "tcp_", "wait_woken", "__skb_wait")
"""How the names of kernel functions begin in which a thread waits for another thread or for a network socket.

`torch.distributed` waits there for the data of other ranks. A thread that waits for a file, a pipe or a child process
waits in other functions.
"""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a rank: its time on the head's clock, and its number, if the job reports or prints numbers.

    `is_printed` is true if the step was found in the output: the shim has not seen any step.
    """

    at: float
    number: float | None = None
    is_printed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """The last sample of one rank, and the times of its last activity. Times are on the head's clock."""

    node: str
    seen_at: float
    sampled_at: float
    is_alive: bool
    has_gpus: bool
    output: int | None = None
    transferred: int | None = None
    cpu_s: float = 0.0
    starved_s: float = 0.0
    beats: int = 0
    progress_marker: object = None
    progress_at: float | None = None
    busy_at: float | None = None
    computing_since: float | None = None
    computing_at: float | None = None
    cpu_bound_since: float | None = None
    phase: tuple[str, float, float] | None = None
    has_framework: bool = False
    backend: str | None = None
    group_timeout_s: float | None = None
    collectives: int = 0
    ended_collectives: int = 0
    is_in_collective: bool = False
    waits_since: float | None = None
    printed_steps: int = 0
    printed_step: float | None = None
    own_step: float | None = None
    has_counted_back: bool = False
    first_step: FirstStep | None = None


def _find_own_step(activity: RankActivity) -> float | None:
    """Return the step of a rank by the count of its job, which a restart continues; `None` if it is unknown.

    The job reports this number (`clusterctl.progress`), or prints it. The steps that the shim counts begin at 0 in each
    attempt.
    """
    status: WorkerStatusSample = activity.get("inside") or {}
    if status.get("source") == "user":
        return status.get("step")
    return (activity.get("printed_steps") or (0, None))[1] if status.get("step") is None else None


def _find_first_step(before: FirstStep | None, own: float | None, now: float, *, has_step: bool) -> FirstStep | None:
    if has_step and (before is None or before.is_printed or before.number is None):
        return FirstStep(now if before is None or before.is_printed else before.at, own)
    return FirstStep(now, own, is_printed=True) if before is None and own is not None else before


def update_rank_observation(
    before: RankObservation | None, activity: RankActivity, sample: ActivitySample, node: str, now: float
) -> RankObservation:
    """Return the observation of a rank after one more sample.

    Args:
        before: The observation after the previous sample; `None` for the first sample.
        activity: The rank's part of the sample.
        sample: The sample of its node.
        node: The node.
        now: The time at which the sample arrived.
    """
    status: WorkerStatusSample = activity.get("inside") or {}
    transfers = [moved for moved in (activity.get("read"), activity.get("written")) if moved is not None]
    cpu_s, starved_s = activity.get("cpu_s") or 0.0, activity.get("starved_s") or 0.0
    busy_at, cpu_bound_since = before.busy_at if before else None, None
    if before is not None:
        # The rank computed, or waited for a CPU.
        seconds, spent = sample["m"] - before.sampled_at, cpu_s - before.cpu_s
        starved = starved_s - before.starved_s
        if spent >= BUSY_CORES * seconds or spent + starved >= RUNNABLE_SHARE * seconds:
            busy_at = now
        if spent + starved >= RUNNABLE_SHARE * seconds:
            cpu_bound_since = before.cpu_bound_since or before.seen_at
    progress_at = before.progress_at if before else None
    progress_marker = (status.get("pid"), status.get("beats"), status.get("seq")) if status else None
    age = status.get("progress_age_s")
    if age is not None and (before is None or before.progress_marker != progress_marker):
        progress_at = max(now - age, progress_at or now - age)
    main_age, file_age = status.get("main_age_s"), status.get("age_s")
    computing_since, computing_at = None, before.computing_at if before else None
    if main_age is not None and file_age is not None and max(main_age, file_age) <= FRESH_S:
        computing_since = now if before is None or before.computing_since is None else before.computing_since
        computing_at = now if now - computing_since >= FRESH_FOR_S else computing_at
    phase, sequences = status.get("phase"), (status.get("seq") or {}).values()
    printed_steps, printed_step = activity.get("printed_steps") or (0, None)
    own_step = _find_own_step(activity)
    if before is not None and printed_step not in (None, before.printed_step) and not status.get("beats"):
        progress_at = now
    return RankObservation(
        node=node,
        seen_at=now,
        sampled_at=sample["m"],
        is_alive=bool(activity.get("alive")),
        has_gpus=bool(sample.get("gpus")),
        output=activity.get("output"),
        transferred=sum(transfers) if transfers else None,
        cpu_s=cpu_s,
        starved_s=starved_s,
        beats=status.get("beats") or 0,
        progress_marker=progress_marker,
        progress_at=progress_at,
        busy_at=busy_at,
        computing_since=computing_since,
        computing_at=computing_at,
        cpu_bound_since=cpu_bound_since,
        phase=None if phase is None else (str(phase["name"]), now - phase["age_s"], float(phase["limit_s"])),
        has_framework=bool(status.get("frameworks")),
        backend=status.get("backend"),
        group_timeout_s=status.get("timeout_s"),
        collectives=sum(begun for begun, _ in sequences),
        ended_collectives=sum(ended for _, ended in sequences),
        is_in_collective=any(begun > ended for begun, ended in sequences),
        waits_since=now - main_age if main_age and (activity.get("wchan") or "").startswith(_PEER_WAITS) else None,
        printed_steps=printed_steps,
        printed_step=printed_step,
        own_step=own_step,
        has_counted_back=before is not None
        and (before.has_counted_back or (own_step is not None and own_step < (before.own_step or own_step))),
        first_step=_find_first_step(
            before.first_step if before else None, own_step, now, has_step=status.get("step") is not None
        ),
    )


def has_activity(before: RankObservation, after: RankObservation) -> bool:
    """Return whether the rank wrote output or transferred data between two observations."""
    if (after.output or 0) > (before.output or 0):
        return True
    moved = (after.transferred or 0) - (before.transferred or 0)
    return moved >= TRANSFER_BYTES_S * (after.sampled_at - before.sampled_at)


MIN_LIMIT_S = 30.0
INTERVAL_FACTOR = 6.0
MAX_INTERVALS = 50
MAX_LIMIT_NCCL_S = 480.0
MAX_LIMIT_S = 1500.0
SHARE_OF_GROUP_TIMEOUT = 0.8
"""The longest default limit, as a share of the process group's timeout. Evidence must be saved before this timeout."""
FIRST_STEPS, FIRST_ADVANCES = 3, 10
"""The set-up of a run is over after this many steps of one rank, or after this many advances of the run."""
FIRST_COLLECTIVES, FIRST_INTERVALS, FIRST_PRINTED_STEPS = 16, 2, 3
"""The set-up of a run without reported steps is over after this many collectives and this many intervals.

The set-up is also over after several ranks have printed as many steps as the third value.
"""
INDIRECT_LIMIT_S = 120.0
"""The shortest limit in seconds if steps are visible only as collectives or printed numbers: set-up may continue."""
BUSY_FACTOR = 3.0
"""While some ranks wait for others and other ranks are active, the limit is longer by this factor."""
CONFIRM_MIN_S, CONFIRM_MAX_S, CONFIRM_SHARE = 15.0, 60.0, 0.2
SAME_ADVANCE_S = 1.0
"""Ranks report one step at slightly different times. All progress within this many seconds is one advance."""
MAX_UNSEEN_S, MAX_UNSEEN_STEADY_S = 5.0, 2.0
"""The most seconds without a sample that an interval may include; the second value is for steady progress."""

_NO_STEP_REPORTED = "no step reported by any process"


class StallPhase(str, Enum):
    """How certain a stall is."""

    NONE = "none"
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallJudgement:
    """The judgement whether a run stalls.

    Attributes:
        since_s: Seconds for which the run has been idle.
        limit_s: The number of idle seconds after which the run counts as stalled.
        reason: A text about what is missing, such as `no progress`; empty without a stall.
        has_all_samples: Whether every live rank has a sample. Otherwise there is no judgement.
        stragglers: Ranks without progress while other ranks make progress. They only cause a warning.
        last_progress_s: Seconds since the last progress of a worker; `None` before the first progress.
        sample_age_s: Seconds since every live rank last had a sample.
    """

    phase: StallPhase = StallPhase.NONE
    since_s: float = 0.0
    limit_s: float = 0.0
    reason: str = ""
    has_all_samples: bool = True
    stragglers: tuple[int, ...] = ()
    last_progress_s: float | None = None
    sample_age_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class StallWatch:
    """All observations of one attempt. The functions of this module return a changed copy of this object."""

    attempt: int
    began_at: float
    expected_ranks: frozenset[int]
    ranks: dict[int, RankObservation] = field(default_factory=dict)
    watched_files: dict[str, object] = field(default_factory=dict)
    progress_at: float | None = None
    phase_changed_at: float | None = None
    activity_at: float | None = None
    watched_at: float | None = None
    recorded_at: float | None = None
    advances: int = 0
    intervals: tuple[float, ...] = ()
    suspected: tuple[float, float | None] | None = None
    confirmed: bool = False

    @property
    def live_ranks(self) -> dict[int, RankObservation]:
        """The ranks that still run."""
        return {rank: view for rank, view in self.ranks.items() if view.is_alive}

    @property
    def last_complete_sample_at(self) -> float | None:
        """The last moment at which every live rank had a sample; `None` if a rank never had one."""
        if not self.expected_ranks <= self.ranks.keys():
            return None
        return min((view.seen_at for view in self.live_ranks.values()), default=None)


def start_stall_watch(attempt: int, ranks: Iterable[int], now: float) -> StallWatch:
    """Return the watch of a new attempt.

    Args:
        attempt: The number of the attempt.
        ranks: The ranks of the attempt. There is no judgement before each rank has a sample.
        now: The time at which the workers were started.
    """
    return StallWatch(attempt=attempt, began_at=now, expected_ranks=frozenset(ranks))


def add_sample(watch: StallWatch, sample: ActivitySample, *, node: str, attempt: int, now: float) -> StallWatch:
    """Return the watch after one sample of one node. Samples of another attempt are ignored."""
    return add_samples(watch, [(sample, node, now)], attempt=attempt)


def add_samples(watch: StallWatch, samples: Iterable[tuple[ActivitySample, str, float]], *, attempt: int) -> StallWatch:
    """Return the watch after several samples, each with its node and the time of its arrival.

    The activity of all ranks together is updated once, after the last sample: a run of thousands of ranks sends
    hundreds of samples per second.
    """
    if attempt != watch.attempt:
        return watch
    watch = replace(watch, ranks=dict(watch.ranks), watched_files=dict(watch.watched_files))
    for sample, node, now in samples:
        for rank, activity in sample["ranks"].items():
            _add_rank_sample(watch, int(rank), activity, sample, node, now)
        watched = sample.get("watched")
        if watched is not None:
            if watch.watched_files.get(node, watched) != watched:
                watch.activity_at = watch.watched_at = now
            watch.watched_files[node] = watched
    # CPU time counts as activity if every rank uses it. With GPUs, even a waiting rank uses CPU time, so only main
    # threads that compute count.
    live = list(watch.live_ranks.values())
    has_gpus = any(view.has_gpus for view in live)
    moments = [m for view in live if (m := view.computing_at if has_gpus else view.busy_at) is not None]
    if live and len(moments) == len(live) and not (has_gpus and watch.progress_at is None):
        watch.activity_at = max(min(moments), watch.activity_at or watch.began_at)
    return watch


def judge_stall(watch: StallWatch, limits: StallSpec, now: float) -> tuple[StallWatch, StallJudgement]:
    """Judge an attempt; return the watch for the next judgement, with the suspicion, and the judgement.

    Args:
        watch: The watch with all samples so far.
        limits: The limits that the user has set.
        now: The present time, to compute the age of the samples.
    """
    view_time = watch.last_complete_sample_at
    if view_time is None:
        return watch, StallJudgement(has_all_samples=False, sample_age_s=max(0.0, now - watch.began_at))
    since, limit, reason = _measure_idle(watch, limits, view_time)
    suspected = since >= limit
    watch = _record_suspicion(watch, suspected, view_time, limit)
    phase = StallPhase.NONE
    if suspected:
        phase = StallPhase.CONFIRMED if watch.confirmed else StallPhase.SUSPECTED
    return watch, StallJudgement(
        phase=phase,
        since_s=since,
        limit_s=limit,
        reason=reason if suspected else "",
        stragglers=() if suspected else _find_stragglers(watch, view_time, limit),
        last_progress_s=None if watch.progress_at is None else max(0.0, view_time - watch.progress_at),
        sample_age_s=max(0.0, now - view_time),
    )


def find_max_stall_limit_s(watch: StallWatch, limits: StallSpec) -> float:
    """Return the longest allowed time without progress after the first steps: the user's limit, or else the default."""
    return limits.timeout if limits.timeout is not None else _default_max_limit_s(watch)


def describe_late_stall_limit(watch: StallWatch, limits: StallSpec) -> str | None:
    """Return a warning if the process group times out before the stall limit: the run then ends without evidence."""
    group, limit = _find_group_timeout_s(watch), find_max_stall_limit_s(watch, limits)
    if group is None or limit + _confirmation_delay_s(limit) < group:
        return None
    fitting = min(group * SHARE_OF_GROUP_TIMEOUT, group - CONFIRM_MIN_S - 1.0)
    return (
        f"`stall.timeout` of {limit:.0f} s{' (the default)' if limits.timeout is None else ''} does not lie before the "
        f"process group's own timeout of {group:.0f} s, which would end the ranks and their evidence first; "
        + (f"{fitting:.0f} s or less does" if fitting >= 1.0 else "with a longer timeout of the group it does")
    )


def _add_rank_sample(
    watch: StallWatch, rank: int, activity: RankActivity, sample: ActivitySample, node: str, now: float
) -> None:
    before, status = watch.ranks.get(rank), activity.get("inside")
    if before is not None and sample["m"] <= before.sampled_at:
        return
    if activity.get("alive") and status is not None and status.get("unseen"):
        return  # the activity of the rank since then is unknown
    view = update_rank_observation(before, activity, sample, node, now)
    if before is not None and _is_other_phase(view.phase, before.phase):
        watch.phase_changed_at = now
    if view.progress_at is not None and (before is None or view.progress_at != before.progress_at):
        max_unseen_s = MAX_UNSEEN_STEADY_S if sample.get("steady") else MAX_UNSEEN_S
        _add_progress(watch, view.progress_at, now if before is None else before.seen_at, now, max_unseen_s)
    if before is not None and has_activity(before, view):
        watch.activity_at = now
    watch.ranks[rank] = view


def _is_other_phase(before: tuple[str, float, float] | None, now: tuple[str, float, float] | None) -> bool:
    """Return whether two samples show different phases. The start of a phase is known only to about a second."""
    if before is None or now is None:
        return before is not now
    return before[0] != now[0] or abs(before[1] - now[1]) > SAME_ADVANCE_S


def _add_progress(watch: StallWatch, moment: float, seen_at: float, now: float, max_unseen_s: float) -> None:
    """Record that the run made progress at this time. The time since the last progress is an interval.

    Between the sample at `seen_at` and now, steps may have happened without a sample. At most `max_unseen_s` of that
    time counts.
    """
    last = watch.progress_at
    if last is None:
        watch.progress_at = watch.recorded_at = moment
        watch.advances = 1
    elif moment > last:
        watch.progress_at = moment
        watch.advances += 1
        if moment - (watch.recorded_at or last) >= SAME_ADVANCE_S:
            watch.recorded_at = moment
            interval = min(moment - last, max(0.0, seen_at - last) + min(now - seen_at, max_unseen_s))
            watch.intervals = (*watch.intervals, interval)[-MAX_INTERVALS:]


def find_busy_limit_s(watch: StallWatch, limits: StallSpec) -> float:
    """Return the longest allowed time without progress while some ranks wait for others and other ranks are active."""
    top = find_max_stall_limit_s(watch, limits)
    return limits.busy_timeout or min(BUSY_FACTOR * top, max(top, _default_max_limit_s(watch)))


def _has_started(watch: StallWatch) -> bool:
    return len(watch.intervals) >= FIRST_ADVANCES or any(view.beats >= FIRST_STEPS for view in watch.ranks.values())


def _describe_indirect_start(watch: StallWatch) -> str | None:
    """Return the sign that the first steps are over although no rank reports steps, or `None`."""
    live = list(watch.live_ranks.values())
    collectives = max((view.collectives for view in watch.ranks.values()), default=0)
    # If every rank waits in a collective after an earlier collective, no rank still prepares its first step.
    all_wait = bool(live) and all(view.is_in_collective and view.ended_collectives for view in live)
    if all_wait or (collectives >= FIRST_COLLECTIVES and len(watch.intervals) >= FIRST_INTERVALS):
        return f"{collectives} collectives"
    printing = [view.printed_steps for view in live if view.printed_steps >= FIRST_PRINTED_STEPS]
    return f"{max(printing)} printed steps" if printing and len(printing) >= min(2, len(live)) else None


def _measure_idle(watch: StallWatch, limits: StallSpec, view_time: float) -> tuple[float, float, str]:
    """Return the idle seconds, the limit of the idle seconds, and a text about the missing progress."""
    progressed_at = max(watch.began_at, watch.progress_at or watch.began_at, watch.phase_changed_at or watch.began_at)
    active_at = max(progressed_at, watch.activity_at or progressed_at)
    live = list(watch.live_ranks.values())
    phases = [view.phase for view in live if view.phase is not None]
    limit, reason = _choose_limit(watch, limits)
    limit = max([limit, *(phase[2] for phase in phases)])
    names = sorted({f"`{phase[0]}`" for phase in phases})
    reason += f" in phase {', '.join(names)}" if names else ""
    since, stuck_at, longest = view_time - active_at, progressed_at, float("inf")
    is_waiting = _has_started(watch) and any(
        view.waits_since is not None and view_time - view.waits_since >= limit for view in live
    )
    is_in_collective = any(view.is_in_collective for view in live)
    if is_waiting or is_in_collective:
        longest = find_busy_limit_s(watch, limits)
        # A change of watched files shows that a rank saves a checkpoint and does not only retry.
        stuck_at = max(progressed_at, watch.watched_at or progressed_at)
        if is_in_collective and any(_is_cpu_bound(view) for view in live):
            limit = max(limit, min(BUSY_FACTOR * max(limit, limits.timeout or 0.0), longest))
    elif _has_started(watch):
        longest = max(find_max_stall_limit_s(watch, limits), _default_max_limit_s(watch))
    if since < limit and view_time - stuck_at >= max(limit, longest):
        since, limit = view_time - stuck_at, max(limit, longest)
    return max(0.0, since), limit, reason


def _choose_limit(watch: StallWatch, limits: StallSpec) -> tuple[float, str]:
    """Return the limit of the time without progress and activity, and a text about the missing progress."""
    top = find_max_stall_limit_s(watch, limits)
    interval_limit = INTERVAL_FACTOR * max(watch.intervals, default=0.0)
    if _has_started(watch):
        return min(max(interval_limit, MIN_LIMIT_S), top), "no progress"
    if (sign := _describe_indirect_start(watch)) is not None:
        return min(max(interval_limit, INDIRECT_LIMIT_S), top), f"{sign}, then none"
    has_framework = any(view.has_framework for view in watch.ranks.values())
    if watch.activity_at is not None and watch.advances == 0 and not has_framework:
        return top, "no activity"  # without a framework no steps are visible
    if watch.advances:
        return limits.startup_timeout, "no progress"
    return limits.startup_timeout, "no first step" if watch.activity_at is None else _NO_STEP_REPORTED


def _is_cpu_bound(observation: RankObservation) -> bool:
    """Return whether a rank outside of collectives has computed for some time. Other ranks may wait for its result."""
    since = observation.cpu_bound_since
    return not observation.is_in_collective and since is not None and observation.seen_at - since >= FRESH_FOR_S


def _record_suspicion(watch: StallWatch, suspected: bool, view_time: float, limit: float) -> StallWatch:
    if not suspected:
        return replace(watch, suspected=None, confirmed=False)
    if watch.suspected is None or watch.suspected[1] != watch.progress_at:
        return replace(watch, suspected=(view_time, watch.progress_at), confirmed=False)
    return replace(watch, confirmed=view_time - watch.suspected[0] >= _confirmation_delay_s(limit))


def _confirmation_delay_s(limit: float) -> float:
    return min(max(CONFIRM_SHARE * limit, CONFIRM_MIN_S), CONFIRM_MAX_S)


def _find_stragglers(watch: StallWatch, view_time: float, limit: float) -> tuple[int, ...]:
    """Return the ranks whose last progress is older than the limit, while the run makes progress."""
    if watch.progress_at is None or view_time - watch.progress_at >= limit:
        return ()
    progressed_at = {rank: view.progress_at for rank, view in watch.live_ranks.items() if view.progress_at is not None}
    return tuple(sorted(rank for rank, moment in progressed_at.items() if view_time - moment >= limit))


def _find_group_timeout_s(watch: StallWatch) -> float | None:
    return min((view.group_timeout_s for view in watch.ranks.values() if view.group_timeout_s), default=None)


def _default_max_limit_s(watch: StallWatch) -> float:
    backends = [view.backend for view in watch.ranks.values() if view.backend]
    # Before a process group exists, assume NCCL on nodes with GPUs.
    nccl = any("nccl" in name for name in backends) if backends else any(v.has_gpus for v in watch.ranks.values())
    top = MAX_LIMIT_NCCL_S if nccl else MAX_LIMIT_S
    group = _find_group_timeout_s(watch)
    return top if group is None else min(top, SHARE_OF_GROUP_TIMEOUT * group)


MIN_STRAGGLING_S = 5.0
"""A rank is reported only after this many seconds without progress."""
MAX_SILENCE_S = 10.0
"""After a node was silent for more than this many seconds, its samples arrive late."""


class StallObserver:
    """Detects stalls of one attempt from lines of samples, and reports each warning once.

    Args:
        attempt: The number of the attempt.
        ranks: The ranks of the attempt.
        spec: The settings of the user.
        now: The time at which the workers were started, on the head's monotonic clock.
    """

    def __init__(self, attempt: int, ranks: Iterable[int], spec: StallSpec, now: float) -> None:
        self._attempt = attempt
        self._limits = spec
        self._watch: StallWatch = start_stall_watch(attempt, ranks, now)
        self._new_samples: list[tuple[ActivitySample, str, float]] = []
        self._heard_at: dict[str, tuple[float, float]] = {}
        self._late_at: float | None = None
        self._has_warned = False
        self._behind_since: dict[int, float] = {}
        self._reported: frozenset[int] = frozenset()

    def replay_samples(self, replicas: Mapping[str, Iterable[bytes]], now: float) -> None:
        """Add the samples from before the start of this controller, as if each node's last sample had arrived now.

        Args:
            replicas: The lines of the replicated samples of each node.
            now: The head's monotonic clock.
        """
        sampled = {node: list(self._parse_lines(lines)) for node, lines in replicas.items()}
        moments = [
            (now - (lines[-1]["m"] - sample["m"]), node, sample) for node, lines in sampled.items() for sample in lines
        ]
        if not moments:
            return
        moments.sort(key=lambda each: each[0])
        self._watch = start_stall_watch(self._attempt, self._watch.expected_ranks, moments[0][0])
        for moment, node, sample in moments:
            self._watch = add_sample(self._watch, sample, node=node, attempt=self._attempt, now=moment)

    def add_sample_lines(self, node: str, lines: Iterable[bytes], now: float) -> None:
        """Add lines of a node's samples."""
        for sample in self._parse_lines(lines):
            if node in self._heard_at and now - self._heard_at[node][1] > MAX_SILENCE_S:
                self._late_at = now
            self._heard_at[node] = (self._heard_at.get(node, (now, now))[0], now)
            self._new_samples.append((sample, node, now))

    def _add_new_samples(self) -> None:
        """Add the samples that have arrived since the last judgement to the watch."""
        if self._new_samples:
            new, self._new_samples = self._new_samples, []
            self._watch = add_samples(self._watch, new, attempt=self._attempt)

    def _parse_lines(self, lines: Iterable[bytes]) -> Iterator[ActivitySample]:
        parsed = node_samples.parse_samples(lines, "activity", "m", "ranks", "attempt")
        return (sample for sample in parsed if sample["attempt"] == self._attempt)

    def judge(self, now: float) -> StallJudgement:
        """Return the judgement at this moment."""
        self._add_new_samples()
        self._watch, stall = judge_stall(self._watch, self._limits, now)
        return stall

    def find_first_step(self) -> FirstStep | None:
        """Return the earliest first step of a rank. A printed number counts if a higher number followed it."""
        views = self._watch.ranks.values()
        found = (v.first_step for v in views if v.first_step and not (v.first_step.is_printed and v.printed_steps < 2))
        return min(found, key=lambda step: step.at, default=None)

    def find_own_step(self) -> float | None:
        """Return the last step of the slowest rank by the count of the job; `None` if unknown, or not a rising number.

        A job that prints the number of a batch in its epoch counts back at the end of an epoch.
        """
        views = self._watch.ranks.values()
        if any(view.has_counted_back for view in views):
            return None
        return min((view.own_step for view in views if view.own_step is not None), default=None)

    def list_new_warnings(self, stall: StallJudgement, now: float) -> list[str]:
        """Return new warnings: about a stall limit that is too long, and about ranks without progress."""
        warnings: list[str] = []
        warned = None if self._has_warned else describe_late_stall_limit(self._watch, self._limits)
        if warned is not None:
            self._has_warned = True
            warnings.append(warned)
        if self._late_at is not None and now - self._late_at < stall.limit_s:
            # If the samples of a node arrive late, ranks without newer samples only seem to make no progress.
            self._behind_since = {}
        elif stall.phase is StallPhase.NONE and stall.has_all_samples:
            # After a pause of the run, the samples of its ranks do not arrive at the same moment.
            self._behind_since = {rank: self._behind_since.get(rank, now) for rank in stall.stragglers}
            late = frozenset(rank for rank, since in self._behind_since.items() if now - since >= MIN_STRAGGLING_S)
            new, self._reported = late - self._reported, late
            warnings += [
                f"straggler: rank {rank} on {self._watch.ranks[rank].node} has made no progress"
                f" for over {describe_duration(stall.limit_s)} while others do"
                for rank in sorted(new)
            ]
        return warnings

    def measure_idle_s(self, nodes: Iterable[str]) -> float:
        """Return for how many seconds the samples of these nodes have shown no output, CPU time or progress.

        A node with fewer than two samples is not idle.
        """
        self._add_new_samples()
        moved = [m for m in (self._watch.activity_at, self._watch.progress_at) if m is not None]
        spans = [self._heard_at.get(node, (0.0, 0.0)) for node in nodes]
        newest = min((last for _, last in spans), default=0.0)
        return max(0.0, newest - max([*moved, *(first for first, _ in spans)], default=newest))
