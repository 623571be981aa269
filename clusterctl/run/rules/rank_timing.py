"""By which part of its time each rank of a run that moves waited for its peers, from a few of the nodes' samples.

`status` asks it of every run that it shows, so only four samples of each node are read: the first of the last minutes,
two between, the newest.

What ranks had begun and ended when they were last seen, and for how long that had not changed, by nodes' samples.

What the ranks of a run that moves did with their time of late, from the nodes' samples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Literal

from clusterctl.agent.protocol.record_types import ActivitySample, RankActivity, WorkerStatusSample
from clusterctl.formatting import format_size
from clusterctl.validation import samples
from clusterctl.why.evidence import IdleRank, RankTiming
from clusterctl.why.slowness import LONG_WAIT_S
from clusterctl.why.stack_position import describe_wchan

WINDOW_S = 300.0
MIN_SPAN_S = 40.0
PARTS = 3
"""Into so many parts the time is cut: who is slow is so in each of them, who was late once is not."""
_ACTIVITY_MARK = b'"activity"'
_MIN_LOOKS, _MIN_COLLECTIVES = 13, 2
"""In each part of the time: fewer looks, or collectives, say nothing of a share."""
_SCAN_BYTES = 4096
"""Bytes between which lines are looked at one by one."""
_MOMENT = re.compile(rb'"m":\s*([0-9.]+)')
_ATTEMPT = re.compile(rb'"attempt":\s*([0-9]+)')

WaitShares = tuple[float, ...]
"""The share of each part of the time."""


def measure_wait_shares(nodes: Iterable[tuple[ActivitySample, bytes]], attempt: int) -> dict[int, WaitShares | None]:
    """Return what each rank waited for its peers; `None` of one that was not counted. Those not seen are left out.

    Args:
        nodes: The newest sample of each node, and what stands at the end of its samples.
        attempt: Which attempt.
    """
    found: dict[int, WaitShares | None] = {}
    for last, end in nodes:
        if not {"m", "ranks"} <= last.keys() or last.get("attempt") != attempt:
            continue
        looks = [*_parse_earlier_samples(end, last), last]
        for rank, own in last["ranks"].items():
            samples_of_rank = [(look["m"], one) for look in looks if (one := look["ranks"].get(rank)) is not None]
            samples_of_rank = [
                each for each in samples_of_rank if each[1].get("alive") and each[1].get("pid") == own.get("pid")
            ]
            if len(samples_of_rank) == PARTS + 1 and samples_of_rank[-1][0] - samples_of_rank[0][0] >= MIN_SPAN_S:
                found[int(rank)] = compute_wait_shares([one for _, one in samples_of_rank])
    return found


def has_recent_progress(newest: Iterable[ActivitySample], attempt: int, seconds: float) -> bool:
    """Return whether any rank has made progress so lately: then none is waited for since long."""
    ranks = [
        own for sample in newest if sample.get("attempt") == attempt for own in (sample.get("ranks") or {}).values()
    ]
    statuses = [_get_status(own) for own in ranks if own.get("alive") and get_collective_numbers(own)]
    ages = [age for status in statuses if status is not None and (age := status.get("progress_age_s")) is not None]
    return any(age < seconds for age in ages)


def are_all_counted(newest: Iterable[ActivitySample]) -> bool:
    """Return whether all ranks tell how often they were looked at; where one does not, nobody can be compared."""
    return all(_read_counter(own, "looks") for sample in newest for own in (sample.get("ranks") or {}).values())


def _parse_earlier_samples(data: bytes, last: ActivitySample) -> list[ActivitySample]:
    """Return the first sample of the last minutes and those between, of the same attempt; none where few are."""
    end = data.rfind(b"\n") + 1
    low, high = 0, end
    while high - low > _SCAN_BYTES:
        middle = (low + high) // 2
        line = _find_line(data, middle, end)
        if line is None or _is_in_window(line[1], last):
            high = middle
        else:
            low = line[0] + len(line[1]) + 1
    first = _find_line(data, low, end)
    while first is not None and not _is_in_window(first[1], last):
        first = _find_line(data, first[0] + len(first[1]) + 1, end)
    if first is None:
        return []
    cuts = [first[0] + part * (end - first[0]) // PARTS for part in range(1, PARTS)]
    lines = [first[1], *(found[1] for cut in cuts if (found := _find_line(data, cut, end)) is not None)]
    return [one for one in samples.parse_samples(lines, "activity", "m", "ranks", "attempt") if _is_before(one, last)]


def _find_line(data: bytes, offset: int, end: int) -> tuple[int, bytes] | None:
    """Return the first whole line with activity that begins at `place` or behind it, and where it begins."""
    begin = offset and data.find(b"\n", offset - 1, end) + 1
    mark = data.find(_ACTIVITY_MARK, begin, end) if begin or not offset else -1
    if mark < 0:
        return None
    begin = max(begin, data.rfind(b"\n", begin, mark) + 1)
    return begin, data[begin : data.find(b"\n", mark)]


def _is_in_window(line: bytes, last: ActivitySample) -> bool:
    moment, attempt = _MOMENT.search(line), _ATTEMPT.search(line)
    if moment is None or attempt is None:
        return False
    return int(attempt[1]) == last["attempt"] and float(moment[1]) >= last["m"] - WINDOW_S


def _is_before(one: ActivitySample, last: ActivitySample) -> bool:
    return one["attempt"] == last["attempt"] and 0 < last["m"] - one["m"] <= WINDOW_S


# --- of a rank


def compute_wait_shares(looks: list[RankActivity]) -> WaitShares | None:
    """Return the shares of all parts of the time in which a rank was looked at; `None` where too little was counted."""
    samples_of_rank = [_count_looks(own) for own in looks]
    first, last = samples_of_rank[0], samples_of_rank[-1]
    positions = [first[0] + part * (last[0] - first[0]) / PARTS for part in range(1, PARTS)]
    cuts = [min(samples_of_rank, key=lambda counts: abs(counts[0] - at)) for at in positions]
    parts = [_wait_share(one, other) for one, other in pairwise([first, *cuts, last])]
    status = tuple(part for part in parts if part is not None)
    return status if len(status) == PARTS else None


def _count_looks(own: RankActivity) -> tuple[int, int, int]:
    """Return how often a rank was looked at, how often it waited then, and how many collectives it has begun."""
    begun = max((begun for begun, _ in get_collective_numbers(own).values()), default=0)
    return _read_counter(own, "looks"), _read_counter(own, "held"), begun


def _read_counter(own: RankActivity, what: Literal["looks", "held"]) -> int:
    """Return a count of a rank's; 0 where it tells none."""
    status = _get_status(own)
    return 0 if status is None else status.get(what) or 0


