"""The stall rule: a fold over samples, and a judgement of what it holds.

A run is suspected when nothing has moved for its limit, and confirmed by a second look that finds the same. What moves:

* **progress**, seen from inside the workers (steps, collectives, `clusterctl.progress`): always counts;
* a **declared phase** holds the clock until its limit is used up;
* **activity**, seen from outside (output, transfers, watched files, CPU of *all* ranks): where no progress was ever
  seen it is all there is; where progress was, it holds the clock for so long only (`StallLimits.patience`), since
  a chatty library must not hide a stall for ever.

Times are the head's monotonic clock and come in as arguments; a run is judged at the last moment at which *every* live
rank was seen, so a watcher that sees nothing neither suspects nor confirms anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from clusterctl.run.rules.stalls.rank import RankView, active, look

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.protocol.sample_types import ActivitySample, RankActivity

FLOOR_S = 30.0
FACTOR = 6.0
INTERVALS = 50
CEILING_NCCL_S = 480.0
CEILING_S = 1500.0
# Evidence must be safe before a framework's own timeout destroys it.
SHARE_OF_GROUP_TIMEOUT = 0.8
# Signs that a run is past its first steps: one rank has done a few, or collectives went on for a while without any.
FIRST_STEPS = 3
FIRST_MOVES = 10
# Where steps show as collectives alone: so many, over more than a burst, are no set-up; what follows may be one.
FIRST_COLLECTIVES, FIRST_SPELLS, AFTER_COLLECTIVES_S = 16, 2, 120.0
CONFIRM_MIN_S, CONFIRM_MAX_S, CONFIRM_SHARE = 15.0, 60.0, 0.2
# Ranks of one step report it at slightly different times: closer than this is one advance.
SAME_ADVANCE_S = 1.0
BLIND_S = 5.0
# Looks that a node took and left out because all its ranks moved were so far apart.
STEADY_S = 2.0

_UNSEEN_STEP = "step seen in any process (printed lines do not count)"
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
class Stall:
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
    known: bool = True
    stragglers: tuple[int, ...] = ()
    last_progress_s: float | None = None
    blind_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallWatch:
    """Everything the rule remembers, of one attempt; `begin` makes a new one."""

    attempt: int
    begun: float
    expected: frozenset[int]
    ranks: Mapping[int, RankView] = field(default_factory=dict)
    watched: Mapping[str, object] = field(default_factory=dict)
    progress_at: float | None = None
    held_at: float | None = None
    activity_at: float | None = None
    recorded_at: float | None = None
    moves: int = 0
    intervals: tuple[float, ...] = ()
    suspected: tuple[float, float | None] | None = None
    confirmed: bool = False

    @property
    def live(self) -> dict[int, RankView]:
        """Ranks that still run."""
        return {rank: view for rank, view in self.ranks.items() if view.alive}

    @property
    def horizon(self) -> float | None:
        """The last moment at which every live rank had been seen; `None` while there is none."""
        if not self.expected <= self.ranks.keys():
            return None
        return min((view.seen for view in self.live.values()), default=None)


def begin(attempt: int, ranks: Iterable[int], now: float) -> StallWatch:
    """Starts watching an attempt. Nothing of an earlier one is kept.

    Args:
        attempt: Its number.
        ranks: The ranks that will be sampled; nothing is judged before all of them were.
        now: When its workers were started.
    """
    return StallWatch(attempt=attempt, begun=now, expected=frozenset(ranks))


def observe(watch: StallWatch, sample: ActivitySample, *, node: str, attempt: int, now: float) -> StallWatch:
    """Takes in one sample of one node (`agent.watch.activity.Sampler.sample`); another attempt's is ignored."""
    return _activity_of_all(_observe(watch, sample, node, attempt, now))


def _observe(watch: StallWatch, sample: ActivitySample, node: str, attempt: int, now: float) -> StallWatch:
    if attempt != watch.attempt:
        return watch
    for rank, content in sample["ranks"].items():
        watch = _observe_rank(watch, int(rank), content, sample, node, now)
    watched = sample.get("watched")
    if watched is not None:
        if watch.watched.get(node, watched) != watched:
            watch = replace(watch, activity_at=now)
        watch = replace(watch, watched={**watch.watched, node: watched})
    return watch


