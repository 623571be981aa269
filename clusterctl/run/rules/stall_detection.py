"""What the stall rule keeps of one rank: its last sample, and when it last did what.

The stall rule: a fold over samples, and a judgement of what it holds.

A run is suspected when nothing has moved for its limit, and confirmed by a second look that finds the same. What moves:

* **progress**, seen from inside the workers (steps, collectives, `clusterctl.progress`): always counts;
* a **declared phase** holds the clock until its limit is used up;
* **activity**, seen from outside (output, transfers, watched files, CPU of *all* ranks): where no progress was ever
  seen it is all there is; where progress was, it holds the clock for so long only (`StallLimits.patience`), since
  a chatty library must not hide a stall for ever.

Times are the head's monotonic clock and come in as arguments; a run is judged at the last moment at which *every* live
rank was seen, so a watcher that sees nothing neither suspects nor confirms anything.

Feeds the stall rule with the samples that arrive as replicated lines, and says what people should hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from clusterctl.agent.protocol.record_types import ActivitySample, PhaseAge, RankActivity, WorkerStatusSample
from clusterctl.config.spec import StallSpec
from clusterctl.formatting import duration_text
from clusterctl.validation import samples

# Below these a waiting worker's own threads (heartbeats, the status file) would count as work.
BUSY_CORES = 0.05
# On a crowded machine a rank that computes gets less than that, but could run nearly all the time; one that polls not.
RUNNABLE_SHARE = 0.5
TRANSFER_BYTES_S = 16 * 1024
# A main thread that comes back to Python this often, for that long, computes; one that polls every 5 s only waits.
FRESH_S, FRESH_FOR_S = 2.5, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The last sample of one rank, and when it last did what. Times are the head's."""

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
    fresh_from: float | None = None
    fresh_at: float | None = None
    phase: tuple[str, float, float] | None = None
    has_framework: bool = False
    backend: str | None = None
    group_timeout_s: float | None = None
    collectives: int = 0


def update_rank_view(
    before: RankView | None, activity: RankActivity, sample: ActivitySample, node: str, now: float
) -> RankView:
    """The view after one more sample.

    Args:
        before: The view so far, `None` at first.
        activity: The rank's part of the sample.
        sample: The sample, for what is the node's.
        node: Which node it is of.
        now: When it arrived.
    """
    status = activity.get("inside")
    transfers = [moved for moved in (activity.get("read"), activity.get("written")) if moved is not None]
    view = RankView(
        node=node,
        seen_at=now,
        sampled_at=sample["m"],
        is_alive=bool(activity.get("alive")),
        has_gpus=bool(sample.get("gpus")),
        output=activity.get("output"),
        transferred=sum(transfers) if transfers else None,
        cpu_s=activity.get("cpu_s") or 0.0,
        starved_s=activity.get("starved_s") or 0.0,
        beats=status.get("beats") or 0 if status else 0,
        progress_marker=(status.get("pid"), status.get("beats"), status.get("seq")) if status else None,
        collectives=sum(begun for begun, _ in (status.get("seq") or {}).values()) if status else 0,
        phase=_parse_phase(status.get("phase"), now) if status else None,
        has_framework=bool(status and status.get("frameworks")),
        backend=status.get("backend") if status else None,
        group_timeout_s=status.get("timeout_s") if status else None,
    )
    return _add_main_thread_times(_add_progress_times(view, before, status, now), before, status, now)


def _parse_phase(phase: PhaseAge | None, now: float) -> tuple[str, float, float] | None:
    return None if phase is None else (str(phase["name"]), now - phase["age_s"], float(phase["limit_s"]))


def _add_progress_times(
    view: RankView, before: RankView | None, status: WorkerStatusSample | None, now: float
) -> RankView:
    """When the rank last progressed and was last busy."""
    progress_at = before.progress_at if before else None
    age = status.get("progress_age_s") if status else None
    if age is not None and (before is None or before.progress_marker != view.progress_marker):
        progress_at = max(now - age, progress_at or now - age)
    busy_at = before.busy_at if before else None
    if before is not None and _is_busy(before, view):
        busy_at = now
    return replace(view, progress_at=progress_at, busy_at=busy_at)


