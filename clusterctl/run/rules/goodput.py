"""Computes the goodput of a run: the share of its wall time in which the run made progress that was not lost. Pure.

The wall time is the sum of these parts:

* **start**: from `up`, or from the end of its wait for GPUs, to the first step of the first attempt.
* **restart**: from the end of an attempt to the first step of the next attempt.
* **stalled**: without progress for longer than the limit of the stall detection, counted from the last progress.
* **lost**: work that a later attempt did again: by the numbers of the steps, if the job counts them over all attempts;
  else the work after the checkpoint from which the later attempt resumed.
* **stopping**: after the end of the last attempt, until the run was over.
* **productive**: the rest.

If no attempt has a known step, an attempt counts as productive from the start of its workers on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clusterctl.run.rules.state import AttemptTimes, RunPhase, RunState

PARTS = ("productive", "start", "restart", "stalled", "lost", "stopping")
"""The parts of the wall time: each is an attribute of `Goodput`, with the suffix `_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The wall time of a run in seconds, and its parts, whose sum is `wall_s`.

    Attributes:
        restarts: The number of attempts after the first.
        stalls: The number of stalls.
        lost_steps: Steps that a later attempt made again; `None` if the job does not tell the numbers of its steps.
        is_lost_known: Whether `lost_s` is complete. Otherwise `productive_s` is an upper bound.
        has_steps: Whether a step of any attempt is known. Otherwise `productive_s` includes the imports of the job.
    """

    wall_s: float = 0.0
    productive_s: float = 0.0
    start_s: float = 0.0
    restart_s: float = 0.0
    stalled_s: float = 0.0
    lost_s: float = 0.0
    stopping_s: float = 0.0
    restarts: int = 0
    stalls: int = 0
    lost_steps: int | None = 0
    is_lost_known: bool = True
    has_steps: bool = False

    @property
    def ratio(self) -> float | None:
        """The goodput from 0 to 1; `None` for a run without wall time."""
        return min(1.0, self.productive_s / self.wall_s) if self.wall_s > 0.0 else None

    @property
    def is_upper_bound(self) -> bool:
        """Whether the true goodput may be lower, because steps are unknown."""
        return not self.has_steps or not self.is_lost_known


class _Loss(NamedTuple):
    """The work of an attempt that later attempts did again.

    Attributes:
        steps: The number of steps; `None` if it is unknown.
        share: The share of these steps in all steps of the attempt.
        since: The time since which all work is lost, if `steps` is unknown; `None` if this is unknown too.
    """

    steps: float | None = 0.0
    share: float = 0.0
    since: float | None = math.inf


class _Attempt(NamedTuple):
    began: float
    ended: float
    times: AttemptTimes


def measure_goodput(state: RunState, now: float) -> Goodput:
    """Return the goodput of a run so far; all parts are 0 if the run was never created.

    Args:
        state: The state of the run.
        now: The head's wall clock; ignored if the run is over.
    """
    if state.created is None:
        return Goodput(lost_steps=None, is_lost_known=False)
    begin = state.created if state.waited_until is None else state.waited_until
    end = max(begin, now if state.ended is None else state.ended)
    begin = end if state.phase is RunPhase.WAITING else begin
    attempts = _list_attempts(state, end)
    has_steps = any(attempt.times.first_step_at is not None for attempt in attempts)
    losses = _find_losses([attempt.times for attempt in attempts], has_steps=has_steps)
    seconds = dict.fromkeys(PARTS, 0.0)
    cursor, waits_for = begin, "start"
    for attempt, loss in zip(attempts, losses, strict=True):
        times = attempt.times
        over = min(max(attempt.ended, cursor), end)
        works = times.first_step_at if has_steps else attempt.began if times.started is None else times.started
        works = over if works is None else min(max(works, cursor), over)
        for part, left, right in ((waits_for, cursor, works), ("productive", works, over)):
            stalled = _measure_overlap(times.stalls, left, right)
            seconds["stalled"] += stalled
            seconds[part] += right - left - stalled
        lost_from = (
            works if loss.steps is not None else over if loss.since is None else min(max(loss.since, works), over)
        )
        lost = over - lost_from - _measure_overlap(times.stalls, lost_from, over)
        lost *= 1.0 if loss.steps is None else loss.share
        seconds["productive"] -= lost
        seconds["lost"] += lost
        cursor, waits_for = over, "restart"
    is_restarting = state.phase is RunPhase.RESTARTING
    seconds["restart" if is_restarting else "stopping" if attempts else "start"] += end - cursor
    steps = [loss.steps for loss in losses]
    return Goodput(
        wall_s=end - begin,
        **{f"{part}_s": value for part, value in seconds.items()},
        restarts=max(0, len(attempts) - 1),
        stalls=sum(len(attempt.times.stalls) for attempt in attempts),
        lost_steps=None if None in steps else round(sum(count for count in steps if count is not None)),
        is_lost_known=all(loss.steps is not None or loss.since is not None for loss in losses),
        has_steps=has_steps,
    )


def _list_attempts(state: RunState, end: float) -> list[_Attempt]:
    attempts = [
        _Attempt(past.began or 0.0, past.ended if past.times.decided is None else past.times.decided, past.times)
        for past in state.earlier_attempts
    ]
    if state.running_since is not None and all(past.number != state.attempt for past in state.earlier_attempts):
        ended = state.times.decided if state.times.decided is not None else _find_last_exit(state)
        attempts.append(_Attempt(state.running_since, end if ended is None else ended, state.times))
    return attempts


def _find_last_exit(state: RunState) -> float | None:
    """Return the time of the last exit, on the head's clock; `None` if a rank runs or its clock is unknown."""
    exits = []
    for worker in state.workers.values():
        clock = state.nodes[worker.node].clock
        if worker.exited is None or clock is None:
            return None
        exits.append(worker.exited.latest + clock[0])
    return max(exits, default=None)


def _find_losses(attempts: Sequence[AttemptTimes], *, has_steps: bool) -> list[_Loss]:
    """Return the loss of each attempt. An attempt without a step did no work: it loses and repeats nothing."""
    found: list[_Loss] = []
    resumed: float | None = math.inf
    """The lowest first step of all later attempts; infinite if there is none, and `None` if it is unknown."""
    saved: float | None = math.inf
    """The earliest time of a checkpoint from which a later attempt resumed."""
    for times in reversed(attempts):
        first, last = times.first_step, times.last_step
        if (has_steps and times.first_step_at is None) or resumed == math.inf:
            found.append(_Loss())
        elif resumed is None or first is None or last is None or last < first:
            found.append(_Loss(steps=None, since=saved))
        else:
            repeated = max(0.0, last + 1 - max(resumed, first))
            found.append(_Loss(repeated, repeated / (last + 1 - first)))
        if times.first_step_at is not None or not has_steps:
            resumed = None if resumed is None or first is None else min(resumed, first)
            saved = None if saved is None or times.resumed_from_at is None else min(saved, times.resumed_from_at)
    return found[::-1]


def _measure_overlap(spans: Sequence[tuple[float, float | None]], begin: float, end: float) -> float:
    """Return the seconds between `begin` and `end` in which any of the spans lasts; the spans are in order of time."""
    seconds, cursor = 0.0, begin
    for span in spans:
        left, right = max(span[0], cursor), end if span[1] is None else min(span[1], end)
        if right > left:
            seconds, cursor = seconds + right - left, right
    return seconds
