"""Judges a run by the exits and positions of its ranks, and by errors that ended the run without an exit."""

from __future__ import annotations

from dataclasses import replace

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import fold_ranks
from clusterctl.why import collectives, crash, hang, slowness
from clusterctl.why.evidence_types import Evidence, Rank, RunError
from clusterctl.why.failure_headline import SENT_FROM_OUTSIDE
from clusterctl.why.hang import format_waiting
from clusterctl.why.stack_position import UNKNOWN_POSITION, is_waiting_for_peers, locate_rank, name_culprits
from clusterctl.why.verdict import MAX_NAMED, Confidence, Culprit, Fault, ProblemKind, Verdict, Waiting, format_ranks

_KINDS = {
    "node_lost": (ProblemKind.CRASH, Fault.NODE_LOST, "clusterctl health --nodes {node}"),
    "port_taken": (ProblemKind.CRASH, Fault.PORT_TAKEN, "clusterctl exec --nodes {node} -- ss -ltnp"),
    "unhealthy": (ProblemKind.CRASH, Fault.UNHEALTHY, "clusterctl health --nodes {node}"),
    "time_limit": (ProblemKind.SLOW, Fault.TIME_LIMIT, "clusterctl status {run}"),
    "idle": (ProblemKind.SLOW, Fault.IDLE, "clusterctl logs {run}"),
    "start_failed": (ProblemKind.START, Fault.NOT_STARTED, "clusterctl status {run}"),
    "refused": (ProblemKind.REFUSED, Fault.REFUSED, "clusterctl health"),
    "left_work": (ProblemKind.CRASH, Fault.EXITED_EARLY, "clusterctl logs {run}"),
    "cancelled": (ProblemKind.NONE, Fault.CANCELLED, "clusterctl logs {run}"),
}


def judge_run(evidence: Evidence) -> Verdict:
    """Return a verdict on what went wrong with a run, and which ranks or nodes are to blame."""
    verdict = _find_verdict(evidence)
    roles = {rank.node: rank.role for rank in evidence.ranks if rank.role}
    blamed = {roles.get(culprit.node or "") for culprit in verdict.culprits}
    if len(blamed) == 1 and (role := blamed.pop()) is not None:
        verdict = replace(verdict, summary=f"role `{role}`: {verdict.summary}")
    # After the end of a run, its ranks have no stacks.
    commands = tuple(
        text for text in verdict.next_commands if not (evidence.has_ended and text.startswith("clusterctl stacks"))
    )
    return replace(verdict, next_commands=commands, evidence_folder=evidence.evidence_folder or evidence.run_folder)


def _find_verdict(evidence: Evidence) -> Verdict:
    crashed = None if evidence.reason == "stalled" else crash.judge_crash(evidence)
    if crashed is not None and evidence.evidence_folder is not None:
        if crashed.cls is Fault.PEER_LOST:
            # A timeout of the process group ended a stall. The positions of the ranks before the timeout show the
            # reason.
            return hang.judge_hang(evidence) or crashed
        if crashed.cls in (Fault.SIGNAL, Fault.KILLED):
            return _judge_killed_stall(evidence) or crashed
    if crashed is not None:
        return crashed
    error = evidence.run_error
    if error is not None and error.reasons:
        return _describe_refusals(error)
    if (missed := _judge_early_exits(evidence)) is not None:
        return missed
    if error is not None and error.kind in _KINDS and error.kind != "cancelled":
        return _judge_run_error(evidence, error)
    alive = [rank for rank in evidence.ranks if rank.end is None]
    if evidence.stalled or evidence.reason == "stalled":
        return hang.judge_hang(evidence) or Verdict(
            kind=ProblemKind.HANG,
            cls=Fault.NONE,
            confidence=Confidence.UNKNOWN,
            summary="no rank makes progress, and no rank could be examined",
            missing_evidence=tuple(f"rank {rank.rank}: {rank.snapshot_error}" for rank in alive[:MAX_NAMED]),
            next_commands=(f"clusterctl stacks {evidence.run}",),
        )
    if error is not None:
        return _judge_run_error(evidence, error)
    rules = (
        hang.judge_missing_nodes,
        slowness.judge_slow_start,
        slowness.judge_blocking_ranks,
        slowness.judge_stragglers,
    )
    parts = evidence.split_by_role().values()
    found = (verdict for rule in rules for part in parts if (verdict := rule(part)) is not None)
    return next(found, None) or _judge_healthy(evidence)


def _judge_killed_stall(evidence: Evidence) -> Verdict | None:
    """Judge ranks that were killed during a stall, by their snapshots before the kill."""
    killed = {rank.rank for rank in evidence.ranks if rank.end is not None and rank.end.signal in SENT_FROM_OUTSIDE}
    signalled = {rank.rank for rank in evidence.ranks if rank.end is not None and rank.end.signal is not None}
    if not killed or killed != signalled:
        return None
    ranks = tuple(
        replace(rank, end=replace(rank.end, stopped=True)) if rank.end is not None and rank.rank in killed else rank
        for rank in evidence.ranks
    )
    verdict = hang.judge_hang(replace(evidence, ranks=ranks))
    if verdict is None or not verdict.culprits:
        return None
    sure = Confidence.LIKELY if verdict.confidence is Confidence.CERTAIN else verdict.confidence
    return replace(
        verdict, confidence=sure, summary=f"{verdict.summary}; then {format_ranks(killed)} got a kill signal"
    )