def _is_busy(before: RankView, view: RankView) -> bool:
    """Whether a rank computed between two views, or would have if it had been given a processor."""
    seconds = view.sampled_at - before.sampled_at
    spent, starved = view.cpu_s - before.cpu_s, view.starved_s - before.starved_s
    return spent >= BUSY_CORES * seconds or spent + starved >= RUNNABLE_SHARE * seconds


def _add_main_thread_times(
    view: RankView, before: RankView | None, status: WorkerStatusSample | None, now: float
) -> RankView:
    """Since when its main thread has kept coming back to Python, and when it last did so steadily."""
    main_age = status.get("main_age_s") if status else None
    file_age = status.get("age_s") if status else None
    if main_age is None or file_age is None or max(main_age, file_age) > FRESH_S:
        return replace(view, fresh_from=None, fresh_at=before.fresh_at if before else None)
    since = now if before is None or before.fresh_from is None else before.fresh_from
    fresh_at = now if now - since >= FRESH_FOR_S else (before.fresh_at if before else None)
    return replace(view, fresh_from=since, fresh_at=fresh_at)


def is_active(before: RankView, view: RankView) -> bool:
    """Whether output or transfers went on between two views."""
    if (view.output or 0) > (before.output or 0):
        return True
    moved = (view.transferred or 0) - (before.transferred or 0)
    return moved >= TRANSFER_BYTES_S * (view.sampled_at - before.sampled_at)


MIN_LIMIT_S = 30.0
INTERVAL_FACTOR = 6.0
MAX_INTERVALS = 50
MAX_LIMIT_NCCL_S = 480.0
MAX_LIMIT_S = 1500.0
# Evidence must be safe before a framework's own timeout destroys it.
SHARE_OF_GROUP_TIMEOUT = 0.8
# Signs that a run is past its first steps: one rank has done a few, or collectives went on for a while without any.
FIRST_STEPS = 3
FIRST_ADVANCES = 10
# Where steps show as collectives alone: so many, over more than a burst, are no set-up; what follows may be one.
FIRST_COLLECTIVES, FIRST_INTERVALS, AFTER_COLLECTIVES_S = 16, 2, 120.0
CONFIRM_MIN_S, CONFIRM_MAX_S, CONFIRM_SHARE = 15.0, 60.0, 0.2
# Ranks of one step report it at slightly different times: closer than this is one advance.
SAME_ADVANCE_S = 1.0
MAX_UNSEEN_S = 5.0
# Looks that a node took and left out because all its ranks moved were so far apart.
MAX_UNSEEN_STEADY_S = 2.0

_NO_STEP_REPORTED = "step seen in any process (printed lines do not count)"
HINT = (
    "work of one rank alone looks like this from outside; declare it by"
    ' `with clusterctl.phase("checkpoint", limit="15m")`, `clusterctl.progress()`, or its files under `stall.watch`'
)


class StallPhase(str, Enum):
    """How sure the rule is."""

    NONE = "none"
    SUSPECTED = "suspected"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """What the user set, in seconds; `timeout` is `None` for the default ceiling."""

    timeout: float | None = None
    startup_timeout: float = 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallJudgement:
    """What the rule says now.

    Attributes:
        since_s: How long nothing has moved.
        limit_s: When that counts as a stall.
        reason: What is missing, such as `no progress`; people are told for how long, too. Empty while nothing is wrong.
        known: Every live rank was seen; until then the rule says nothing.
        stragglers: Ranks that do not move while others do; shown, never acted upon.
        last_progress_s: Age of the last progress seen from inside; `None` where there was none.
        blind_s: How long ago the rank heard of least was last seen.
    """

    phase: StallPhase = StallPhase.NONE
    since_s: float = 0.0
    limit_s: float = 0.0
    reason: str = ""
    is_known: bool = True
    stragglers: tuple[int, ...] = ()
    last_progress_s: float | None = None
    unseen_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWatch:
    """Everything the rule remembers, of one attempt; `begin` makes a new one."""

    attempt: int
    began_at: float
    expected_ranks: frozenset[int]
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    watched_files: Mapping[str, object] = field(default_factory=dict)
    progress_at: float | None = None
    phase_changed_at: float | None = None
    activity_at: float | None = None
    recorded_at: float | None = None
    advances: int = 0
    intervals: tuple[float, ...] = ()
    suspected: tuple[float, float | None] | None = None
    confirmed: bool = False

    @property
    def live_ranks(self) -> dict[int, RankView]:
        """Ranks that still run."""
        return {rank: view for rank, view in self.ranks.items() if view.is_alive}

    @property
    def last_complete_view_at(self) -> float | None:
        """The last moment at which every live rank had been seen; `None` while there is none."""
        if not self.expected_ranks <= self.ranks.keys():
            return None
        return min((view.seen_at for view in self.live_ranks.values()), default=None)


