"""Rank sets as people write them: `0`, `0-3,7`."""

from __future__ import annotations

import re

import click

_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST = 1_000_000


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """Return the ranks that a person named, or `None` for no choice.

    Raises:
        click.BadParameter: It is no set of ranks.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > _MOST:
            raise click.BadParameter(f"`{text}` is no set of ranks; write e.g. `0-3,7`", param_hint="--rank")
        ranks |= set(range(first, last + 1))
    return frozenset(ranks)
