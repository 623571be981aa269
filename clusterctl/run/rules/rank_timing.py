"""Measures how the ranks of a run spend their time, from the nodes' samples. Pure.

The results are the share of time in collectives, the CPU use, the waits in the kernel, and the time without progress.
`status` shows the wait shares of every run. To be fast, it computes them from only four samples of each node.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from statistics import median

from clusterctl.agent.protocol.record_types import ActivitySample, RankActivity
from clusterctl.formatting import format_size
from clusterctl.run.rules.even_choice import choose_evenly
from clusterctl.validation import node_samples
from clusterctl.why.evidence_types import IdleRank, RankTimeUse, read_blindness
from clusterctl.why.slowness import LONG_WAIT_S
from clusterctl.why.stack_position import NETWORK, describe_wchan

WINDOW_S = 300.0
MIN_SPAN_S = 40.0
PARTS = 3
"""The number of parts of the measured time. A slow rank is slow in each part. A rank that was late once is not."""
_MIN_LOOKS, _MIN_COLLECTIVES = 13, 2
"""The fewest looks and collectives from which a wait share is computed. The shim looks at its rank periodically."""
_IDLE_WINDOW_S = 120.0
_FEWEST_COMPARED, _FEWEST_SAMPLES = 3, 4
"""The fewest ranks, and the fewest samples of a part, by which ranks are compared without collectives."""
_SAME_RATE = 1.2
"""Ranks that wait for each other in each step take steps at rates that differ by less than this factor."""
_MOMENT = re.compile(rb'"m":\s*([0-9.]+)')
_ATTEMPT = re.compile(rb'"attempt":\s*([0-9]+)')

WAIT_FIELDS = node_samples.RankFields(activity=("alive", "pid"), status=("looks", "held", "seq"))
_TIMING_FIELDS = node_samples.RankFields(
    (*WAIT_FIELDS.activity, "cpu_s", "starved_s", "faults", "wchan", "printed_steps"),
    status=(*WAIT_FIELDS.status, "degraded"),
)

TimedActivities = list[tuple[float, RankActivity]]
"""The activities of a rank, each with its time (seconds on the clock of the node)."""
WaitShares = tuple[float, ...]
"""The share of time in collectives, for each part of the measured time."""


def measure_wait_shares(
    nodes: Iterable[tuple[ActivitySample, Sequence[bytes]]], attempt: int
) -> dict[int, WaitShares | None]:
    """Return the wait shares of each observed rank; `None` for a rank with too few looks or collectives.

    Args:
        nodes: The newest sample of each node, and the last lines of its samples file.
        attempt: The attempt.
    """
    found: dict[int, WaitShares | None] = {}
    for last, lines in nodes:
        if not {"m", "ranks"} <= last.keys() or last.get("attempt") != attempt:
            continue
        chosen = [*_parse_earlier_samples(lines, last), last]
        for rank in last["ranks"]:
            timed = _list_timed_activities(chosen, rank)
            if len(timed) == PARTS + 1 and timed[-1][0] - timed[0][0] >= MIN_SPAN_S:
                found[int(rank)] = compute_wait_shares([activity for _, activity in timed])
    return found


def has_recent_progress(newest: Iterable[ActivitySample], attempt: int, seconds: float) -> bool:
    """Return whether any rank has made progress in the last `seconds` seconds, so the ranks do not all wait."""
    ranks = [own for s in newest if s.get("attempt") == attempt for own in (s.get("ranks") or {}).values()]
    ages = [age for own in ranks if (age := _measure_idle_s(own)) is not None]
    return any(age < seconds for age in ages)


def have_all_ranks_wait_counts(newest: Iterable[ActivitySample]) -> bool:
    """Return whether the shim of each rank counts its looks at the rank. Ranks are compared by these counts."""
    return all(_read_look_counts(own)[0] for sample in newest for own in (sample.get("ranks") or {}).values())


def _parse_earlier_samples(lines: Sequence[bytes], last: ActivitySample) -> list[ActivitySample]:
    """Return the first sample of each part of the window, from the attempt of the last sample."""
    lines = [line for line in lines if node_samples.may_be_sample(line, "activity")]
    window = _select_window(lines, last["attempt"], last["m"] - WINDOW_S)
    chosen = [window[part * len(window) // PARTS] for part in range(PARTS)] if window else []
    parsed = node_samples.parse_samples(chosen, "activity", "m", "ranks", "attempt", fields=WAIT_FIELDS)
    return [s for s in parsed if s["attempt"] == last["attempt"] and 0 < last["m"] - s["m"] <= WINDOW_S]


def _select_window(lines: list[bytes], attempt: int, begin: float) -> list[bytes]:
    """Return the samples of an attempt from a moment on (seconds on the clock of the node), without parsing them."""

    def is_in_window(line: bytes) -> bool:
        moment, number = _MOMENT.search(line), _ATTEMPT.search(line)
        return moment is not None and number is not None and int(number[1]) == attempt and float(moment[1]) >= begin

    return lines[bisect_left(lines, True, key=is_in_window) :]


# --- of a rank


def compute_wait_shares(activities: Sequence[RankActivity]) -> WaitShares | None:
    """Return the wait shares of a rank; `None` if a part has too few looks or collectives."""
    counts = [_read_look_counts(own) for own in activities]
    first, last = counts[0], counts[-1]
    positions = [first[0] + part * (last[0] - first[0]) / PARTS for part in range(1, PARTS)]
    cuts = [min(counts, key=lambda each: abs(each[0] - at)) for at in positions]
    shares: list[float] = []
    for one, other in pairwise([first, *cuts, last]):
        samples_in_part, waited, begun = other[0] - one[0], other[1] - one[1], other[2] - one[2]
        if samples_in_part < _MIN_LOOKS or begun < _MIN_COLLECTIVES:
            return None
        shares.append(waited / samples_in_part)
    return tuple(shares)


def _read_look_counts(own: RankActivity) -> tuple[int, int, int]:
    """Return three counts of a rank: the shim's looks, looks that found it in a collective, and begun collectives."""
    status = own.get("inside")
    begun = max((begun for begun, _ in get_collective_numbers(own).values()), default=0)
    return (0, 0, begun) if status is None else (status.get("looks") or 0, status.get("held") or 0, begun)