def start_watch(attempt: int, ranks: Iterable[int], now: float) -> StallWatch:
    """Starts watching an attempt. Nothing of an earlier one is kept.

    Args:
        attempt: Its number.
        ranks: The ranks that will be sampled; nothing is judged before all of them were.
        now: When its workers were started.
    """
    return StallWatch(attempt=attempt, began_at=now, expected_ranks=frozenset(ranks))


def add_sample(watch: StallWatch, sample: ActivitySample, *, node: str, attempt: int, now: float) -> StallWatch:
    """Takes in one sample of one node (`agent.watch.activity.Sampler.sample`); another attempt's is ignored."""
    return _update_activity(_add_sample(watch, sample, node, attempt, now))


def _add_sample(watch: StallWatch, sample: ActivitySample, node: str, attempt: int, now: float) -> StallWatch:
    if attempt != watch.attempt:
        return watch
    for rank, activity in sample["ranks"].items():
        watch = _add_rank_sample(watch, int(rank), activity, sample, node, now)
    watched = sample.get("watched")
    if watched is not None:
        if watch.watched_files.get(node, watched) != watched:
            watch = replace(watch, activity_at=now)
        watch = replace(watch, watched_files={**watch.watched_files, node: watched})
    return watch


def add_samples(watch: StallWatch, samples: Iterable[tuple[ActivitySample, str, float]], *, attempt: int) -> StallWatch:
    """Takes in samples, each with its node and when it came, as `observe` one after the other.

    What all ranks together show is looked at once, behind the last: a run of thousands sends hundreds of samples a
    second, and each would go over all of them.
    """
    watch = replace(watch, ranks=_MutableRanks(watch.ranks))
    for sample, node, now in samples:
        watch = _add_sample(watch, sample, node, attempt, now)
    return _update_activity(replace(watch, ranks=dict(watch.ranks)))


class _MutableRanks(dict[int, "RankView"]):
    """A table that nobody else has yet, so that it may be changed."""


def judge_stall(watch: StallWatch, limits: StallLimits, now: float) -> tuple[StallWatch, StallJudgement]:
    """Says how the attempt stands; the returned watch remembers a suspicion for the second look.

    Args:
        watch: What was seen so far.
        limits: What the user set.
        now: Only to tell how old the view is.
    """
    view_time = watch.last_complete_view_at
    if view_time is None:
        return watch, StallJudgement(is_known=False, unseen_s=max(0.0, now - watch.began_at))
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
        unseen_s=max(0.0, now - view_time),
    )


def find_max_limit_s(watch: StallWatch, limits: StallLimits) -> float:
    """The longest that nothing may move once steps were seen: what the user set, else the default."""
    return limits.timeout if limits.timeout is not None else _default_max_limit_s(watch)


def describe_late_limit(watch: StallWatch, limits: StallLimits) -> str | None:
    """A line if the limit does not lie before the framework's own timeout, which ends the run and its evidence."""
    group, limit = _find_group_timeout_s(watch), find_max_limit_s(watch, limits)
    if group is None or limit + _confirmation_delay_s(limit) < group:
        return None
    return (
        f"`stall.timeout` of {limit:.0f} s does not lie before the process group's own timeout of {group:.0f} s,"
        f" which would end the ranks and their evidence first; {group * SHARE_OF_GROUP_TIMEOUT:.0f} s or less does"
    )


