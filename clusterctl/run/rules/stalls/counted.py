"""What ranks had begun and ended when they were last seen, and for how long that had not changed, by nodes' samples."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from clusterctl.door import samples
from clusterctl.why.case import Standing
from clusterctl.why.places import words_of
from clusterctl.wording import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.agent.protocol.types.samples import Activity, RankActivity

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
                inside = seen.get("inside")
                if seen.get("alive") and inside and inside["seq"]:
                    found[int(rank)] = {group: (numbers[0], numbers[1]) for group, numbers in inside["seq"].items()}
    return found


def standing(lines: Mapping[str, Sequence[bytes]], attempt: int) -> dict[int, Standing]:
    """Return for how long each rank has made no progress, and what it does meanwhile; nothing of what is not counted.

    Args:
        lines: The newest samples of each node.
        attempt: Which attempt.
    """
    found: dict[int, Standing] = {}
    for own in lines.values():
        seen = list(islice(_newest_first(own, attempt), _OLDER + 1))
        for rank, now in seen[0]["ranks"].items() if seen else ():
            inside = now.get("inside")
            if now.get("alive") and inside and inside["seq"] and inside["progress_age_s"] is not None:
                found[int(rank)] = Standing(
                    seconds=inside["progress_age_s"],
                    waits=any(begun > ended for begun, ended in inside["seq"].values()),
                    does=_does(now, seen[-1]["ranks"].get(rank), seen[0]["m"] - seen[-1]["m"]),
                )
    return found


def _newest_first(lines: Sequence[bytes], attempt: int) -> Iterator[Activity]:
    readable = samples.readable(reversed(lines), "activity", "t", "m", "ranks", "attempt")
    return (sample for sample in readable if sample["attempt"] == attempt)


def _does(now: RankActivity, then: RankActivity | None, seconds: float) -> str:
    """Return in words what a rank spends its time with; "" where that does not show."""
    if then is None or seconds <= 0 or then.get("pid") != now.get("pid"):
        return ""
    writes = ((now.get("written") or 0) - (then.get("written") or 0)) / seconds
    reads = ((now.get("read") or 0) - (then.get("read") or 0)) / seconds
    if max(writes, reads) >= _MUCH_S:
        return f"it {'writes' if writes >= reads else 'reads'} {size(max(writes, reads))} a second"
    waits = words_of(now.get("wchan"))
    busy = (now.get("cpu_s") or 0.0) - (then.get("cpu_s") or 0.0) >= _BUSY * seconds
    return waits or ("it computes" if busy else "")
