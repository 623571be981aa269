"""Judges a run that makes progress: finds ranks that the others wait for, and slow starts.

A rank is slow if it waits for its peers much less than the others do. Without collectives, the use of CPUs and
the waits for sockets show who waits. The reason is taken from timings, health problems and wait channels of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from clusterctl.formatting import describe_duration, fold_ranks
from clusterctl.why.evidence_types import Evidence, IdleRank, Rank, RankSnapshot, RankTimeUse
from clusterctl.why.hang import format_waiting
from clusterctl.why.stack_position import (
    UNKNOWN_POSITION,
    WAITS,
    StackPosition,
    describe_kernel_wait,
    is_waiting_for_peers,
    is_waiting_for_storage,
    locate_rank,
    name_culprits,
)
from clusterctl.why.verdict import Confidence, Fault, ProblemKind, Verdict, Waiting

LONG_WAIT_S = 60.0
"""Waits of fewer than this many seconds are normal."""
LONG_START_S = 60.0
"""Starts that take fewer than this many seconds are normal."""
_OUTLIER_RATIO = 0.25
"""A slow rank waits for its peers less than the others by at least this share of time.

A smaller difference may be chance, because 3 parts have only 13 samples each.
"""
_MAX_SHARE = 1 / 3
_ALWAYS_BEGUN = 0.97
"""If no rank is outside of collectives for longer, no rank computes, or the CPU runs ahead of the GPU."""
_SHORT_OF_CPU = 0.2
_ALL_SHORT_OF_CPU = 0.6
_FAULTS_PER_S = 20.0
_FREQUENT_SHARE = 0.3
_SLOWER_CLOCK = 0.85
_SLOW_TEXT = {
    "it reads from an empty pipe": "it waits for data from a pipe",
    "it writes to a full pipe": "it waits for the reader of its pipe",
    "it polls": "it waits for data, or for a child (it polls)",
}
"""Maps the description of a wait in a hang to the description of the same wait of a slow rank."""
_IMPORTS = "<frozen importlib"


# --- ranks that the others wait for


def find_blocking_ranks(idle_ranks: Mapping[int, IdleRank], rank_count: int) -> tuple[int, ...]:
    """Return the ranks in no collective while most ranks wait in a collective, without progress for `LONG_WAIT_S`.

    Args:
        idle_ranks: The ranks without progress.
        rank_count: The number of all ranks. If one of them makes progress or is unknown, the result is empty.
    """
    if len(idle_ranks) < rank_count or any(one.seconds < LONG_WAIT_S for one in idle_ranks.values()):
        return ()
    free = tuple(sorted(rank for rank, one in idle_ranks.items() if not one.is_in_collective))
    return free if 2 * len(free) <= rank_count else ()


def judge_blocking_ranks(evidence: Evidence) -> Verdict | None:
    """Return a verdict on ranks that the others have waited for at least `LONG_WAIT_S`; `None` without such ranks."""
    idle_ranks = evidence.idle_ranks
    named = find_blocking_ranks(idle_ranks, len(evidence.ranks))
    if not named:
        return None
    waiting = fold_ranks(idle_ranks.keys() - set(named))
    since = describe_duration(min(one.seconds for one in idle_ranks.values()))
    activities = {idle_ranks[rank].activity for rank in named}
    what = f": {activities.pop()}" if len(activities) == 1 and "" not in activities else ""
    return Verdict(
        kind=ProblemKind.SLOW,
        cls=Fault.SLOW,
        confidence=_confidence(evidence, named),
        summary=f"ranks {waiting} have waited in a collective for {since} for {evidence.name_ranks(named)}{what}",
        culprits=name_culprits(
            (rank for rank in evidence.ranks if rank.rank in named),
            lambda rank: idle_ranks[rank.rank].activity or "it is in no collective",
            _locate_own_work,
        ),
        waiting=(Waiting(ranks=waiting, where=None, op="wait in collectives"),),
        next_commands=(
            f"clusterctl stacks {evidence.run} --rank {fold_ranks(named)}",
            f"clusterctl logs {evidence.run}",
        ),
    )


def _confidence(evidence: Evidence, named: Sequence[int]) -> Confidence:
    """Return the confidence of a verdict: likely if it blames one rank or all ranks of one node."""
    nodes = {rank.node for rank in evidence.ranks if rank.rank in named}
    is_whole_node = len(nodes) == 1 and sum(rank.node in nodes for rank in evidence.ranks) == len(named)
    return Confidence.LIKELY if len(named) == 1 or is_whole_node else Confidence.AMBIGUOUS


def _locate_own_work(rank: Rank) -> StackPosition:
    """Return the position of a rank. If the rank waits for others in its snapshot, the position is unknown."""
    position = locate_rank(rank.snapshot)
    return UNKNOWN_POSITION if position.where is None or position.activity in WAITS else position


def find_stragglers(wait_shares: Mapping[int, Sequence[float] | None]) -> tuple[int, ...]:
    """Return the ranks that wait much less for their peers than most ranks, so that the others wait for them.

    A straggler has to wait less in each part of the time. A rank with a single pause is no straggler.

    Args:
        wait_shares: For each rank: the share of time that it waits, in each part of the time; `None` if unknown.
    """
    counted = {rank: shares for rank, shares in wait_shares.items() if shares is not None}
    if len(wait_shares) < 2 or len(counted) < len(wait_shares):
        return ()
    found = set(counted)
    for part in zip(*counted.values(), strict=True):
        usual = median(sorted(part, reverse=True)[: max(1, len(part) // 2)])
        found &= {
            rank
            for rank, share in zip(counted, part, strict=True)
            if usual - share >= _OUTLIER_RATIO and share <= _MAX_SHARE * usual
        }
    return tuple(sorted(found)) if 2 * len(found) <= len(wait_shares) else ()


def find_slow_ranks(timings: Mapping[int, RankTimeUse]) -> tuple[int, ...]:
    """Return the stragglers by the timings of all ranks (see `find_stragglers`)."""
    return find_stragglers({rank: timing.wait_shares or timing.idle_shares for rank, timing in timings.items()})


def judge_stragglers(evidence: Evidence) -> Verdict | None:
    """Return a verdict on slow ranks, or on a lack of CPU time of all ranks; `None` if neither is found."""
    timings = evidence.timings
    found = find_slow_ranks(timings)
    if not found:
        return _judge_common_shortage(timings)
    slow = [rank for rank in evidence.ranks if rank.rank in found]
    others = [rank for rank in timings if rank not in found]
    share = median(_mean_wait(timings[rank]) for rank in others)
    reasons = {r.rank: describe_reason(timings, r.rank, evidence.health_problems.get(r.node, ())) for r in slow}
    common = set(reasons.values())
    why = f": {common.pop()}" if len(common) == 1 and "" not in common else ""
    are = f"{evidence.name_ranks(found)} {'are' if len(found) > 1 else 'is'}"
    basis = timings[found[0]].idle_basis
    they = f"wait for it {share:.0%} of the time"
    if basis:
        they = f"probably {they}, by their {basis}"

    def describe(rank: Rank) -> str:
        reason = reasons[rank.rank]
        waits = f"it waits for its peers {_mean_wait(timings[rank.rank]):.0%} of the time"
        return f"{waits}; {reason}" if reason else waits

    return Verdict(
        kind=ProblemKind.SLOW,
        cls=Fault.SLOW,
        confidence=_confidence(evidence, found),
        summary=f"{are} slower than the others, which {they}{why}",
        culprits=name_culprits(slow, describe, _locate_own_work),
        waiting=(
            Waiting(
                ranks=fold_ranks(others), where=None, op="wait for their peers" if basis else "wait in collectives"
            ),
        ),
        next_commands=(f"clusterctl stacks {evidence.run} --rank {fold_ranks(found)}", "clusterctl stats"),
    )


def describe_reason(timings: Mapping[int, RankTimeUse], rank: int, troubles: Sequence[str]) -> str:
    """Return why a rank is slower than the others; "" if the measurements show no reason."""
    own, others = timings[rank], [timing for other, timing in timings.items() if other != rank]
    if troubles:
        return troubles[0]
    if own.cpu_starved_share >= _SHORT_OF_CPU and own.cpu_starved_share >= 2 * median(
        timing.cpu_starved_share for timing in others
    ):
        return f"it was ready to run but had no CPU for {own.cpu_starved_share:.0%} of the time"
    if own.disk_faults_per_s >= _FAULTS_PER_S and own.disk_faults_per_s >= 5 * median(
        timing.disk_faults_per_s for timing in others
    ):
        return f"it waited {own.disk_faults_per_s:.0f} times a second until memory was read from a disk (swap)"
    clocks = [timing.gpu_clock_mhz for timing in others if timing.gpu_clock_mhz]
    if own.gpu_clock_mhz and clocks and own.gpu_clock_mhz < _SLOWER_CLOCK * median(clocks):
        return f"its GPUs run at {own.gpu_clock_mhz:.0f} MHz, those of others at {median(clocks):.0f}"
    waits = [(share, text) for text, share in own.other_waits.items() if share >= _FREQUENT_SHARE]
    if waits:
        return _SLOW_TEXT.get(max(waits)[1], max(waits)[1])
    return f"it computes ({own.cpu_cores:.1f} cores)" if own.cpu_cores >= 0.5 else ""


def _judge_common_shortage(timings: Mapping[int, RankTimeUse]) -> Verdict | None:
    """Return a verdict without culprits if all ranks lack CPU time; otherwise `None`."""
    shares = [timing.cpu_starved_share for timing in timings.values()]
    if min(shares, default=0.0) < _ALL_SHORT_OF_CPU:
        return None
    return Verdict(
        kind=ProblemKind.SLOW,
        cls=Fault.SLOW,
        confidence=Confidence.AMBIGUOUS,
        summary=f"all ranks were ready to run but had no CPU for {median(shares):.0%} of the time",
        next_commands=("clusterctl stats",),
    )


def describe_timings(timings: Mapping[int, RankTimeUse]) -> str:
    """Return how the ranks spend their time, as a part of a sentence; "" if unknown."""
    shares = [_mean_wait(timing) for timing in timings.values() if timing.wait_shares]
    if not shares or len(shares) < len(timings) or describe_unknown_waits(timings):
        return ""
    waits: dict[str, float] = {}
    for timing in timings.values():
        for text, share in timing.other_waits.items():
            waits[text] = waits.get(text, 0.0) + share / len(timings)
    seconds = median(timing.seconds for timing in timings.values())
    cores = median(timing.cpu_cores for timing in timings.values())
    parts = [f"{median(shares):.0%} in collectives"]
    parts += [f"{share:.0%} where {text}" for text, share in waits.items() if share >= 0.1]
    return f"of the last {seconds:.0f} s they spent {', '.join(parts)}, {cores:.1f} cores each"


def describe_unknown_waits(timings: Mapping[int, RankTimeUse]) -> str:
    """Return why the waits of the ranks do not show slow ranks; "" if they do."""
    if blind := next((one.blindness for one in timings.values() if one.blindness), ""):
        return f"slow ranks are unknown: {blind}"
    if not timings or any(one.wait_shares is None or _mean_wait(one) < _ALWAYS_BEGUN for one in timings.values()):
        return ""
    return (
        "slow ranks are unknown, because every rank always has an unfinished collective, as with NCCL if the CPU runs "
        "ahead of the GPU; with `TORCH_NCCL_ENABLE_TIMING=1` clusterctl counts the waits on the GPU"
    )


def _mean_wait(timing: RankTimeUse) -> float:
    shares = timing.wait_shares or timing.idle_shares
    return sum(shares) / len(shares) if shares else 0.0


# --- slow starts


def judge_slow_start(evidence: Evidence) -> Verdict | None:
    """Return a verdict on ranks that are behind the others long after the start; `None` if no rank is late."""
    snapshots = {r.rank: r.snapshot for r in evidence.ranks if r.snapshot is not None and not r.snapshot.error}
    seconds = evidence.no_progress_s
    if seconds is None or seconds < LONG_START_S or len(snapshots) < len(evidence.ranks):
        return None
    waiting = [rank for rank, snapshot in snapshots.items() if is_waiting_for_peers(snapshot)]
    late = [rank for rank in evidence.ranks if rank.rank not in waiting]
    if not waiting and snapshots and all(map(is_importing, snapshots.values())):
        # The ranks wait for the file system with the modules, or lack CPU time.
        blocked = [r for r, one in snapshots.items() if is_waiting_for_storage(one) or one.state == "D"]
        more = f"; {len(blocked)} of them wait for the file system of the modules" if blocked else ""
        places = {locate_rank(snapshot).where for snapshot in snapshots.values()}
        place = places.pop() if len(places) == 1 else None
        at = f" ({place})" if place else ""
        return Verdict(
            kind=ProblemKind.START,
            cls=Fault.SLOW,
            confidence=Confidence.AMBIGUOUS,
            summary=f"all ranks still import modules{at} {seconds:.0f} s after the start{more}",
            waiting=(Waiting(ranks=fold_ranks(snapshots), where=place, op="import"),),
            next_commands=(f"clusterctl stacks {evidence.run}", "clusterctl exec -- df -hT ."),
        )
    if not waiting or not late:
        return None
    numbers = [rank.rank for rank in late]
    activity = _describe_start_activity(snapshots[numbers[0]])
    return Verdict(
        kind=ProblemKind.START,
        cls=Fault.SLOW,
        confidence=_confidence(evidence, numbers),
        summary=f"{evidence.name_ranks(numbers)} {activity} {seconds:.0f} s after the start; "
        f"{format_waiting(waiting)} for their peers",
        culprits=name_culprits(late, lambda rank: _describe_start_activity(snapshots[rank.rank]), _locate_start),
        waiting=(Waiting(ranks=fold_ranks(waiting), where=locate_rank(snapshots[waiting[0]]).where, op=None),),
        next_commands=(
            f"clusterctl stacks {evidence.run} --rank {fold_ranks(numbers)}",
            f"clusterctl logs {evidence.run}",
        ),
    )


def is_importing(snapshot: RankSnapshot) -> bool:
    """Return whether a rank is importing a module."""
    return any(frame.file.startswith(_IMPORTS) for frame in snapshot.frames or ())


def _describe_start_activity(snapshot: RankSnapshot) -> str:
    wait = describe_kernel_wait(snapshot)
    return ("still imports modules" if is_importing(snapshot) else "has not joined yet") + (
        f" ({wait})" if wait else ""
    )


def _locate_start(rank: Rank) -> StackPosition:
    position = locate_rank(rank.snapshot)
    return replace(position, op="import") if rank.snapshot is not None and is_importing(rank.snapshot) else position