def observe_all(watch: StallWatch, seen: Iterable[tuple[ActivitySample, str, float]], *, attempt: int) -> StallWatch:
    """Takes in samples, each with its node and when it came, as `observe` one after the other.

    What all ranks together show is looked at once, behind the last: a run of thousands sends hundreds of samples a
    second, and each would go over all of them.
    """
    watch = replace(watch, ranks=_OwnRanks(watch.ranks))
    for sample, node, now in seen:
        watch = _observe(watch, sample, node, attempt, now)
    return _activity_of_all(replace(watch, ranks=dict(watch.ranks)))


class _OwnRanks(dict[int, "RankView"]):
    """A table that nobody else has yet, so that it may be changed."""


def judge(watch: StallWatch, limits: StallLimits, now: float) -> tuple[StallWatch, Stall]:
    """Says how the attempt stands; the returned watch remembers a suspicion for the second look.

    Args:
        watch: What was seen so far.
        limits: What the user set.
        now: Only to tell how old the view is.
    """
    horizon = watch.horizon
    if horizon is None:
        return watch, Stall(known=False, blind_s=max(0.0, now - watch.begun))
    since, limit, reason = _idle(watch, limits, horizon)
    suspected = since >= limit
    watch = _remember(watch, suspected, horizon, limit)
    phase = StallPhase.NONE
    if suspected:
        phase = StallPhase.CONFIRMED if watch.confirmed else StallPhase.SUSPECTED
    return watch, Stall(
        phase=phase,
        since_s=since,
        limit_s=limit,
        reason=reason if suspected else "",
        stragglers=() if suspected else _stragglers(watch, horizon, limit),
        last_progress_s=None if watch.progress_at is None else max(0.0, horizon - watch.progress_at),
        blind_s=max(0.0, now - horizon),
    )


def ceiling(watch: StallWatch, limits: StallLimits) -> float:
    """The longest that nothing may move once steps were seen: what the user set, else the default."""
    return limits.timeout if limits.timeout is not None else _default_ceiling(watch)


def warning(watch: StallWatch, limits: StallLimits) -> str | None:
    """A line if the limit does not lie before the framework's own timeout, which ends the run and its evidence."""
    group, limit = _group_timeout(watch), ceiling(watch, limits)
    if group is None or limit + _confirm_after(limit) < group:
        return None
    return (
        f"`stall.timeout` of {limit:.0f} s does not lie before the process group's own timeout of {group:.0f} s,"
        f" which would end the ranks and their evidence first; {group * SHARE_OF_GROUP_TIMEOUT:.0f} s or less does"
    )


def _observe_rank(
    watch: StallWatch, rank: int, content: RankActivity, sample: ActivitySample, node: str, now: float
) -> StallWatch:
    before = watch.ranks.get(rank)
    if before is not None and sample["m"] <= before.sampled:
        return watch
    inside = content.get("inside")
    if content.get("alive") and inside is not None and inside.get("unseen"):
        return watch  # what it did since is not known, and so is not nothing
    view = look(before, content, sample, node, now)
    if before is not None and view.phase != before.phase and _changed(view.phase, before.phase):
        watch = replace(watch, held_at=now)
    if view.progress_at is not None and (before is None or view.progress_at != before.progress_at):
        watch = _advance(watch, view.progress_at, before, now, STEADY_S if sample.get("steady") else BLIND_S)
    if before is not None and active(before, view):
        watch = replace(watch, activity_at=now)
    if isinstance(watch.ranks, _OwnRanks):
        watch.ranks[rank] = view
        return watch
    return replace(watch, ranks={**watch.ranks, rank: view})


def _changed(before: tuple[str, float, float] | None, now: tuple[str, float, float] | None) -> bool:
    """Whether two looks show different phases; the begin of one and the same is only known to the sampling."""
    if before is None or now is None:
        return before is not now
    return before[0] != now[0] or abs(before[1] - now[1]) > SAME_ADVANCE_S


def _advance(watch: StallWatch, moment: float, before: RankView | None, now: float, blind: float) -> StallWatch:
    """One more sign of progress of the run; the gap before it is an interval, of which `blind` at most was unseen."""
    last = watch.progress_at
    if last is None:
        return replace(watch, progress_at=moment, recorded_at=moment, moves=1)
    if moment <= last:
        return watch
    watch = replace(watch, progress_at=moment, moves=watch.moves + 1)
    if moment - (watch.recorded_at or last) < SAME_ADVANCE_S:
        return watch
    # While nobody looked, steps may have gone on: only what a look has seen to be idle counts in full.
    seen = before.seen if before else now
    interval = min(moment - last, max(0.0, seen - last) + min(now - seen, blind))
    return replace(watch, recorded_at=moment, intervals=(*watch.intervals, interval)[-INTERVALS:])


