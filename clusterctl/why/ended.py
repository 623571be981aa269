"""How the ends of ranks are said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks
from clusterctl.why import causes
from clusterctl.why.verdict import Culprit, Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.why.case import End, Rank

MOST_NAMED = 8
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")


def called(ranks: Sequence[Rank]) -> str:
    """Return ranks for a sentence, with the node where it is one."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    on = f" on {nodes[0]}" if len(nodes) == 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks([rank.rank for rank in ranks])}{on}"


def culprits_of(named: Sequence[tuple[Rank, End]]) -> tuple[Culprit, ...]:
    """Return ranks as those that began it, each with its line and its words."""
    found = []
    for rank, end in sorted(named, key=lambda each: each[0].rank)[:MOST_NAMED]:
        line, function = causes.where(end)
        found.append(Culprit(rank=rank.rank, node=rank.node, where=line, op=function, evidence=causes.said(end)))
    return tuple(found)


def that_lost_a_peer(ranks: Sequence[Rank]) -> tuple[Waiting, ...]:
    """Return ranks as those that ended because of others."""
    if not ranks:
        return ()
    return (Waiting(ranks=fold_ranks([rank.rank for rank in ranks]), where=None, op="lost a peer"),)


def plain(message: str) -> str:
    """Return a message without what differs between ranks that fail alike: numbers and addresses."""
    return _DIGITS.sub("#", message)
