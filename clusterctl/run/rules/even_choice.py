"""Chooses some elements of a sequence at even distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def choose_evenly(items: Sequence[T], max_count: int) -> list[T]:
    """Return at most `max_count` items, evenly chosen, with the first and the last item."""
    if len(items) <= max_count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (max_count - 1))] for index in range(max_count)]
