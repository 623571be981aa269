"""Formats durations, sizes, signals and ranks for people."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def format_duration(seconds: float) -> str:
    """Return a duration in the short form for tables: `0.6s`, `42s`, `3m12s`, `2h05m`, `3d04h`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def describe_duration(seconds: float) -> str:
    """Return a duration in the form for sentences: `40 s`, `2.5 min`, `3 h`, `2 d`.

    Up to two minutes the unit is seconds, because users set such time limits in seconds.
    """
    if seconds <= 120:
        return f"{seconds:.0f} s"
    unit, length = ("min", 60.0) if seconds < 3600 else ("h", 3600.0) if seconds < 86400 else ("d", 86400.0)
    count = seconds / length
    return f"{count:.0f} {unit}" if count >= 9.95 else f"{count:.1f}".removesuffix(".0") + f" {unit}"


def format_size(count: float) -> str:
    """Return a size as text: `512 B`, `64 KiB`, `1.4 GiB`, `76 GiB`. From 1 MiB on it has at least two digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # Choose the unit after rounding: 1023.7 KiB is 1.0 MiB.
        text = f"{value:.0f}" if unit in ("B", "KiB") or value >= 9.95 else f"{value:.1f}"
        if unit == "TiB" or float(text) < 1024:
            return f"{text} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes every size")


def plural(number: int, noun: str, plural_noun: str = "") -> str:
    """Return `1 file` or `2 files`; `plural_noun` is the irregular plural of the noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural_noun or noun + 's'}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGSEGV` for 11; for an unnamed signal, `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def group_pairs(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Group the second values of pairs by the first values, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a text with ranges in ascending order, such as `0-4,6`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0-4,6`."""
    folded = fold_ranks(ranks)
    return f"rank {folded}" if folded.isdigit() else f"ranks {folded}"
