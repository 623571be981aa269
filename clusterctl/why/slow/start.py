"""A start that takes long: which ranks have not come to the meeting yet, and what they do before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why.places import at_storage, place_of, waits_for
from clusterctl.why.seen import WAITS, computes, wait_of
from clusterctl.why.verdict import Class, Confidence, Culprit, Kind, Verdict, Waiting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.why.case import Case, Look

LONG_S = 60.0
"""A start that takes less long is nobody's question."""
_IMPORTS = "<frozen importlib"
_MOST_NAMED = 8


def judge(case: Case) -> Verdict | None:
    """Return which ranks have not come so far as the others, a while after their start; `None` where nobody is late."""
    looks = {rank.rank: rank.look for rank in case.ranks if rank.look is not None and not rank.look.error}
    if case.unbegun is None or case.unbegun < LONG_S or len(looks) < len(case.ranks):
        return None
    waiting = [rank for rank, look in looks.items() if place_of(look).doing in WAITS and not computes(look)]
    late = [rank for rank in looks if rank not in waiting]
    importing = [rank for rank in late if imports(looks[rank])]
    if not waiting and len(importing) == len(looks) > 0:
        return _storm(case, looks)
    if not waiting or not late:
        return None
    nodes = {rank.rank: rank.node for rank in case.ranks}
    places = {nodes[rank] for rank in late}
    whole = len(places) == 1 and {rank for rank, node in nodes.items() if node in places} == set(late)
    named = f"rank{'s' if len(late) > 1 else ''} {fold_ranks(late)}" + (
        f" on {min(places)}" if len(places) == 1 else ""
    )
    return Verdict(
        kind=Kind.START,
        cls=Class.SLOW,
        confidence=Confidence.LIKELY if len(late) == 1 or whole else Confidence.AMBIGUOUS,
        summary=f"{named} {_does(looks[late[0]])} {case.unbegun:.0f} s after the start; "
        f"{wait_of(waiting)} for their peers",
        culprits=tuple(_culprit(rank, nodes[rank], looks[rank]) for rank in late[:_MOST_NAMED]),
        waiting=(Waiting(ranks=fold_ranks(waiting), where=place_of(looks[waiting[0]]).where, op=None),),
        next=(f"clusterctl stacks {case.run} --rank {fold_ranks(late)}", f"clusterctl logs {case.run}"),
    )


def imports(look: Look) -> bool:
    """Return whether a rank is importing a module."""
    return any(frame.file.startswith(_IMPORTS) for frame in look.frames or ())


def _does(look: Look) -> str:
    told = waits_for(look)
    return ("still imports modules" if imports(look) else "has not joined yet") + (f" ({told})" if told else "")


def _culprit(rank: int, node: str, look: Look) -> Culprit:
    place = place_of(look)
    op = "import" if imports(look) else place.op
    return Culprit(rank=rank, node=node, where=place.where, op=op, evidence=_does(look))


def _storm(case: Case, looks: Mapping[int, Look]) -> Verdict:
    """All ranks import at once: what holds them is the file system that the modules lie on, or their CPUs."""
    stored = [rank for rank, look in looks.items() if at_storage(look) or look.state == "D"]
    more = f"; {len(stored)} of them wait for the file system that the modules lie on" if stored else ""
    places = {place_of(look).where for look in looks.values()}
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
