"""Whose end began it: the first that leaves or breaks the group, whatever its exit code. Its peers die of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import exit_causes, peer_losses
from clusterctl.why.exit_causes import describe_ranks, list_peer_victims, make_culprits, normalize_message
from clusterctl.why.verdict import Class, Confidence, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.why.evidence import Evidence, Rank, RankExit

_NOTICED_S = 120.0
"""Peers of a rank that ends notice it at their next collective: later than this, another reason may be theirs."""


def judge_crash(case: Evidence) -> Verdict | None:
    """Return who failed by itself first; `None` where nobody did."""
    ended = [(rank, rank.end) for rank in case.ranks if rank.end is not None and not rank.end.stopped]
    failed = [(rank, end) for rank, end in ended if not end.well]
    alive = [rank for rank in case.ranks if rank.end is None]
    if not failed:
        return None  # those that ended with 0 while others wait are another matter: `left`
    left = [(rank, end) for rank, end in ended if end.well]
    own = [
        (rank, end)
        for rank, end in failed
        if not end.secondary and exit_causes.classify_exit(end) is not Class.PEER_LOST
    ]
    if own:
        return _of_own(case, own, failed)
    if left:
        return _left_early(case, left, failed, alive)
    return peer_losses.judge_peer_losses(case, failed)


def _of_own(case: Evidence, own: Sequence[tuple[Rank, RankExit]], failed: Sequence[tuple[Rank, RankExit]]) -> Verdict:
    """Ranks that failed for a reason of their own: the first; or all, where they failed alike."""
    first, end = min(own, key=lambda each: (each[1].latest, each[0].rank))
    cls = exit_causes.classify_exit(end)
    if cls is Class.MISMATCH:
        return _unlike(case, first, [rank for rank, _ in failed])
    alike = [
        (r, e)
        for r, e in own
        if exit_causes.classify_exit(e) is cls and normalize_message(e.message) == normalize_message(end.message)
    ]
    rivals = [r for r, e in own if r.rank != first.rank and _may_precede((r, e), (first, end))]
    strangers = [r for r in rivals if r.rank not in {a.rank for a, _ in alike}]
    named = alike if len(alike) > 1 and len(alike) == len(own) else [(first, end)]
    confidence = _confidence(
        cls,
        certain=(not rivals or len(named) == len(own)) and exit_causes.is_certain_cause(end),
        doubtful=bool(strangers),
    )
    if confidence is Confidence.AMBIGUOUS:
        named = [(r, e) for r, e in own if r.rank == first.rank or r in strangers]
    who = describe_ranks([rank for rank, _ in named])
    others = [r for r, _ in failed if r.rank not in {n.rank for n, _ in named}]
    summary = f"{who} {'failed alike' if len(named) > 1 and confidence is not Confidence.AMBIGUOUS else 'failed first'}"
    return Verdict(
        kind=Kind.START if cls is Class.NOT_STARTED else Kind.CRASH,
        cls=cls,
        confidence=confidence,
        summary="; ".join(filter(None, (f"{summary}: {exit_causes.describe_exit(end)}", exit_causes.find_advice(end)))),
        culprits=make_culprits(named),
        waiting=list_peer_victims(others),
        next=exit_causes.next_command(cls, case.run, first.rank, first.node, end.message),
    )


def _may_precede(one: tuple[Rank, RankExit], other: tuple[Rank, RankExit]) -> bool:
    """Whether one end may have come before the other: by the clock of their node where they share one."""
    (rank, end), (other_rank, other_end) = one, other
    if rank.node == other_rank.node and end.on_node_clock is not None and other_end.on_node_clock is not None:
        return end.on_node_clock[0] <= other_end.on_node_clock[1]
    return end.earliest <= other_end.latest


def _unlike(case: Evidence, first: Rank, failed: Sequence[Rank]) -> Verdict:
    """A rank got what does not fit what it brought: it is one of two, and which is wrong is not told by its end."""
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.MISMATCH,
        confidence=Confidence.AMBIGUOUS,
        summary=f"ranks brought to one collective what does not fit; {describe_ranks([first])} noticed it first",
        waiting=(Waiting(ranks=fold_ranks([rank.rank for rank in failed]), where=None, op="noticed it"),),
        next=("clusterctl up --set env.TORCH_DISTRIBUTED_DEBUG=DETAIL", f"clusterctl logs {case.run}"),
    )


def _left_early(
    case: Evidence,
    left: Sequence[tuple[Rank, RankExit]],
    failed: Sequence[tuple[Rank, RankExit]],
    alive: Sequence[Rank],
) -> Verdict:
    """Ranks that ended with 0 while others were not through: these lost their peers, or wait for them."""
    first_loss = min((end.latest for _, end in failed), default=None)
    early = [(r, e) for r, e in left if first_loss is None or e.earliest <= first_loss]
    named = early or list(left)
    certain = bool(early) and (
        first_loss is None or all(e.latest < first_loss <= e.latest + _NOTICED_S for _, e in named)
    )
    # One that goes on where most are through may have done a step too many.
    many = len(named) > len(failed) + len(alive)
    rest = [(r, e) for r, e in failed] if many else []
    return Verdict(
        kind=Kind.CRASH,
        cls=Class.EXITED_EARLY,
        confidence=Confidence.AMBIGUOUS if many else Confidence.CERTAIN if certain else Confidence.LIKELY,
        summary=f"{describe_ranks([rank for rank, _ in named])} ended with 0 while others were not through",
        culprits=make_culprits([*named, *rest]),
        waiting=list_peer_victims([r for r, _ in failed] or alive),
        next=exit_causes.next_command(Class.EXITED_EARLY, case.run, named[0][0].rank, None),
    )


def _confidence(cls: Class, *, certain: bool, doubtful: bool) -> Confidence:
    if doubtful:
        return Confidence.AMBIGUOUS
    if cls in (Class.UNKNOWN,):
        return Confidence.LIKELY
    return Confidence.CERTAIN if certain else Confidence.LIKELY
