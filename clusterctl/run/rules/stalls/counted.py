"""What ranks had begun and ended when they were last seen, and for how long that had not changed, by nodes' samples."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from clusterctl.formatting import format_size
from clusterctl.run.rules.stalls.waits import inside, numbers
from clusterctl.validation import samples
from clusterctl.why.evidence import IdleRank
from clusterctl.why.slowness import LONG_WAIT_S
from clusterctl.why.stack_position import describe_wchan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.agent.protocol.sample_types import ActivitySample, RankActivity

_LATELY_S = 12.0
"""Nodes whose ranks move look every two seconds, and write down one look in five."""
_OLDER = 6
"""So many lines lie between the two looks by which it is told what a rank does."""
_BUSY, _MUCH_S = 0.5, 100_000.0
"""Of a core, and bytes a second: what the shim itself writes is less."""


def before(
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
        newest = next((s for s in _newest_first(own, attempt) if s["t"] <= moments[node]), None)
        if newest is not None and moments[node] - newest["t"] <= _LATELY_S:
            for rank, seen in newest["ranks"].items():
                if seen.get("alive") and (known := numbers(seen)):
                    found[int(rank)] = {group: (begun, ended) for group, (begun, ended) in known.items()}
    return found


def standing(lines: Mapping[str, Sequence[bytes]], attempt: int) -> dict[int, IdleRank]:
    """Return for how long each rank has made no progress, and what it does meanwhile; nothing of what is not counted.

    Args:
        lines: The newest samples of each node.
        attempt: Which attempt.
    """
    found: dict[int, IdleRank] = {}
    for own in lines.values():
        looks = _newest_first(own, attempt)
        newest = next(looks, None)
        if newest is not None:
            found |= _of_node(newest, looks)
    return found


def _of_node(newest: ActivitySample, before: Iterator[ActivitySample]) -> dict[int, IdleRank]:
    ages = {rank: age for rank, seen in newest["ranks"].items() if (age := _still_s(seen)) is not None}
    # To read a line takes up to a millisecond: no further one where ranks move.
    moves = any(age < LONG_WAIT_S for age in ages.values())
    older = [newest, *(() if moves else islice(before, _OLDER))][-1]
    return {
        int(rank): IdleRank(
            seconds=age,
            waits=any(begun > ended for begun, ended in numbers(newest["ranks"][rank]).values()),
            does=_does(newest["ranks"][rank], older["ranks"].get(rank), newest["m"] - older["m"]),
        )
        for rank, age in ages.items()
    }


def _still_s(seen: RankActivity) -> float | None:
    """Return for how many seconds a rank has made no progress; `None` of one that is gone, or that is not counted."""
    known = inside(seen)
    return known.get("progress_age_s") if seen.get("alive") and known and numbers(seen) else None


def _newest_first(lines: Sequence[bytes], attempt: int) -> Iterator[ActivitySample]:
    readable = samples.parse_samples(reversed(lines), "activity", "t", "m", "ranks", "attempt")
    return (sample for sample in readable if sample["attempt"] == attempt)


def _does(now: RankActivity, then: RankActivity | None, seconds: float) -> str:
    """Return in words what a rank spends its time with; "" where that does not show."""
    if then is None or seconds <= 0 or then.get("pid") != now.get("pid"):
        return ""
    writes = ((now.get("written") or 0) - (then.get("written") or 0)) / seconds
    reads = ((now.get("read") or 0) - (then.get("read") or 0)) / seconds
    if max(writes, reads) >= _MUCH_S:
        return f"it {'writes' if writes >= reads else 'reads'} {format_size(max(writes, reads))} a second"
    waits = describe_wchan(now.get("wchan"))
    busy = (now.get("cpu_s") or 0.0) - (then.get("cpu_s") or 0.0) >= _BUSY * seconds
    return waits or ("it computes" if busy else "")
