"""Wraps sentences to the width of a terminal: between words, and never within a command in backticks."""

from __future__ import annotations

import re
import unicodedata

from clusterctl.logs.safe_text import strip_colours

_WORD = re.compile(r"(?:`[^`]*`|[^\s`])+|`|\s+")
"""Matches a word or the blanks between words. Text between backticks is part of one word."""

_LABEL = re.compile(r"^\s*\S+\s{2,}(?=\S)")
_QUOTED = re.compile(r"^\s*[│|]( |$)")
_MOST_INDENTED = 0.4
_DEEPER = 2


def count_columns(text: str) -> int:
    """Return the width of a text in terminal columns. The text must not contain colours."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrap_line(line: str, width: int | None) -> list[str]:
    """Return a line wrapped to `width` columns; all lines but the first are indented.

    Quoted output (after a bar) and text with line breaks are not wrapped. A word that is too long is not broken.
    """
    plain = strip_colours(line)
    if width is None or count_columns(plain) <= width or "\n" in line or _QUOTED.match(plain):
        return [line]
    indent = " " * _indent(plain, width)
    lines, here, used, gap = list[str](), "", 0, ""
    for word in _WORD.findall(line):
        if word.isspace():
            gap += word
            continue
        taken = count_columns(strip_colours(word))
        # A word that is too long for any line, such as a path, remains in its line.
        if here.strip() and (used > width or used + len(gap) + taken > width >= len(indent) + taken):
            lines.append(here)
            here, used, gap = indent, len(indent), ""
        here, used, gap = here + gap + word, used + len(gap) + taken, ""
    return [*lines, here]


def _indent(plain: str, width: int) -> int:
    label = _LABEL.match(plain)
    if label is not None and label.end() <= width * _MOST_INDENTED:
        return label.end()
    return len(plain) - len(plain.lstrip()) + _DEEPER