def _judge_early_exits(evidence: Evidence) -> Verdict | None:
    """Return a verdict on ranks that ended with 0 while others wait for them; `None` if no rank waits."""
    early = [r for r in evidence.ranks if r.end is not None and r.end.ended_well and not r.end.stopped]
    alive = [rank for rank in evidence.ranks if rank.end is None]
    waiting = [(r, s) for r in alive if (s := r.snapshot) is not None and not s.error and is_waiting_for_peers(s)]
    if not early or not waiting:
        return None
    waiting_ranks = [rank for rank, _ in waiting]
    numbers = [rank.rank for rank in waiting_ranks]
    ended = f"{format_ranks(rank.rank for rank in early)} ended with 0"
    both = (*_name_early_culprits(early), *_name_early_culprits(waiting_ranks))
    if not evidence.stalled:
        if evidence.evidence_folder is not None:
            return None  # The snapshots are of an earlier stall.
        # The run makes progress, so the ranks that ended may belong to a group that is no longer used.
        return Verdict(
            kind=ProblemKind.HANG,
            cls=Fault.EXITED_EARLY,
            confidence=Confidence.AMBIGUOUS,
            summary=f"{ended}, and {format_ranks(numbers)} may wait for their peers",
            culprits=both,
        )
    blamed = hang.judge_hang(evidence)
    if blamed is not None and blamed.culprits:
        # The waiting ranks may wait for the ended ranks or for the blamed ranks.
        culprits = (*_name_early_culprits(early), *blamed.culprits)
        summary = f"{blamed.summary}; {ended}"
        return replace(blamed, confidence=Confidence.AMBIGUOUS, culprits=culprits, summary=summary)
    confidence = Confidence.LIKELY
    if all(collectives.is_in_default_group(snapshot) for _, snapshot in waiting):
        if len(early) > len(waiting):
            confidence = Confidence.AMBIGUOUS  # If most ranks have ended, the waiting rank may be the wrong one.
        elif len(waiting) == len(alive) and len(early) < len(waiting) and not any(s.blindness for _, s in waiting):
            confidence = Confidence.CERTAIN
    return Verdict(
        kind=ProblemKind.HANG,
        cls=Fault.EXITED_EARLY,
        confidence=confidence,
        summary=f"{ended} while {format_waiting(numbers)} for their peers",
        culprits=_name_early_culprits(early) if len(early) <= len(waiting) else both,
        waiting=(Waiting(ranks=fold_ranks(numbers), where=None, op="wait for their peers"),),
        next_commands=crash.list_next_commands(Fault.EXITED_EARLY, evidence.run, early[0].rank, None),
    )


def _name_early_culprits(ranks: list[Rank]) -> tuple[Culprit, ...]:
    return name_culprits(
        ranks,
        lambda rank: "it still waits for its peers" if rank.end is None else crash.describe_exit(rank.end),
        lambda rank: locate_rank(rank.snapshot) if rank.end is None else UNKNOWN_POSITION,
    )


def _judge_run_error(evidence: Evidence, error: RunError) -> Verdict:
    """Judge an error that ended the run without an exit of a worker."""
    kind, cls, command = _KINDS.get(error.kind, (ProblemKind.CRASH, Fault.UNKNOWN, "clusterctl status {run}"))
    reason = "; ".join((error.message, *evidence.health_problems.get(error.node or "", ())))
    next_command = command.format(node=error.node or "NODE", run=evidence.run)
    return Verdict(
        kind=kind,
        cls=cls,
        confidence=Confidence.CERTAIN,
        summary="; ".join((error.message, *evidence.warnings)),
        culprits=() if error.node is None else (Culprit(rank=None, node=error.node, evidence=reason),),
        next_commands=tuple(text for text in (error.hint, next_command) if text),
    )


def _describe_refusals(error: RunError) -> Verdict:
    """Return a verdict with the reasons for which a start was refused: each reason once, with its nodes."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for reason in error.reasons:
        nodes.setdefault((reason.check, reason.message), []).extend([reason.node] if reason.node else [])
    texts = [
        ": ".join(part for part in (" on ".join(part for part in (check, fold_hosts(names)) if part), message) if part)
        for (check, message), names in nodes.items()
    ]
    more = f"; and {len(texts) - 1} more" if len(texts) > 1 else ""
    hints = dict.fromkeys(reason.hint for reason in error.reasons if reason.hint)
    named = dict.fromkeys(reason.node for reason in error.reasons if reason.node)
    has_check = named and any(reason.check for reason in error.reasons)
    health = f"clusterctl health --nodes {fold_hosts(named)}" if has_check else ""
    return Verdict(
        kind=ProblemKind.REFUSED,
        cls=Fault.REFUSED,
        confidence=Confidence.CERTAIN,
        summary=f"nothing was started: {texts[0]}{more}",
        culprits=tuple(
            Culprit(rank=None, node=name, evidence=f"{check}: {message}" if check and len(texts) > 1 else message)
            for (check, message), names in nodes.items()
            for name in names
        ),
        next_commands=tuple(text for text in (*hints, health, error.hint) if text),
    )


def _judge_healthy(evidence: Evidence) -> Verdict:
    timings, unknown = slowness.describe_timings(evidence.timings), slowness.describe_unknown_waits(evidence.timings)
    more = f"; {timings or unknown}" if timings or unknown else ", or may still be at their first step"
    ended = "; ".join(("all ranks ended with 0" if evidence.warnings else "it ended well", *evidence.warnings))
    # That no rule finds a problem in a live run does not exclude one that no rule knows.
    known = Confidence.CERTAIN if evidence.has_ended else Confidence.LIKELY
    summary = ended if evidence.has_ended else f"no problem found: ranks make progress{more}"
    return Verdict(kind=ProblemKind.NONE, cls=Fault.NONE, confidence=known, summary=summary)
