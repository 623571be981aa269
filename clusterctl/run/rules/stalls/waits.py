"""By which part of its time each rank of a run that moves waited for its peers, from a few of the nodes' samples.

`status` asks it of every run that it shows, so only four samples of each node are read: the first of the last minutes,
two between, the newest.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from clusterctl.validation import samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.protocol.sample_types import ActivitySample, RankActivity, WorkerStatusSample

WINDOW_S = 300.0
LEAST_S = 40.0
PARTS = 3
"""Into so many parts the time is cut: who is slow is so in each of them, who was late once is not."""
_MARK = b'"activity"'
_LOOKS, _STEPS = 13, 2
"""In each part of the time: fewer looks, or collectives, say nothing of a share."""
_NEAR = 4096
"""Bytes between which lines are looked at one by one."""
_MOMENT = re.compile(rb'"m":\s*([0-9.]+)')
_ATTEMPT = re.compile(rb'"attempt":\s*([0-9]+)')

Waits = tuple[float, ...]
"""The share of each part of the time."""


def waits_of(nodes: Iterable[tuple[ActivitySample, bytes]], attempt: int) -> dict[int, Waits | None]:
    """Return what each rank waited for its peers; `None` of one that was not counted. Those not seen are left out.

    Args:
        nodes: The newest sample of each node, and what stands at the end of its samples.
        attempt: Which attempt.
    """
    found: dict[int, Waits | None] = {}
    for last, end in nodes:
        if not {"m", "ranks"} <= last.keys() or last.get("attempt") != attempt:
            continue
        looks = [*_earlier(end, last), last]
        for rank, own in last["ranks"].items():
            seen = [(look["m"], one) for look in looks if (one := look["ranks"].get(rank)) is not None]
            seen = [each for each in seen if each[1].get("alive") and each[1].get("pid") == own.get("pid")]
            if len(seen) == PARTS + 1 and seen[-1][0] - seen[0][0] >= LEAST_S:
                found[int(rank)] = shares([one for _, one in seen])
    return found


def moves(newest: Iterable[ActivitySample], attempt: int, seconds: float) -> bool:
    """Return whether any rank has made progress so lately: then none is waited for since long."""
    ranks = [
        own for sample in newest if sample.get("attempt") == attempt for own in (sample.get("ranks") or {}).values()
    ]
    told = [inside(own) for own in ranks if own.get("alive") and numbers(own)]
    ages = [age for known in told if known is not None and (age := known.get("progress_age_s")) is not None]
    return any(age < seconds for age in ages)


def counted(newest: Iterable[ActivitySample]) -> bool:
    """Return whether all ranks tell how often they were looked at; where one does not, nobody can be compared."""
    return all(told(own, "looks") for sample in newest for own in (sample.get("ranks") or {}).values())


def _earlier(data: bytes, last: ActivitySample) -> list[ActivitySample]:
    """Return the first sample of the last minutes and those between, of the same attempt; none where few are."""
    end = data.rfind(b"\n") + 1
    low, high = 0, end
    while high - low > _NEAR:
        middle = (low + high) // 2
        line = _line_from(data, middle, end)
        if line is None or _belongs(line[1], last):
            high = middle
        else:
            low = line[0] + len(line[1]) + 1
    first = _line_from(data, low, end)
    while first is not None and not _belongs(first[1], last):
        first = _line_from(data, first[0] + len(first[1]) + 1, end)
    if first is None:
        return []
    cuts = [first[0] + part * (end - first[0]) // PARTS for part in range(1, PARTS)]
    lines = [first[1], *(found[1] for cut in cuts if (found := _line_from(data, cut, end)) is not None)]
    return [one for one in samples.parse_samples(lines, "activity", "m", "ranks", "attempt") if _is_before(one, last)]


def _line_from(data: bytes, place: int, end: int) -> tuple[int, bytes] | None:
    """Return the first whole line with activity that begins at `place` or behind it, and where it begins."""
    begin = place and data.find(b"\n", place - 1, end) + 1
    mark = data.find(_MARK, begin, end) if begin or not place else -1
    if mark < 0:
        return None
    begin = max(begin, data.rfind(b"\n", begin, mark) + 1)
    return begin, data[begin : data.find(b"\n", mark)]


def _belongs(line: bytes, last: ActivitySample) -> bool:
    moment, attempt = _MOMENT.search(line), _ATTEMPT.search(line)
    if moment is None or attempt is None:
        return False
    return int(attempt[1]) == last["attempt"] and float(moment[1]) >= last["m"] - WINDOW_S


def _is_before(one: ActivitySample, last: ActivitySample) -> bool:
    return one["attempt"] == last["attempt"] and 0 < last["m"] - one["m"] <= WINDOW_S


# --- of a rank


def shares(looks: list[RankActivity]) -> Waits | None:
    """Return the shares of all parts of the time in which a rank was looked at; `None` where too little was counted."""
    seen = [_counts(own) for own in looks]
    first, last = seen[0], seen[-1]
    wanted = [first[0] + part * (last[0] - first[0]) / PARTS for part in range(1, PARTS)]
    cuts = [min(seen, key=lambda counts: abs(counts[0] - at)) for at in wanted]
    parts = [_share(one, other) for one, other in pairwise([first, *cuts, last])]
    known = tuple(part for part in parts if part is not None)
    return known if len(known) == PARTS else None


def _counts(own: RankActivity) -> tuple[int, int, int]:
    """Return how often a rank was looked at, how often it waited then, and how many collectives it has begun."""
    begun = max((begun for begun, _ in numbers(own).values()), default=0)
    return told(own, "looks"), told(own, "held"), begun


def told(own: RankActivity, what: Literal["looks", "held"]) -> int:
    """Return a count of a rank's; 0 where it tells none."""
    known = inside(own)
    return 0 if known is None else known.get(what) or 0


def inside(own: RankActivity) -> WorkerStatusSample | None:
    """Return what a rank tells of itself."""
    return own.get("inside")


def numbers(own: RankActivity) -> Mapping[str, tuple[int, int]]:
    """Return what a rank has begun and ended last, by group; nothing where it does not tell, as older agents do not."""
    known = inside(own)
    return (known and known.get("seq")) or {}


def _share(one: tuple[int, int, int], other: tuple[int, int, int]) -> float | None:
    looks, held, begun = other[0] - one[0], other[1] - one[1], other[2] - one[2]
    return None if looks < _LOOKS or begun < _STEPS else held / looks
