"""From a case to a verdict: how ranks ended first, then where they are, then what ended the run without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives, crash, hang, slowness
from clusterctl.why.evidence import Evidence, Rank, RunError, StartRefusal
from clusterctl.why.hang import WAITS, is_computing, wait_phrase
from clusterctl.why.headline import SENT_FROM_OUTSIDE
from clusterctl.why.stack_position import locate_rank
from clusterctl.why.verdict import MAX_NAMED, Class, Confidence, Culprit, Kind, Verdict, Waiting, ranks_phrase

_KINDS = {
    "node_lost": (Kind.CRASH, Class.NODE_LOST, "clusterctl health --nodes {node}"),
    "port_taken": (Kind.CRASH, Class.PORT_TAKEN, "clusterctl exec --nodes {node} -- ss -ltnp"),
    "unhealthy": (Kind.CRASH, Class.UNHEALTHY, "clusterctl health --nodes {node}"),
    "time_limit": (Kind.SLOW, Class.TIME_LIMIT, "clusterctl status {run}"),
    "start_failed": (Kind.START, Class.NOT_STARTED, "clusterctl status {run}"),
    "refused": (Kind.REFUSED, Class.REFUSED, "clusterctl health"),
    "left_work": (Kind.CRASH, Class.EXITED_EARLY, "clusterctl logs {run}"),
    "cancelled": (Kind.NONE, Class.CANCELLED, "clusterctl logs {run}"),
}


def judge_run(case: Evidence) -> Verdict:
    """Return what went wrong with a run, and who."""
    verdict = _find_verdict(case)
    # No rank of a run that has ended has stacks.
    steps = tuple(step for step in verdict.next if not (case.over and step.startswith("clusterctl stacks")))
    return replace(verdict, next=steps, bundle=case.seen_at or case.folder)


def _find_verdict(case: Evidence) -> Verdict:
    crashed = None if case.reason == "stalled" else crash.judge_crash(case)
    if crashed is not None and crashed.cls is Class.PEER_LOST and case.seen_at is not None:
        # A stall that ended by the time limits of the process groups: where ranks were before that tells more.
        return hang.judge_hang(case) or crashed
    if crashed is not None and crashed.cls in (Class.SIGNAL, Class.KILLED) and case.seen_at is not None:
        return _killed_in_standstill(case) or crashed
    if crashed is not None:
        return crashed
    if case.other is not None and case.other.reasons:
        return _describe_refusals(case.other, case.other.reasons)
    missed = _judge_early_exits(case)
    if missed is not None:
        return missed
    if case.other is not None and case.other.kind in _KINDS and case.other.kind != "cancelled":
        return _judge_run_error(case, case.other)
    if case.stalled or case.reason == "stalled":
        return hang.judge_hang(case) or _judge_unobserved(case)
    if case.other is not None:
        return _judge_run_error(case, case.other)
    missing = hang.judge_missing_nodes(case)
    return (
        missing
        or slowness.judge_slow_start(case)
        or slowness.judge_blocking_ranks(case)
        or slowness.judge_stragglers(case)
        or _judge_healthy(case)
    )


def _killed_in_standstill(case: Evidence) -> Verdict | None:
    """Ranks that somebody killed while nothing moved: what held them is told by what was seen before."""
    killed = {rank.rank for rank in case.ranks if rank.end is not None and rank.end.signal in SENT_FROM_OUTSIDE}
    own = {rank.rank for rank in case.ranks if rank.end is not None and rank.end.signal is not None}
    if not killed or killed != own:
        return None
    before = replace(
        case,
        ranks=tuple(
            replace(rank, end=replace(rank.end, stopped=True)) if rank.end is not None and rank.rank in killed else rank
            for rank in case.ranks
        ),
    )
    told = hang.judge_hang(before)
    if told is None or not told.culprits:
        return None
    sure = Confidence.LIKELY if told.confidence is Confidence.CERTAIN else told.confidence
    return replace(told, confidence=sure, summary=f"{told.summary}; then somebody killed {ranks_phrase(killed)}")


def _judge_early_exits(case: Evidence) -> Verdict | None:
    """Return the ranks that left others waiting; `None` where nobody left, or nobody is seen to wait."""
    left = [rank for rank in case.ranks if rank.end is not None and rank.end.well and not rank.end.stopped]
    alive = [rank for rank in case.ranks if rank.end is None]
    waiting = [rank for rank in alive if _is_waiting(rank)]
    if not left or not waiting:
        return None
    if not case.stalled and case.seen_at is not None:
        return None  # what was seen is of an earlier standstill
    surely = case.stalled and all(
        collectives.is_in_default_group(rank.look) for rank in waiting if rank.look is not None
    )
    if not case.stalled:
        return _perhaps(left, waiting)
    blamed = hang.judge_hang(case)
    others = () if blamed is None else blamed.culprits
    if blamed is not None and others:
        # Those that wait lack the one as the other.
        both = (*_early_culprits(left), *others)
        return replace(
            blamed,
            confidence=Confidence.AMBIGUOUS,
            culprits=both,
            summary=f"{blamed.summary}; {_describe_early_exits(left)}",
        )
    return Verdict(
        kind=Kind.HANG,
        cls=Class.EXITED_EARLY,
        confidence=_early_exit_confidence(left, waiting, alive) if surely else Confidence.LIKELY,
        summary=f"{_describe_early_exits(left)} while {wait_phrase([rank.rank for rank in waiting])} for their peers",
        culprits=_early_culprits(left)
        if len(left) <= len(waiting)
        else (*_early_culprits(left), *_early_culprits(waiting)),
        waiting=(Waiting(ranks=fold_ranks([rank.rank for rank in waiting]), where=None, op="wait for their peers"),),
        next=crash.next_command(Class.EXITED_EARLY, case.run, left[0].rank, None),
    )


def _perhaps(left: list[Rank], waiting: list[Rank]) -> Verdict:
    """A look at one moment of a run that moves: those that are through may belong to no group that is still used."""
    numbers = ranks_phrase([rank.rank for rank in waiting])
    return Verdict(
        kind=Kind.HANG,
        cls=Class.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS,
        summary=f"{_describe_early_exits(left)}, and {numbers} may wait for their peers",
        culprits=(*_early_culprits(left), *_early_culprits(waiting)),
    )


def _early_exit_confidence(left: list[Rank], waiting: list[Rank], alive: list[Rank]) -> Confidence:
    if len(left) > len(waiting):
        return Confidence.AMBIGUOUS  # one that waits where most are through may be the one that is wrong
    return Confidence.CERTAIN if len(waiting) == len(alive) and len(left) < len(waiting) else Confidence.LIKELY


def _is_waiting(rank: Rank) -> bool:
    look = rank.look
    return look is not None and not look.error and locate_rank(look).doing in WAITS and not is_computing(look)


def _describe_early_exits(left: list[Rank]) -> str:
    return f"{ranks_phrase(rank.rank for rank in left)} ended with 0"


def _early_culprits(ranks: list[Rank]) -> tuple[Culprit, ...]:
    return tuple(
        Culprit(
            rank=rank.rank,
            node=rank.node,
            where=locate_rank(rank.look).where if rank.end is None else None,
            op=locate_rank(rank.look).op if rank.end is None else None,
            evidence="it still waits for its peers" if rank.end is None else crash.describe_exit(rank.end),
        )
        for rank in ranks[:MAX_NAMED]
    )


def _judge_run_error(case: Evidence, other: RunError) -> Verdict:
    """What ended the run where no exit of a worker did."""
    kind, cls, command = _KINDS.get(other.kind, (Kind.CRASH, Class.UNKNOWN, "clusterctl status {run}"))
    troubles = case.troubles.get(other.node or "", ())
    told = command.format(node=other.node or "NODE", run=case.run)
    culprits = (
        (Culprit(rank=None, node=other.node, evidence="; ".join((other.message, *troubles))),)
        if other.node is not None
        else ()
    )
    return Verdict(
        kind=kind,
        cls=cls,
        confidence=Confidence.CERTAIN,
        summary="; ".join((other.message, *case.warnings)),
        culprits=culprits,
        next=tuple(text for text in (other.hint, told) if text),
    )


def _describe_refusals(other: RunError, reasons: Sequence[StartRefusal]) -> Verdict:
    """Tell for what a start was refused: each reason once, with the nodes that it is about."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for reason in reasons:
        nodes.setdefault((reason.check, reason.message), []).extend([reason.node] if reason.node else [])
    told = [
        ": ".join(part for part in (" on ".join(part for part in (check, fold_hosts(names)) if part), message) if part)
        for (check, message), names in nodes.items()
    ]
    more = f"; and {len(told) - 1} more" if len(told) > 1 else ""
    hints = dict.fromkeys(reason.hint for reason in reasons if reason.hint)
    named = dict.fromkeys(reason.node for reason in reasons if reason.node)
    look = f"clusterctl health --nodes {fold_hosts(named)}" if any(reason.check for reason in reasons) and named else ""
    return Verdict(
        kind=Kind.REFUSED,
        cls=Class.REFUSED,
        confidence=Confidence.CERTAIN,
        summary=f"nothing was started: {told[0]}{more}",
        culprits=tuple(
            Culprit(rank=None, node=name, evidence=f"{check}: {message}" if check and len(told) > 1 else message)
            for (check, message), names in nodes.items()
            for name in names
        ),
        next=tuple(text for text in (*hints, look, other.hint) if text),
    )


def _judge_unobserved(case: Evidence) -> Verdict:
    alive = [rank for rank in case.ranks if rank.end is None]
    return Verdict(
        kind=Kind.HANG,
        cls=Class.NONE,
        confidence=Confidence.UNKNOWN,
        summary="nothing moves, and nobody could look at the ranks",
        missing=tuple(f"rank {rank.rank}: {_why_unobserved(rank)}" for rank in alive[:MAX_NAMED]),
        next=(f"clusterctl stacks {case.run}",),
    )


def _judge_healthy(case: Evidence) -> Verdict:
    spent = slowness.describe_timings(case.paces)
    moving = (
        f"nothing is wrong: ranks make progress{f'; {spent}' if spent else ', or may still be at their first step'}"
    )
    summary = "; ".join(("it ended well", *case.warnings)) if case.over else moving
    # Nobody has measured anything of a run of which no rank tells.
    known = Confidence.CERTAIN if case.over or spent else Confidence.LIKELY
    return Verdict(kind=Kind.NONE, cls=Class.NONE, confidence=known, summary=summary)


def _why_unobserved(rank: Rank) -> str:
    return rank.look.error if rank.look is not None and rank.look.error else "nobody looked at it"
