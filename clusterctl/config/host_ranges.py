"""Host ranges such as `gpu[01-04,07],rack[1-2]-n[0-3]`: expansion to names, folding of names, selection of nodes."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from clusterctl.errors import NotFoundError
from clusterctl.formatting import group_pairs
from clusterctl.suggestion import find_similar

V = TypeVar("V")

MAX_HOSTS = 10_000
"""Largest number of hosts in an expression: a typing error must not exhaust the memory."""

_MAX_DIGITS = 18
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)
_NATURAL = re.compile(r"([0-9]+)")


class HostRangeError(ValueError):
    """A host expression is not valid.

    Attributes:
        offset: Index of the wrong text in the expression.
        length: Length of the wrong text in characters.
        hint: A remedy, or `None`.
    """

    def __init__(self, message: str, offset: int, length: int = 1, hint: str | None = None) -> None:
        super().__init__(message)
        self.offset = offset
        self.length = max(1, length)
        self.hint = hint


@dataclass(frozen=True)
class _Span:
    """Numbers `first` to `last`, padded with zeros to `width` digits (0: not padded)."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def texts(self) -> Iterator[str]:
        return (str(number).zfill(self.width) for number in range(self.first, self.last + 1))


def expand_hosts(expression: str, *, limit: int = MAX_HOSTS) -> list[str]:
    """Return all host names of an expression in its order, with duplicates.

    Raises:
        HostRangeError: The expression is empty, has unbalanced brackets, a descending range, or more than `limit`
            names.
    """
    names: list[str] = []
    for offset, item in _split_items(expression):
        parts = _parse_parts(item, offset)
        count = math.prod(sum(map(len, part)) for part in parts if not isinstance(part, str))
        if len(names) + count > limit:
            raise HostRangeError(f"expands to more than {limit} hosts", offset, len(item))
        choices = [[p] if isinstance(p, str) else [t for span in p for t in span.texts()] for p in parts]
        names.extend("".join(choice) for choice in itertools.product(*choices))
    return names


def _split_items(expression: str) -> Iterator[tuple[int, str]]:
    """Split an expression at commas outside of brackets; yield the offset of each item and its stripped text."""
    start, opened = 0, -1
    for index, character in enumerate(expression + ","):
        if character == "[":
            if opened >= 0:
                raise HostRangeError("`[` inside another `[`", index)
            opened = index
        elif character == "]":
            if opened < 0:
                raise HostRangeError("`]` without `[`", index)
            opened = -1
        elif character == "," and (opened < 0 or index == len(expression)):
            if opened >= 0:
                raise HostRangeError("`[` is not closed", opened, len(expression) - opened)
            yield _strip_item(expression, start, index)
            start = index + 1


def _strip_item(expression: str, start: int, end: int) -> tuple[int, str]:
    text = expression[start:end]
    stripped = text.strip()
    if not stripped:
        raise HostRangeError("a host name is missing", min(start, max(0, len(expression) - 1)))
    offset = start + text.index(stripped)
    blank = next((i for i, c in enumerate(stripped) if c.isspace()), None)
    if blank is not None:
        hint = "separate hosts with commas"
        raise HostRangeError("a host name cannot contain blanks", offset + blank, 1, hint)
    return offset, stripped


def _parse_parts(item: str, offset: int) -> list[str | list[_Span]]:
    parts: list[str | list[_Span]] = []
    for piece in re.split(r"(\[[^\]]*\])", item):
        if piece.startswith("["):
            spans, start = [], offset + 1
            for span in piece[1:-1].split(","):
                spans.append(_parse_span(span, start))
                start += len(span) + 1
            parts.append(spans)
        elif piece:
            parts.append(piece)
        offset += len(piece)
    return parts


def _parse_span(piece: str, offset: int) -> _Span:
    match = _RANGE.fullmatch(piece)
    if match is None:
        hint = "write numbers, as in `gpu[01-04,07]`"
        raise HostRangeError(f"`{piece}` is not a range of numbers", offset, len(piece), hint)
    first, last = match[1], match[2] or match[1]
    if max(len(first), len(last)) > _MAX_DIGITS:
        raise HostRangeError(f"contains a number of more than {_MAX_DIGITS} digits", offset, len(piece))
    if int(last) < int(first):
        hint = f"did you mean `{last}-{first}`?"
        raise HostRangeError(f"the range `{piece}` runs backwards", offset, len(piece), hint)
    return _Span(int(first), int(last), len(first) if _is_padded(first) else 0)


def _is_padded(digits: str) -> bool:
    return len(digits) > 1 and digits[0] == "0"


