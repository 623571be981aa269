"""Which ranks the others wait for again and again: by the shares of time alone.

Ranks that others have waited for since long, in a run that nobody calls stalled: they show signs of life.

Who is slower than the others, by how much of its time each rank waits for its peers; and why, as far as it shows.

A start that takes long: which ranks have not come to the meeting yet, and what they do before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from clusterctl.formatting import duration_text, fold_ranks
from clusterctl.why.evidence import Evidence, IdleRank, RankSnapshot, RankTiming
from clusterctl.why.hang import WAITS, is_computing, wait_phrase
from clusterctl.why.stack_position import describe_kernel_wait, is_waiting_for_storage, locate_rank
from clusterctl.why.verdict import MAX_NAMED, Class, Confidence, Culprit, Kind, Verdict, Waiting, ranks_phrase

LONG_WAIT_S = 60.0
"""What takes less long is nobody's question."""
_OUTLIER_RATIO = 0.25
"""By so much less of its time than others does a slow rank wait for its peers: no chance in three times 13 looks."""
_SHARE = 1 / 3


def find_stragglers(waits: Mapping[int, Sequence[float] | None]) -> tuple[int, ...]:
    """Return the ranks that others wait for again and again: they wait much less for their peers than most do.

    Each part of the time must say so: one pause, however long it was, is not again and again. Where nobody waits much,
    or all alike, nobody is slow.

    Args:
        waits: By rank, the share of each part; `None` where it was not counted.
    """
    counted = {rank: each for rank, each in waits.items() if each is not None}
    if len(waits) < 2 or len(counted) < len(waits):
        return ()
    parts = [_find_outliers(dict(zip(counted, part, strict=True))) for part in zip(*counted.values(), strict=True)]
    found = set.intersection(*parts)
    return tuple(sorted(found)) if 2 * len(found) <= len(waits) else ()


