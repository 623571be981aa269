"""Sets of ranks and of nodes in short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks

__all__ = ["count", "fold_nodes", "fold_ranks"]

if TYPE_CHECKING:
    from collections.abc import Iterable


def fold_nodes(nodes: Iterable[str]) -> str:
    """Return node names as `gpu[01-03,07]`."""
    from clusterctl.config.host_ranges import fold_hosts

    return fold_hosts(nodes)


def count(number: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
