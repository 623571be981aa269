"""Who is slower than the others, by how much of its time each rank waits for its peers; and why, as far as it shows."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why.places import place_of
from clusterctl.why.seen import WAITS
from clusterctl.why.slow.apart import slow_among
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.why.case import Case, Pace

_SHORT_OF_CPU = 0.2
_ALL_SHORT_OF_CPU = 0.6
_FAULTS_S = 20.0
_OFTEN = 0.3
_SLOWER_CLOCK = 0.85
_MOST_NAMED = 8
_SLOWLY = {
    "it reads a pipe that nobody writes to": "it waits for data out of a pipe",
    "it writes to a pipe that nobody reads": "it waits for who reads its pipe",
    "it polls": "it waits for data, or for a child (it polls)",
}
"""What is a reason for a hang, as a reason for being slow."""


def slow_ranks(paces: Mapping[int, Pace]) -> tuple[int, ...]:
    """Return the ranks that others wait for again and again, as `slow_among` tells them."""
    return slow_among({rank: pace.waits for rank, pace in paces.items()})


def judge(case: Case) -> Verdict | None:
    """Return the ranks that the others wait for in a run that moves; `None` where all are alike."""
    found = slow_ranks(case.paces)
    if not found:
        return _all_alike(case)
    nodes = {rank.rank: rank.node for rank in case.ranks}
    places = {nodes[rank] for rank in found}
    whole = {rank for rank, node in nodes.items() if node in places} == set(found)
    others = [rank for rank in case.paces if rank not in found]
    share = median(_mean(case.paces[rank]) for rank in others)
    reasons = {rank: reason(case.paces, rank, case.troubles.get(nodes[rank], ())) for rank in found}
    said = set(reasons.values())
    why = next(iter(said)) if len(said) == 1 else ""
    on = f" on {next(iter(places))}" if len(places) == 1 else ""
    are = f"rank{'s' if len(found) > 1 else ''} {fold_ranks(found)}{on} {'are' if len(found) > 1 else 'is'}"
    return Verdict(
        kind=Kind.SLOW,
        cls=Class.SLOW,
        confidence=Confidence.LIKELY if len(found) == 1 or (whole and len(places) == 1) else Confidence.AMBIGUOUS,
        summary=f"{are} slower than the others, which wait for it {share:.0%} of the time{f': {why}' if why else ''}",
        culprits=tuple(_culprit(case, rank, nodes[rank], reasons[rank]) for rank in found[:_MOST_NAMED]),
        waiting=(Waiting(ranks=fold_ranks(others), where=None, op="wait in collectives"),),
        next=(f"clusterctl stacks {case.run} --rank {fold_ranks(found)}", "clusterctl stats"),
    )


def _culprit(case: Case, rank: int, node: str, why: str) -> Culprit:
    look = next((each.look for each in case.ranks if each.rank == rank), None)
    place = place_of(look)
    # One look may have found it where it does wait for the others.
    known = place.where is not None and place.doing not in WAITS
    waits = case.paces[rank]
    evidence = f"it waits for its peers {_mean(waits):.0%} of the time" + (f"; {why}" if why else "")
    return Culprit(
        rank=rank, node=node, where=place.where if known else None, op=place.op if known else None, evidence=evidence
    )


def reason(paces: Mapping[int, Pace], rank: int, troubles: Sequence[str]) -> str:
    """Return in words why a rank is slower than the others, where what was measured of it tells; else ""."""
    own, others = paces[rank], [pace for other, pace in paces.items() if other != rank]
    if troubles:
        return troubles[0]
    if own.starved >= _SHORT_OF_CPU and own.starved >= 2 * median(pace.starved for pace in others):
        return f"it could run and had no CPU for {own.starved:.0%} of the time"
    if own.faults >= _FAULTS_S and own.faults >= 5 * median(pace.faults for pace in others):
        return f"it waited {own.faults:.0f} times a second for memory that was read from a disk (swap)"
    clocks = [pace.clock for pace in others if pace.clock]
    if own.clock and clocks and own.clock < _SLOWER_CLOCK * median(clocks):
        return f"its GPUs run at {own.clock:.0f} MHz, those of others at {median(clocks):.0f}"
    words = [(share, text) for text, share in own.waits_for.items() if share >= _OFTEN]
    if words:
        return _SLOWLY.get(max(words)[1], max(words)[1])
    return f"it computes ({own.cpu:.1f} cores)" if own.cpu >= 0.5 else ""


def _all_alike(case: Case) -> Verdict | None:
    """No rank is slower than the others; where all lack the same, that is said, and nobody is named."""
    if not case.paces or min(pace.starved for pace in case.paces.values()) < _ALL_SHORT_OF_CPU:
        return None
    share = median(pace.starved for pace in case.paces.values())
    return Verdict(
        kind=Kind.SLOW,
        cls=Class.SLOW,
        confidence=Confidence.AMBIGUOUS,
        summary=f"all ranks could run and had no CPU for {share:.0%} of the time",
        next=("clusterctl stats",),
    )


def words(paces: Mapping[int, Pace]) -> str:
    """Return what the ranks of a run that moves do with their time, for a sentence; "" where that is not known."""
    shares = [_mean(pace) for pace in paces.values() if pace.waits]
    if not shares or len(shares) < len(paces):
        return ""
    seconds = median(pace.seconds for pace in paces.values())
    parts = [f"{median(shares):.0%} in collectives"]
    doing: dict[str, list[float]] = {}
    for pace in paces.values():
        for text, share in pace.waits_for.items():
            doing.setdefault(text, []).append(share)
    parts += [
        f"{sum(each) / len(paces):.0%} where {text}" for text, each in doing.items() if sum(each) >= 0.1 * len(paces)
    ]
    parts.append(f"{median(pace.cpu for pace in paces.values()):.1f} cores each")
    return f"of the last {seconds:.0f} s they spent " + ", ".join(parts)


def _mean(pace: Pace) -> float:
    return sum(pace.waits) / len(pace.waits) if pace.waits else 0.0