def _activity_of_all(watch: StallWatch) -> StallWatch:
    """CPU counts when every rank spends it; with GPUs, where waiting spins, main threads that compute do instead."""
    live = list(watch.live.values())
    gpus = any(view.gpus for view in live)
    moments = [view.fresh_at if gpus else view.busy_at for view in live]
    seen = [moment for moment in moments if moment is not None]
    if not live or len(seen) < len(live) or (gpus and watch.progress_at is None):
        return watch
    return replace(watch, activity_at=max(min(seen), watch.activity_at or watch.begun))


def _started(watch: StallWatch) -> bool:
    return len(watch.intervals) >= FIRST_MOVES or any(view.beats >= FIRST_STEPS for view in watch.ranks.values())


def _goes_on_by_collectives(watch: StallWatch) -> bool:
    most = max((view.collectives for view in watch.ranks.values()), default=0)
    return most >= FIRST_COLLECTIVES and len(watch.intervals) >= FIRST_SPELLS


def _idle(watch: StallWatch, limits: StallLimits, horizon: float) -> tuple[float, float, str]:
    """How long nothing has moved, how long that may be, and how to say it."""
    moved = max(watch.begun, watch.progress_at or watch.begun, watch.held_at or watch.begun)
    acted = max(moved, watch.activity_at or moved)
    top, what = ceiling(watch, limits), "progress"
    if _started(watch):
        limit = min(max(FACTOR * max(watch.intervals, default=0.0), FLOOR_S), top)
    elif _goes_on_by_collectives(watch):
        limit = min(max(FACTOR * max(watch.intervals, default=0.0), AFTER_COLLECTIVES_S), top)
    elif watch.activity_at is not None and watch.moves == 0 and not _frameworks(watch):
        limit, what = top, "activity"  # no steps will come that we could see
    else:
        limit = limits.startup_timeout
        what = "progress" if watch.moves else _UNSEEN_STEP if watch.activity_at is not None else "first step"
    limit = max([limit, *_phase_limits(watch)])
    since, patience = horizon - acted, max(limit, top, _default_ceiling(watch))
    if _started(watch) and horizon - moved >= patience:
        since, limit = horizon - moved, patience
    return max(0.0, since), limit, _reason(what, watch)


def _phase_limits(watch: StallWatch) -> list[float]:
    return [view.phase[2] for view in watch.live.values() if view.phase is not None]


def _reason(what: str, watch: StallWatch) -> str:
    phases = sorted({view.phase[0] for view in watch.live.values() if view.phase is not None})
    during = f" in phase {', '.join(f'`{name}`' for name in phases)}" if phases else ""
    return f"no {what}{during}"


def _remember(watch: StallWatch, suspected: bool, horizon: float, limit: float) -> StallWatch:
    if not suspected:
        return replace(watch, suspected=None, confirmed=False)
    if watch.suspected is None or watch.suspected[1] != watch.progress_at:
        return replace(watch, suspected=(horizon, watch.progress_at), confirmed=False)
    return replace(watch, confirmed=horizon - watch.suspected[0] >= _confirm_after(limit))


def _confirm_after(limit: float) -> float:
    return min(max(CONFIRM_SHARE * limit, CONFIRM_MIN_S), CONFIRM_MAX_S)


def _stragglers(watch: StallWatch, horizon: float, limit: float) -> tuple[int, ...]:
    """Ranks whose own progress is older than the limit, while the run moves."""
    if watch.progress_at is None or horizon - watch.progress_at >= limit:
        return ()
    moved = {rank: view.progress_at for rank, view in watch.live.items() if view.progress_at is not None}
    return tuple(sorted(rank for rank, moment in moved.items() if horizon - moment >= limit))


def _frameworks(watch: StallWatch) -> bool:
    return any(view.frameworks for view in watch.ranks.values())


def _group_timeout(watch: StallWatch) -> float | None:
    return min((view.group_timeout for view in watch.ranks.values() if view.group_timeout), default=None)


def _default_ceiling(watch: StallWatch) -> float:
    backends = [view.backend for view in watch.ranks.values() if view.backend]
    # Until a group exists, GPUs mean NCCL.
    nccl = any("nccl" in name for name in backends) if backends else any(v.gpus for v in watch.ranks.values())
    top = CEILING_NCCL_S if nccl else CEILING_S
    group = _group_timeout(watch)
    return top if group is None else min(top, SHARE_OF_GROUP_TIMEOUT * group)
