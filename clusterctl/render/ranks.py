"""Sets of ranks and of nodes in short."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as `0-4,6`, each once and in order."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def fold_nodes(nodes: Iterable[str]) -> str:
    """Return node names as `gpu[01-03,07]`."""
    from clusterctl.config.hosts import fold

    return fold(nodes)


def count(number: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