def _get_status(own: RankActivity) -> WorkerStatusSample | None:
    """Return what a rank tells of itself."""
    return own.get("inside")


def get_collective_numbers(own: RankActivity) -> Mapping[str, tuple[int, int]]:
    """Return what a rank has begun and ended last, by group; nothing where it does not tell, as older agents do not."""
    status = _get_status(own)
    return (status.get("seq") if status else None) or {}


def _wait_share(one: tuple[int, int, int], other: tuple[int, int, int]) -> float | None:
    looks, waited, begun = other[0] - one[0], other[1] - one[1], other[2] - one[2]
    return None if looks < _MIN_LOOKS or begun < _MIN_COLLECTIVES else waited / looks


_MAX_AGE_S = 12.0
"""Nodes whose ranks move look every two seconds, and write down one look in five."""
_LINES_BETWEEN = 6
"""So many lines lie between the two looks by which it is told what a rank does."""
_BUSY_CORES, _MUCH_BYTES_S = 0.5, 100_000.0
"""Of a core, and bytes a second: what the shim itself writes is less."""


def read_counts_before(
    lines: Mapping[str, Sequence[bytes]], attempt: int, moments: Mapping[str, float]
) -> dict[int, Mapping[str, tuple[int, int]]]:
    """Return the last number begun, and ended, by rank and process group, shortly before a moment.

    Args:
        lines: The newest samples of each node.
        attempt: Which attempt.
        moments: The moment on each node's own clock (seconds since the epoch).
    """
    found: dict[int, Mapping[str, tuple[int, int]]] = {}
    for node, own in lines.items():
        newest = next((s for s in _parse_newest_first(own, attempt) if s["t"] <= moments[node]), None)
        if newest is not None and moments[node] - newest["t"] <= _MAX_AGE_S:
            for rank, activity in newest["ranks"].items():
                if activity.get("alive") and (numbers := get_collective_numbers(activity)):
                    found[int(rank)] = {group: (begun, ended) for group, (begun, ended) in numbers.items()}
    return found