def _add_rank_sample(
    watch: StallWatch, rank: int, activity: RankActivity, sample: ActivitySample, node: str, now: float
) -> StallWatch:
    before = watch.ranks.get(rank)
    if before is not None and sample["m"] <= before.sampled_at:
        return watch
    status = activity.get("inside")
    if activity.get("alive") and status is not None and status.get("unseen"):
        return watch  # what it did since is not known, and so is not nothing
    view = update_rank_view(before, activity, sample, node, now)
    if before is not None and view.phase != before.phase and _is_other_phase(view.phase, before.phase):
        watch = replace(watch, phase_changed_at=now)
    if view.progress_at is not None and (before is None or view.progress_at != before.progress_at):
        watch = _add_progress(
            watch, view.progress_at, before, now, MAX_UNSEEN_STEADY_S if sample.get("steady") else MAX_UNSEEN_S
        )
    if before is not None and is_active(before, view):
        watch = replace(watch, activity_at=now)
    if isinstance(watch.ranks, _MutableRanks):
        watch.ranks[rank] = view
        return watch
    return replace(watch, ranks={**watch.ranks, rank: view})


def _is_other_phase(before: tuple[str, float, float] | None, now: tuple[str, float, float] | None) -> bool:
    """Whether two looks show different phases; the begin of one and the same is only known to the sampling."""
    if before is None or now is None:
        return before is not now
    return before[0] != now[0] or abs(before[1] - now[1]) > SAME_ADVANCE_S


def _add_progress(
    watch: StallWatch, moment: float, before: RankView | None, now: float, max_unseen_s: float
) -> StallWatch:
    """One more sign of progress of the run; the gap before it is an interval, of which `blind` at most was unseen."""
    last = watch.progress_at
    if last is None:
        return replace(watch, progress_at=moment, recorded_at=moment, advances=1)
    if moment <= last:
        return watch
    watch = replace(watch, progress_at=moment, advances=watch.advances + 1)
    if moment - (watch.recorded_at or last) < SAME_ADVANCE_S:
        return watch
    # While nobody looked, steps may have gone on: only what a look has seen to be idle counts in full.
    samples = before.seen_at if before else now
    interval = min(moment - last, max(0.0, samples - last) + min(now - samples, max_unseen_s))
    return replace(watch, recorded_at=moment, intervals=(*watch.intervals, interval)[-MAX_INTERVALS:])


def _update_activity(watch: StallWatch) -> StallWatch:
    """CPU counts when every rank spends it; with GPUs, where waiting spins, main threads that compute do instead."""
    live = list(watch.live_ranks.values())
    gpus = any(view.has_gpus for view in live)
    moments = [view.fresh_at if gpus else view.busy_at for view in live]
    samples = [moment for moment in moments if moment is not None]
    if not live or len(samples) < len(live) or (gpus and watch.progress_at is None):
        return watch
    return replace(watch, activity_at=max(min(samples), watch.activity_at or watch.began_at))


def _has_started(watch: StallWatch) -> bool:
    return len(watch.intervals) >= FIRST_ADVANCES or any(view.beats >= FIRST_STEPS for view in watch.ranks.values())


def _progresses_by_collectives(watch: StallWatch) -> bool:
    most = max((view.collectives for view in watch.ranks.values()), default=0)
    return most >= FIRST_COLLECTIVES and len(watch.intervals) >= FIRST_INTERVALS


