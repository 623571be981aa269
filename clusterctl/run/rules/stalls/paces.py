"""What the ranks of a run that moves did with their time of late, from the nodes' samples."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from clusterctl.run.rules.stalls.waits import LEAST_S, PARTS, WINDOW_S, inside, numbers, shares
from clusterctl.validation import samples
from clusterctl.why.evidence import RankTiming
from clusterctl.why.stack_position import describe_wchan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clusterctl.agent.protocol.sample_types import ActivitySample, RankActivity


def paces_of(lines: Mapping[str, Sequence[bytes]], attempt: int, *, most: int = 40) -> dict[int, RankTiming]:
    """Return what each rank did of late; nothing of ranks that were seen too seldom, or that do not move.

    Args:
        lines: The newest samples of each node.
        attempt: Which attempt.
        most: How many of each node's are read: to judge one takes up to a millisecond.
    """
    paces: dict[int, RankTiming] = {}
    for own in lines.values():
        chosen = _chosen([line for line in own if samples.may_be_sample(line, "activity")], most)
        read = [
            s for s in samples.parse_samples(chosen, "activity", "m", "ranks", "attempt") if s["attempt"] == attempt
        ]
        read = [sample for sample in read if read[-1]["m"] - sample["m"] <= WINDOW_S]
        clock = _clock(own)
        for rank in read[-1]["ranks"] if read else ():
            pace = _pace(_of_rank(read, rank), clock)
            if pace is not None:
                paces[int(rank)] = pace
    return paces


def unbegun(lines: Mapping[str, Sequence[bytes]], attempt: int) -> bool:
    """Return whether every node tells of its ranks, and no rank has made any progress yet."""
    told: list[RankActivity] = []
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
        told += newest["ranks"].values()
    return bool(told) and not any(known and known.get("progress_age_s") is not None for known in map(inside, told))


def _chosen(lines: list[bytes], most: int) -> list[bytes]:
    """Return lines evenly over the time; what nodes write while all goes well is as far apart anyway."""
    if len(lines) <= most:
        return lines
    return [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]


def _of_rank(read: Iterable[ActivitySample], rank: str) -> list[tuple[float, RankActivity]]:
    """Return the looks at one process of a rank, with their moments: those since it is the one that it is now."""
    looks = [(sample["m"], own) for sample in read if (own := sample["ranks"].get(rank)) is not None]
    return [each for each in looks if each[1].get("alive") and each[1].get("pid") == looks[-1][1].get("pid")]


def _pace(looks: list[tuple[float, RankActivity]], clock: float | None) -> RankTiming | None:
    if len(looks) <= PARTS or looks[-1][0] - looks[0][0] < LEAST_S:
        return None
    (begin, first), (end, last) = looks[0], looks[-1]
    seconds = end - begin
    return RankTiming(
        seconds=seconds,
        waits=shares([own for _, own in looks]),
        cpu=_grown(first.get("cpu_s"), last.get("cpu_s")) / seconds,
        starved=min(1.0, _grown(first.get("starved_s"), last.get("starved_s")) / seconds),
        faults=_grown(first.get("faults"), last.get("faults")) / seconds,
        clock=clock,
        waits_for=_waits_for([own for _, own in looks]),
    )


def _grown(one: float | None, other: float | None) -> float:
    return max(0.0, other - one) if one is not None and other is not None else 0.0


def _waits_for(looks: Sequence[RankActivity]) -> dict[str, float]:
    """Return what the kernel says that the main thread waited for, where it was in no collective, by share of looks."""
    counted = Counter(
        name
        for own in looks
        if not any(begun > ended for begun, ended in numbers(own).values())
        and (name := describe_wchan(own.get("wchan")))
    )
    return {name: count / len(looks) for name, count in counted.items()}


def _clock(lines: Sequence[bytes]) -> float | None:
    """Return the usual clock, in MHz, of the slowest GPU of a node that is busy; `None` without any."""
    clocks: list[float] = []
    for sample in samples.parse_samples(reversed(lines[-400:]), "health", "gpus"):
        busy = [g["sm_clock"] for g in sample["gpus"] or () if g.get("sm_clock") and (g.get("util") or 0) >= 50]
        clocks += [float(min(c for c in busy if c is not None))] if busy else []
        if len(clocks) >= 5:
            break
    return median(clocks) if clocks else None