def find_idle_ranks(lines: Mapping[str, Sequence[bytes]], attempt: int) -> dict[int, IdleRank]:
    """Return for how long each rank has made no progress, and what it does meanwhile; nothing of what is not counted.

    Args:
        lines: The newest samples of each node.
        attempt: Which attempt.
    """
    found: dict[int, IdleRank] = {}
    for own in lines.values():
        looks = _parse_newest_first(own, attempt)
        newest = next(looks, None)
        if newest is not None:
            found |= _find_idle_ranks_of_node(newest, looks)
    return found


def _find_idle_ranks_of_node(newest: ActivitySample, before: Iterator[ActivitySample]) -> dict[int, IdleRank]:
    ages = {rank: age for rank, activity in newest["ranks"].items() if (age := _measure_idle_s(activity)) is not None}
    # To read a line takes up to a millisecond: no further one where ranks move.
    moves = any(age < LONG_WAIT_S for age in ages.values())
    older = [newest, *(() if moves else islice(before, _LINES_BETWEEN))][-1]
    return {
        int(rank): IdleRank(
            seconds=age,
            in_collective=any(begun > ended for begun, ended in get_collective_numbers(newest["ranks"][rank]).values()),
            activity=_describe_work(newest["ranks"][rank], older["ranks"].get(rank), newest["m"] - older["m"]),
        )
        for rank, age in ages.items()
    }


def _measure_idle_s(activity: RankActivity) -> float | None:
    """Return for how many seconds a rank has made no progress; `None` of one that is gone, or that is not counted."""
    numbers = _get_status(activity)
    return (
        numbers.get("progress_age_s")
        if activity.get("alive") and numbers and get_collective_numbers(activity)
        else None
    )


def _parse_newest_first(lines: Sequence[bytes], attempt: int) -> Iterator[ActivitySample]:
    readable = samples.parse_samples(reversed(lines), "activity", "t", "m", "ranks", "attempt")
    return (sample for sample in readable if sample["attempt"] == attempt)


def _describe_work(now: RankActivity, earlier: RankActivity | None, seconds: float) -> str:
    """Return in words what a rank spends its time with; "" where that does not show."""
    if earlier is None or seconds <= 0 or earlier.get("pid") != now.get("pid"):
        return ""
    writes = ((now.get("written") or 0) - (earlier.get("written") or 0)) / seconds
    reads = ((now.get("read") or 0) - (earlier.get("read") or 0)) / seconds
    if max(writes, reads) >= _MUCH_BYTES_S:
        return f"it {'writes' if writes >= reads else 'reads'} {format_size(max(writes, reads))} a second"
    waits = describe_wchan(now.get("wchan"))
    busy = (now.get("cpu_s") or 0.0) - (earlier.get("cpu_s") or 0.0) >= _BUSY_CORES * seconds
    return waits or ("it computes" if busy else "")