def _measure_idle(watch: StallWatch, limits: StallLimits, view_time: float) -> tuple[float, float, str]:
    """How long nothing has moved, how long that may be, and how to say it."""
    progressed_at = max(watch.began_at, watch.progress_at or watch.began_at, watch.phase_changed_at or watch.began_at)
    active_at = max(progressed_at, watch.activity_at or progressed_at)
    top, what = find_max_limit_s(watch, limits), "progress"
    if _has_started(watch):
        limit = min(max(INTERVAL_FACTOR * max(watch.intervals, default=0.0), MIN_LIMIT_S), top)
    elif _progresses_by_collectives(watch):
        limit = min(max(INTERVAL_FACTOR * max(watch.intervals, default=0.0), AFTER_COLLECTIVES_S), top)
    elif watch.activity_at is not None and watch.advances == 0 and not _has_framework(watch):
        limit, what = top, "activity"  # no steps will come that we could see
    else:
        limit = limits.startup_timeout
        what = "progress" if watch.advances else _NO_STEP_REPORTED if watch.activity_at is not None else "first step"
    limit = max([limit, *_list_phase_limits(watch)])
    since, patience = view_time - active_at, max(limit, top, _default_max_limit_s(watch))
    if _has_started(watch) and view_time - progressed_at >= patience:
        since, limit = view_time - progressed_at, patience
    return max(0.0, since), limit, _describe_reason(what, watch)


def _list_phase_limits(watch: StallWatch) -> list[float]:
    return [view.phase[2] for view in watch.live_ranks.values() if view.phase is not None]


def _describe_reason(what: str, watch: StallWatch) -> str:
    phases = sorted({view.phase[0] for view in watch.live_ranks.values() if view.phase is not None})
    during = f" in phase {', '.join(f'`{name}`' for name in phases)}" if phases else ""
    return f"no {what}{during}"


def _record_suspicion(watch: StallWatch, suspected: bool, view_time: float, limit: float) -> StallWatch:
    if not suspected:
        return replace(watch, suspected=None, confirmed=False)
    if watch.suspected is None or watch.suspected[1] != watch.progress_at:
        return replace(watch, suspected=(view_time, watch.progress_at), confirmed=False)
    return replace(watch, confirmed=view_time - watch.suspected[0] >= _confirmation_delay_s(limit))


def _confirmation_delay_s(limit: float) -> float:
    return min(max(CONFIRM_SHARE * limit, CONFIRM_MIN_S), CONFIRM_MAX_S)


def _find_stragglers(watch: StallWatch, view_time: float, limit: float) -> tuple[int, ...]:
    """Ranks whose own progress is older than the limit, while the run moves."""
    if watch.progress_at is None or view_time - watch.progress_at >= limit:
        return ()
    progressed_at = {rank: view.progress_at for rank, view in watch.live_ranks.items() if view.progress_at is not None}
    return tuple(sorted(rank for rank, moment in progressed_at.items() if view_time - moment >= limit))


def _has_framework(watch: StallWatch) -> bool:
    return any(view.has_framework for view in watch.ranks.values())


def _find_group_timeout_s(watch: StallWatch) -> float | None:
    return min((view.group_timeout_s for view in watch.ranks.values() if view.group_timeout_s), default=None)


def _default_max_limit_s(watch: StallWatch) -> float:
    backends = [view.backend for view in watch.ranks.values() if view.backend]
    # Until a group exists, GPUs mean NCCL.
    nccl = any("nccl" in name for name in backends) if backends else any(v.has_gpus for v in watch.ranks.values())
    top = MAX_LIMIT_NCCL_S if nccl else MAX_LIMIT_S
    group = _find_group_timeout_s(watch)
    return top if group is None else min(top, SHARE_OF_GROUP_TIMEOUT * group)


# How long a rank must lag behind before that is said, in seconds.
MIN_STRAGGLING_S = 5.0
# What a node says after it was not heard for so long happened earlier than it arrives, in seconds.
MAX_SILENCE_S = 10.0