def _find_outliers(shares: Mapping[int, float]) -> set[int]:
    usual = median(sorted(shares.values(), reverse=True)[: max(1, len(shares) // 2)])
    return {rank for rank, share in shares.items() if usual - share >= _OUTLIER_RATIO and share <= _SHARE * usual}


def find_blocking_ranks(standing: Mapping[int, IdleRank], ranks: int) -> tuple[int, ...]:
    """Return the ranks that are in no collective while most have been in one, and nobody has made progress, for long.

    Args:
        standing: By rank.
        ranks: How many there are: where one is not counted nobody is named.
    """
    if len(standing) < ranks or any(one.seconds < LONG_WAIT_S for one in standing.values()):
        return ()
    free = tuple(sorted(rank for rank, one in standing.items() if not one.waits))
    return free if 2 * len(free) <= ranks else ()


def _confidence(nodes: Mapping[int, str], named: Sequence[int]) -> Confidence:
    """Return how sure a verdict is: one rank, or all ranks of one node, are likely the reason."""
    places = {nodes[rank] for rank in named}
    is_whole_node = len(places) == 1 and [nodes[rank] in places for rank in nodes].count(True) == len(named)
    return Confidence.LIKELY if len(named) == 1 or is_whole_node else Confidence.AMBIGUOUS


def _locate_own_work(case: Evidence, rank: int) -> tuple[str | None, str | None]:
    """Return line and operation of a rank; nothing if the one look found it where it waits for the others."""
    place = locate_rank(next((each.look for each in case.ranks if each.rank == rank), None))
    return (None, None) if place.where is None or place.doing in WAITS else (place.where, place.op)


def judge_blocking_ranks(case: Evidence) -> Verdict | None:
    """Return whom the others have waited for since long; `None` where nobody waits so."""
    named = find_blocking_ranks(case.standing, len(case.ranks))
    if not named:
        return None
    nodes = {rank.rank: rank.node for rank in case.ranks}
    waiting = fold_ranks([rank for rank in case.standing if rank not in named])
    since = duration_text(min(one.seconds for one in case.standing.values()))
    does = {case.standing[rank].does for rank in named}
    what = f": {does.pop()}" if len(does) == 1 and "" not in does else ""
    return Verdict(
        kind=Kind.SLOW,
        cls=Class.SLOW,
        confidence=_confidence(nodes, named),
        summary=f"ranks {waiting} have waited in a collective for {since} for "
        f"{ranks_phrase(named, (nodes[rank] for rank in named))}{what}",
        culprits=tuple(_blocking_culprit(case, rank, nodes[rank]) for rank in named[:MAX_NAMED]),
        waiting=(Waiting(ranks=waiting, where=None, op="wait in collectives"),),
        next=(f"clusterctl stacks {case.run} --rank {fold_ranks(named)}", f"clusterctl logs {case.run}"),
    )


def _blocking_culprit(case: Evidence, rank: int, node: str) -> Culprit:
    where, op = _locate_own_work(case, rank)
    evidence = case.standing[rank].does or "it is in no collective"
    return Culprit(rank=rank, node=node, where=where, op=op, evidence=evidence)


_SHORT_OF_CPU = 0.2
_ALL_SHORT_OF_CPU = 0.6
_FAULTS_S = 20.0
_FREQUENT_SHARE = 0.3
_SLOWER_CLOCK = 0.85
_SLOW_TEXT = {
    "it reads a pipe that nobody writes to": "it waits for data out of a pipe",
    "it writes to a pipe that nobody reads": "it waits for who reads its pipe",
    "it polls": "it waits for data, or for a child (it polls)",
}
"""What is a reason for a hang, as a reason for being slow."""


def find_slow_ranks(paces: Mapping[int, RankTiming]) -> tuple[int, ...]:
    """Return the ranks that others wait for again and again, as `slow_among` tells them."""
    return find_stragglers({rank: pace.waits for rank, pace in paces.items()})


def judge_stragglers(case: Evidence) -> Verdict | None:
    """Return the ranks that the others wait for in a run that moves; `None` where all are alike."""
    found = find_slow_ranks(case.paces)
    if not found:
        return _judge_common_shortage(case)
    nodes = {rank.rank: rank.node for rank in case.ranks}
    others = [rank for rank in case.paces if rank not in found]
    share = median(_mean_wait(case.paces[rank]) for rank in others)
    reasons = {rank: describe_reason(case.paces, rank, case.troubles.get(nodes[rank], ())) for rank in found}
    said = set(reasons.values())
    why = next(iter(said)) if len(said) == 1 else ""
    are = f"{ranks_phrase(found, (nodes[rank] for rank in found))} {'are' if len(found) > 1 else 'is'}"
    return Verdict(
        kind=Kind.SLOW,
        cls=Class.SLOW,
        confidence=_confidence(nodes, found),
        summary=f"{are} slower than the others, which wait for it {share:.0%} of the time{f': {why}' if why else ''}",
        culprits=tuple(_straggler_culprit(case, rank, nodes[rank], reasons[rank]) for rank in found[:MAX_NAMED]),
        waiting=(Waiting(ranks=fold_ranks(others), where=None, op="wait in collectives"),),
        next=(f"clusterctl stacks {case.run} --rank {fold_ranks(found)}", "clusterctl stats"),
    )


def _straggler_culprit(case: Evidence, rank: int, node: str, why: str) -> Culprit:
    where, op = _locate_own_work(case, rank)
    evidence = f"it waits for its peers {_mean_wait(case.paces[rank]):.0%} of the time" + (f"; {why}" if why else "")
    return Culprit(rank=rank, node=node, where=where, op=op, evidence=evidence)


def describe_reason(paces: Mapping[int, RankTiming], rank: int, troubles: Sequence[str]) -> str:
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
    words = [(share, text) for text, share in own.waits_for.items() if share >= _FREQUENT_SHARE]
    if words:
        return _SLOW_TEXT.get(max(words)[1], max(words)[1])
    return f"it computes ({own.cpu:.1f} cores)" if own.cpu >= 0.5 else ""


def _judge_common_shortage(case: Evidence) -> Verdict | None:
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


def describe_timings(paces: Mapping[int, RankTiming]) -> str:
    """Return what the ranks of a run that moves do with their time, for a sentence; "" where that is not known."""
    shares = [_mean_wait(pace) for pace in paces.values() if pace.waits]
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


def _mean_wait(pace: RankTiming) -> float:
    return sum(pace.waits) / len(pace.waits) if pace.waits else 0.0


LONG_START_S = 60.0
"""A start that takes less long is nobody's question."""
_IMPORTS = "<frozen importlib"


def judge_slow_start(case: Evidence) -> Verdict | None:
    """Return which ranks have not come so far as the others, a while after their start; `None` where nobody is late."""
    looks = {rank.rank: rank.look for rank in case.ranks if rank.look is not None and not rank.look.error}
    if case.unbegun is None or case.unbegun < LONG_START_S or len(looks) < len(case.ranks):
        return None
    waiting = [rank for rank, look in looks.items() if locate_rank(look).doing in WAITS and not is_computing(look)]
    late = [rank for rank in looks if rank not in waiting]
    importing = [rank for rank in late if is_importing(looks[rank])]
    if not waiting and len(importing) == len(looks) > 0:
        return _judge_import_storm(case, looks)
    if not waiting or not late:
        return None
    nodes = {rank.rank: rank.node for rank in case.ranks}
    return Verdict(
        kind=Kind.START,
        cls=Class.SLOW,
        confidence=_confidence(nodes, late),
        summary=f"{ranks_phrase(late, (nodes[rank] for rank in late))} {_describe_start_activity(looks[late[0]])} "
        f"{case.unbegun:.0f} s after the start; {wait_phrase(waiting)} for their peers",
        culprits=tuple(_start_culprit(rank, nodes[rank], looks[rank]) for rank in late[:MAX_NAMED]),
        waiting=(Waiting(ranks=fold_ranks(waiting), where=locate_rank(looks[waiting[0]]).where, op=None),),
        next=(f"clusterctl stacks {case.run} --rank {fold_ranks(late)}", f"clusterctl logs {case.run}"),
    )


def is_importing(look: RankSnapshot) -> bool:
    """Return whether a rank is importing a module."""
    return any(frame.file.startswith(_IMPORTS) for frame in look.frames or ())


def _describe_start_activity(look: RankSnapshot) -> str:
    told = describe_kernel_wait(look)
    return ("still imports modules" if is_importing(look) else "has not joined yet") + (f" ({told})" if told else "")


def _start_culprit(rank: int, node: str, look: RankSnapshot) -> Culprit:
    place = locate_rank(look)
    op = "import" if is_importing(look) else place.op
    return Culprit(rank=rank, node=node, where=place.where, op=op, evidence=_describe_start_activity(look))


def _judge_import_storm(case: Evidence, looks: Mapping[int, RankSnapshot]) -> Verdict:
    """All ranks import at once: what holds them is the file system that the modules lie on, or their CPUs."""
    stored = [rank for rank, look in looks.items() if is_waiting_for_storage(look) or look.state == "D"]
    more = f"; {len(stored)} of them wait for the file system that the modules lie on" if stored else ""
    places = {locate_rank(look).where for look in looks.values()}
    at = f" ({next(iter(places))})" if len(places) == 1 else ""
    return Verdict(
        kind=Kind.START,
        cls=Class.SLOW,
        confidence=Confidence.AMBIGUOUS,
        summary=f"all ranks still import modules{at} {case.unbegun or 0:.0f} s after the start{more}",
        waiting=(
            Waiting(ranks=fold_ranks(looks), where=next(iter(places)) if len(places) == 1 else None, op="import"),
        ),
        next=(f"clusterctl stacks {case.run}", "clusterctl exec -- df -hT ."),
    )