def measure_rank_timings(
    lines: Mapping[str, Sequence[bytes]], attempt: int, *, max_lines: int = 40
) -> dict[int, RankTiming]:
    """Return what each rank did of late; nothing of ranks that were seen too seldom, or that do not move.

    Args:
        lines: The newest samples of each node.
        attempt: Which attempt.
        max_lines: How many of each node's are read: to judge one takes up to a millisecond.
    """
    paces: dict[int, RankTiming] = {}
    for own in lines.values():
        chosen = _choose_evenly([line for line in own if samples.may_be_sample(line, "activity")], max_lines)
        read = [
            s for s in samples.parse_samples(chosen, "activity", "m", "ranks", "attempt") if s["attempt"] == attempt
        ]
        read = [sample for sample in read if read[-1]["m"] - sample["m"] <= WINDOW_S]
        clock = _find_gpu_clock_mhz(own)
        for rank in read[-1]["ranks"] if read else ():
            pace = _measure_timing(_list_looks(read, rank), clock)
            if pace is not None:
                paces[int(rank)] = pace
    return paces


def has_no_progress_yet(lines: Mapping[str, Sequence[bytes]], attempt: int) -> bool:
    """Return whether every node tells of its ranks, and no rank has made any progress yet."""
    activities: list[RankActivity] = []
    for own in lines.values():
        newest = next(
            (
                s
                for s in samples.parse_samples(reversed(own), "activity", "ranks", "attempt")
                if s["attempt"] == attempt
            ),
            None,
        )
        if newest is None:
            return False
        activities += newest["ranks"].values()
    return bool(activities) and not any(
        status and status.get("progress_age_s") is not None for status in map(_get_status, activities)
    )


def _choose_evenly(lines: list[bytes], max_lines: int) -> list[bytes]:
    """Return lines evenly over the time; what nodes write while all goes well is as far apart anyway."""
    if len(lines) <= max_lines:
        return lines
    return [lines[round(index * (len(lines) - 1) / (max_lines - 1))] for index in range(max_lines)]


def _list_looks(read: Iterable[ActivitySample], rank: str) -> list[tuple[float, RankActivity]]:
    """Return the looks at one process of a rank, with their moments: those since it is the one that it is now."""
    looks = [(sample["m"], own) for sample in read if (own := sample["ranks"].get(rank)) is not None]
    return [each for each in looks if each[1].get("alive") and each[1].get("pid") == looks[-1][1].get("pid")]


def _measure_timing(looks: list[tuple[float, RankActivity]], clock: float | None) -> RankTiming | None:
    if len(looks) <= PARTS or looks[-1][0] - looks[0][0] < MIN_SPAN_S:
        return None
    (begin, first), (end, last) = looks[0], looks[-1]
    seconds = end - begin
    return RankTiming(
        seconds=seconds,
        wait_shares=compute_wait_shares([own for _, own in looks]),
        cpu=_increase(first.get("cpu_s"), last.get("cpu_s")) / seconds,
        starved=min(1.0, _increase(first.get("starved_s"), last.get("starved_s")) / seconds),
        faults=_increase(first.get("faults"), last.get("faults")) / seconds,
        gpu_clock_mhz=clock,
        other_waits=_measure_kernel_waits([own for _, own in looks]),
    )


def _increase(one: float | None, other: float | None) -> float:
    return max(0.0, other - one) if one is not None and other is not None else 0.0


def _measure_kernel_waits(looks: Sequence[RankActivity]) -> dict[str, float]:
    """Return what the kernel says that the main thread waited for, where it was in no collective, by share of looks."""
    counted = Counter(
        name
        for own in looks
        if not any(begun > ended for begun, ended in get_collective_numbers(own).values())
        and (name := describe_wchan(own.get("wchan")))
    )
    return {name: count / len(looks) for name, count in counted.items()}


def _find_gpu_clock_mhz(lines: Sequence[bytes]) -> float | None:
    """Return the usual clock, in MHz, of the slowest GPU of a node that is busy; `None` without any."""
    clocks: list[float] = []
    for sample in samples.parse_samples(reversed(lines[-400:]), "health", "gpus"):
        busy = [g["sm_clock"] for g in sample["gpus"] or () if g.get("sm_clock") and (g.get("util") or 0) >= 50]
        clocks += [float(min(c for c in busy if c is not None))] if busy else []
        if len(clocks) >= 5:
            break
    return median(clocks) if clocks else None