class StallObserver:
    """Watches one attempt; made anew for each, so that nothing of an earlier one is kept.

    Args:
        attempt: Its number.
        ranks: Its ranks.
        spec: What the user set.
        now: When its workers were started, on the head's monotonic clock.
    """

    def __init__(self, attempt: int, ranks: Iterable[int], spec: StallSpec, now: float) -> None:
        self._attempt = attempt
        self._limits = StallLimits(timeout=spec.timeout, startup_timeout=spec.startup_timeout)
        self._watch: StallWatch = start_watch(attempt, ranks, now)
        self._new_samples: list[tuple[ActivitySample, str, float]] = []
        self._heard_at: dict[str, tuple[float, float]] = {}
        self._late_at: float | None = None
        self._has_warned = False
        self._behind_since: dict[int, float] = {}
        self._reported: frozenset[int] = frozenset()

    def replay(self, replicas: Mapping[str, Iterable[bytes]], now: float) -> None:
        """Take in what the nodes had said before this controller was there, as if the last of it had come just now.

        Args:
            replicas: Node to the lines of its replicated samples.
            now: The head's monotonic clock.
        """
        sampled = {node: list(self._parse_lines(lines)) for node, lines in replicas.items()}
        moments = [
            (now - (lines[-1]["m"] - sample["m"]), node, sample) for node, lines in sampled.items() for sample in lines
        ]
        if not moments:
            return
        moments.sort(key=lambda each: each[0])
        self._watch = start_watch(self._attempt, self._watch.expected_ranks, moments[0][0])
        for moment, node, sample in moments:
            self._watch = add_sample(self._watch, sample, node=node, attempt=self._attempt, now=moment)

    def add_lines(self, node: str, lines: Iterable[bytes], now: float) -> None:
        """Take in lines of a node's samples."""
        for sample in self._parse_lines(lines):
            if node in self._heard_at and now - self._heard_at[node][1] > MAX_SILENCE_S:
                self._late_at = now
            self._heard_at[node] = (self._heard_at.get(node, (now, now))[0], now)
            self._new_samples.append((sample, node, now))

    def _add_new_samples(self) -> None:
        """Fold what has come since the last look."""
        if self._new_samples:
            new, self._new_samples = self._new_samples, []
            self._watch = add_samples(self._watch, new, attempt=self._attempt)

    def _parse_lines(self, lines: Iterable[bytes]) -> Iterator[ActivitySample]:
        yield from (
            s
            for s in samples.parse_samples(lines, "activity", "m", "ranks", "attempt")
            if s["attempt"] == self._attempt
        )

    def judge(self, now: float) -> StallJudgement:
        """Return what the rule says now."""
        self._add_new_samples()
        self._watch, stall = judge_stall(self._watch, self._limits, now)
        return stall

    def list_new_warnings(self, stall: StallJudgement, now: float) -> list[str]:
        """Return the warnings that were not said before: a limit that comes too late, ranks that fall behind."""
        warnings: list[str] = []
        warned = None if self._has_warned else describe_late_limit(self._watch, self._limits)
        if warned is not None:
            self._has_warned = True
            warnings.append(warned)
        if self._late_at is not None and now - self._late_at < stall.limit_s:
            # Steps that arrive late make the others look as if they had not moved since.
            self._behind_since = {}
        elif stall.phase is StallPhase.NONE and stall.is_known:
            # The ranks of a run that moves again are not all heard of at the same moment.
            self._behind_since = {rank: self._behind_since.get(rank, now) for rank in stall.stragglers}
            late = frozenset(rank for rank, since in self._behind_since.items() if now - since >= MIN_STRAGGLING_S)
            new, self._reported = late - self._reported, late
            warnings += [
                f"straggler: rank {rank} on {self._watch.ranks[rank].node} has made no progress"
                f" for over {duration_text(stall.limit_s)} while others do"
                for rank in sorted(new)
            ]
        return warnings

    def measure_idle_s(self, nodes: Iterable[str]) -> float:
        """Return for how many seconds these nodes have said that nothing moves: no output, no CPU, no progress.

        A node that says nothing is not one where nothing moves: time alone makes nobody idle, nor does a single look.
        """
        self._add_new_samples()
        moved = [m for m in (self._watch.activity_at, self._watch.progress_at) if m is not None]
        spans = [self._heard_at.get(node, (0.0, 0.0)) for node in nodes]
        newest = min((last for _, last in spans), default=0.0)
        return max(0.0, newest - max([*moved, *(first for first, _ in spans)], default=newest))