def get_collective_numbers(own: RankActivity) -> Mapping[str, tuple[int, int]]:
    """Return the numbers of the last begun and the last ended collective of a rank, by process group."""
    status = own.get("inside")
    return (status.get("seq") if status else None) or {}


def _is_in_collective(own: RankActivity) -> bool:
    return any(begun > ended for begun, ended in get_collective_numbers(own).values())


_MAX_AGE_S = 12.0
"""An older sample is out of date. While ranks make progress, a node measures every 2 s and saves each fifth sample."""
_LINES_BETWEEN = 6
"""How many lines apart the two samples are that show the present activity of a rank."""
_BUSY_CORES, _MUCH_BYTES_S = 0.5, 100_000.0
"""A rank above one of these rates (CPU cores, bytes per second) is active. The shim itself stays below both."""


def read_collective_counts_before(
    lines: Mapping[str, Sequence[bytes]], attempt: int, moments: Mapping[str, float]
) -> dict[int, Mapping[str, tuple[int, int]]]:
    """Return the collective numbers of each rank in its last sample before a moment.

    Args:
        lines: The newest samples of each node.
        attempt: The attempt.
        moments: The moment on the wall clock of each node (seconds since the epoch).
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
    """Return, for each rank that counts collectives, the seconds without progress and the present activity.

    Args:
        lines: The newest samples of each node.
        attempt: The attempt.
    """
    found: dict[int, IdleRank] = {}
    for own in lines.values():
        earlier = _parse_newest_first(own, attempt)
        if (newest := next(earlier, None)) is None:
            continue
        ages = {rank: age for rank, one in newest["ranks"].items() if (age := _measure_idle_s(one)) is not None}
        # Parsing a line takes up to a millisecond, so older lines are parsed only if no rank makes progress.
        moves = any(age < LONG_WAIT_S for age in ages.values())
        older = [newest, *(() if moves else islice(earlier, _LINES_BETWEEN))][-1]
        for rank, age in ages.items():
            own_activity, seconds = newest["ranks"][rank], newest["m"] - older["m"]
            found[int(rank)] = IdleRank(
                seconds=age,
                is_in_collective=_is_in_collective(own_activity),
                activity=_describe_activity(own_activity, older["ranks"].get(rank), seconds),
            )
    return found


def _measure_idle_s(activity: RankActivity) -> float | None:
    """Return for how many seconds a rank has made no progress; `None` if it has ended, or counts no collectives."""
    status = activity.get("inside")
    is_counted = activity.get("alive") and get_collective_numbers(activity)
    return status.get("progress_age_s") if status and is_counted else None


def _parse_newest_first(lines: Sequence[bytes], attempt: int) -> Iterator[ActivitySample]:
    readable = node_samples.parse_samples(reversed(lines), "activity", "t", "m", "ranks", "attempt")
    return (sample for sample in readable if sample["attempt"] == attempt)


def _describe_activity(now: RankActivity, earlier: RankActivity | None, seconds: float) -> str:
    """Return the present activity of a rank as a phrase; "" if unknown."""
    if earlier is None or seconds <= 0 or earlier.get("pid") != now.get("pid"):
        return ""
    writes = ((now.get("written") or 0) - (earlier.get("written") or 0)) / seconds
    reads = ((now.get("read") or 0) - (earlier.get("read") or 0)) / seconds
    if max(writes, reads) >= _MUCH_BYTES_S:
        return f"it {'writes' if writes >= reads else 'reads'} {format_size(max(writes, reads))} a second"
    busy = (now.get("cpu_s") or 0.0) - (earlier.get("cpu_s") or 0.0) >= _BUSY_CORES * seconds
    return describe_wchan(now.get("wchan")) or ("it computes" if busy else "")


def measure_rank_timings(
    lines: Mapping[str, Sequence[bytes]], attempt: int, *, max_lines: int = 40
) -> dict[int, RankTimeUse]:
    """Return how each rank has recently spent its time. Ranks with too few samples are absent.

    Args:
        lines: The newest samples of each node.
        attempt: The attempt.
        max_lines: Maximum number of parsed lines per node, because parsing a line takes up to a millisecond.
    """
    timings: dict[int, RankTimeUse] = {}
    activities: dict[int, TimedActivities] = {}
    for own in lines.values():
        samples = [line for line in own if node_samples.may_be_sample(line, "activity")]
        newest = _MOMENT.search(samples[-1]) if samples else None
        window = [] if newest is None else _select_window(samples, attempt, float(newest[1]) - WINDOW_S)
        chosen = choose_evenly(window, max_lines)
        parsed = node_samples.parse_samples(chosen, "activity", "m", "ranks", "attempt", fields=_TIMING_FIELDS)
        read = [sample for sample in parsed if sample["attempt"] == attempt]
        gpu_clock_mhz = _find_gpu_clock_mhz(own)
        for rank in read[-1]["ranks"] if read else ():
            timed = _list_timed_activities(read, rank)
            if len(timed) > PARTS and timed[-1][0] - timed[0][0] >= MIN_SPAN_S:
                timings[int(rank)] = _measure_timing(timed, gpu_clock_mhz)
                activities[int(rank)] = timed
    has_collectives = any(_read_look_counts(own)[2] for timed in activities.values() for _, own in timed)
    has_busy_gpu = any(timing.gpu_clock_mhz for timing in timings.values())
    if has_collectives or has_busy_gpu or len(timings) < _FEWEST_COMPARED:
        return timings  # A rank that uses no CPU may wait for its GPU.
    activities = {
        rank: [each for each in timed if timed[-1][0] - each[0] <= _IDLE_WINDOW_S] for rank, timed in activities.items()
    }
    compute, basis = _compute_socket_shares, "waits for sockets"
    if _are_in_step(activities.values()):
        compute, basis = _compute_idle_shares, "use of CPUs"
    shares = {rank: compute(timed) for rank, timed in activities.items()}
    if None in shares.values():
        return timings
    return {rank: replace(one, idle_shares=shares[rank], idle_basis=basis) for rank, one in timings.items()}


def _are_in_step(activities: Iterable[TimedActivities]) -> bool:
    """Return whether all ranks print step numbers at the same rate, so that they probably wait for each other."""
    rates = []
    for timed in activities:
        steps = [(moment, steps[1]) for moment, own in timed if (steps := own.get("printed_steps"))]
        if len(steps) < 2:
            return False
        (begin, first), (end, last) = steps[0], steps[-1]
        rates.append((last - first) / (end - begin))
    return 0 < max(rates) <= _SAME_RATE * min(rates)


def _compute_idle_shares(timed: TimedActivities) -> WaitShares | None:
    """Return the share of time in which a rank neither used nor lacked a CPU, for each part of the measured time.

    `None` with too few samples.
    """
    if len(timed) < PARTS * _FEWEST_SAMPLES:
        return None
    cuts = [timed[part * (len(timed) - 1) // PARTS] for part in range(PARTS + 1)]
    shares: list[float] = []
    for (begin, one), (end, other) in pairwise(cuts):
        busy_s = _increase(one.get("cpu_s"), other.get("cpu_s"))
        busy_s += _increase(one.get("starved_s"), other.get("starved_s"))
        shares.append(1.0 - min(1.0, busy_s / (end - begin)))
    return tuple(shares)


def _compute_socket_shares(timed: TimedActivities) -> WaitShares | None:
    """Return the share of samples in which a rank waited for a socket, for each part of the measured time.

    `None` with too few samples.
    """
    waits = [describe_wchan(own.get("wchan")) == NETWORK for _, own in timed]
    size = len(waits) // PARTS
    if size < _FEWEST_SAMPLES:
        return None
    return tuple(sum(waits[part * size : (part + 1) * size]) / size for part in range(PARTS))


def has_no_progress_yet(lines: Mapping[str, Sequence[bytes]], attempt: int) -> bool:
    """Return whether every node has a sample of the attempt, and no rank has made any progress."""
    activities: list[RankActivity] = []
    for own in lines.values():
        parsed = node_samples.parse_samples(reversed(own), "activity", "ranks", "attempt")
        newest = next((sample for sample in parsed if sample["attempt"] == attempt), None)
        if newest is None:
            return False
        activities += newest["ranks"].values()
    statuses = [status for own in activities if (status := own.get("inside"))]
    return bool(activities) and all(status.get("progress_age_s") is None for status in statuses)


def _list_timed_activities(read: Iterable[ActivitySample], rank: str) -> TimedActivities:
    """Return time and activity of a rank in each sample of its present process. The last sample shows this process."""
    timed = [(sample["m"], own) for sample in read if (own := sample["ranks"].get(rank)) is not None]
    return [each for each in timed if each[1].get("alive") and each[1].get("pid") == timed[-1][1].get("pid")]


def _measure_timing(timed: Sequence[tuple[float, RankActivity]], gpu_clock_mhz: float | None) -> RankTimeUse:
    (begin, first), (end, last) = timed[0], timed[-1]
    seconds, activities = end - begin, [own for _, own in timed]
    waits = Counter(
        wait for own in activities if not _is_in_collective(own) and (wait := describe_wchan(own.get("wchan")))
    )
    return RankTimeUse(
        seconds=seconds,
        wait_shares=compute_wait_shares(activities),
        cpu_cores=_increase(first.get("cpu_s"), last.get("cpu_s")) / seconds,
        cpu_starved_share=min(1.0, _increase(first.get("starved_s"), last.get("starved_s")) / seconds),
        disk_faults_per_s=_increase(first.get("faults"), last.get("faults")) / seconds,
        gpu_clock_mhz=gpu_clock_mhz,
        other_waits={wait: count / len(activities) for wait, count in waits.items()},
        blindness=read_blindness(last.get("inside")),
    )


def _increase(one: float | None, other: float | None) -> float:
    return max(0.0, other - one) if one is not None and other is not None else 0.0


def _find_gpu_clock_mhz(lines: Sequence[bytes]) -> float | None:
    """Return the usual clock of the slowest busy GPU of a node in MHz; `None` without a busy GPU."""
    clocks: list[float] = []
    for sample in node_samples.parse_samples(reversed(lines[-400:]), "health", "gpus"):
        busy = [g["sm_clock"] for g in sample["gpus"] or () if g.get("sm_clock") and (g.get("util") or 0) >= 50]
        clocks += [float(min(c for c in busy if c is not None))] if busy else []
        if len(clocks) >= 5:
            break
    return median(clocks) if clocks else None