def make_natural_sort_key(name: str) -> tuple[object, ...]:
    """Return a sort key that puts `n2` before `n10`."""
    pieces = _NATURAL.split(name)
    numbers = (int(p) if len(p) <= _MAX_DIGITS else 10**_MAX_DIGITS for p in pieces[1::2])
    return (*zip(pieces[::2], [*numbers, -1], strict=True), name)


def group_names_by_value(values: Mapping[str, V]) -> dict[V, list[str]]:
    """Group names by their value. The groups are in the order of their first names."""
    return group_pairs((value, name) for name, value in values.items())


def fold_hosts(names: Iterable[str]) -> str:
    """Fold names to ranges: `["gpu01", "gpu02", "gpu07"]` gives `gpu[01-02,07]`.

    Duplicates are removed, the names are sorted naturally, and only neighbours in this order are folded. `expand_hosts`
    returns the same names in the same order, unless a name contains a bracket, a comma or a blank. The order matters:
    users paste the result into cluster files, in which the order of the hosts determines the ranks.
    """
    items = [(name, "") for name in sorted(set(names), key=make_natural_sort_key)]
    while any(_LAST_NUMBER.fullmatch(head) for head, _ in items):
        items = _fold_last_number(items)
    return ",".join(head + tail for head, tail in items)


def _fold_last_number(items: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Fold the last number in the unfolded part of each name; an item is the unfolded part and the folded rest."""
    folded = []
    for (prefix, rest, is_counted), group in itertools.groupby(map(_split_at_number, items), key=lambda part: part[:3]):
        numbers = [number for *_, number in group]
        if is_counted:
            folded.append((prefix, _format_ranges(numbers) + rest))
        else:
            folded += [(prefix, number + rest) for number in numbers]
    return folded


def _split_at_number(item: tuple[str, str]) -> tuple[str, str, bool, str]:
    """Split a name at its last unfolded number: return the texts around it, whether to fold it, and the number."""
    head, tail = item
    match = _LAST_NUMBER.fullmatch(head)
    if match is None:
        return "", head + tail, False, ""
    return match[1], match[3] + tail, len(match[2]) <= _MAX_DIGITS, match[2]


def _format_ranges(digits: list[str]) -> str:
    if len(digits) == 1:
        return digits[0]
    runs: list[list[str]] = []
    for text in digits:
        # A range pads every number to the width of its first number.
        width = len(runs[-1][0]) if runs and _is_padded(runs[-1][0]) else 0
        if runs and str(int(runs[-1][-1]) + 1).zfill(width) == text:
            runs[-1].append(text)
        else:
            runs.append([text])
    return "[" + ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]"


def select_hosts(names: Sequence[str], include: str | None = None, exclude: str | None = None) -> list[str]:
    """Select nodes by expressions, in the order of `names`.

    Both expressions may contain ranges, `*` and `?`. A name also selects the numbered copies of a host: `localhost`
    selects `localhost.0` and `localhost.1`.

    Raises:
        HostRangeError: An expression is not valid.
        NotFoundError: An expression names an unknown node, or no node remains.
    """
    wanted = set(names) if include is None else _match_names(names, include)
    unwanted = set() if exclude is None else _match_names(names, exclude)
    chosen = [name for name in names if name in wanted and name not in unwanted]
    if not chosen:
        raise NotFoundError("no node is selected", hint=f"the nodes are {fold_hosts(names)}" if names else None)
    return chosen


def remove_listed_hosts(names: Sequence[str], text: str) -> list[str]:
    """Return the names that a list of hosts does not contain, as it is kept for hostfiles and Slurm.

    Args:
        names: Names of nodes.
        text: A set of hosts on each line, which may contain ranges, `*` and `?`. `#` begins a comment. Unknown hosts
            are ignored, because the list may be about more machines.

    Raises:
        HostRangeError: A line is not valid.
    """
    unwanted: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        expression = line.partition("#")[0].strip()
        try:
            patterns = expand_hosts(expression) if expression else []
            unwanted |= {name for pattern in patterns for name in _find_matches(names, pattern)}
        except HostRangeError as error:
            raise HostRangeError(f"line {number}: {error}", error.offset, error.length, error.hint) from error
    return [name for name in names if name not in unwanted]


def _find_matches(names: Sequence[str], pattern: str) -> set[str]:
    copy = re.compile(rf"{re.escape(pattern)}\.[0-9]+")
    return {n for n in names if n == pattern or copy.fullmatch(n) or fnmatch.fnmatchcase(n, pattern)}


def _match_names(names: Sequence[str], expression: str) -> set[str]:
    matching: set[str] = set()
    for pattern in expand_hosts(expression):
        hits = _find_matches(names, pattern)
        if not hits:
            close = find_similar(pattern, names)
            hint = f"did you mean `{close}`?" if close else f"the nodes are {fold_hosts(names)}"
            raise NotFoundError(f"no node `{pattern}`", hint=hint)
        matching |= hits
    return matching
