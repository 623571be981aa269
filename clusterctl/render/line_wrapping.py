"""Sentences on a terminal that is narrower than they are: broken between words, and never within a command to copy."""

from __future__ import annotations

import re
import unicodedata

from clusterctl.logs.safe_text import strip_colours

_WORD = re.compile(r"(?:`[^`]*`|[^\s`])+|`|\s+")
"""A word or a gap. Text between backticks belongs to one word."""

_LABEL = re.compile(r"^\s*\S+\s{2,}(?=\S)")
_QUOTED = re.compile(r"^\s*[│|]( |$)")
_MOST_INDENTED = 0.4
_DEEPER = 2


def count_columns(text: str) -> int:
    """Return how many columns a text without colours takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrap_line(line: str, width: int | None) -> list[str]:
    """Return a line as lines of `width` columns, as far as words allow; those after the first are indented.

    What is quoted from elsewhere (behind a bar) stays one line, and so does what has line breaks of its own.
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
        # What is too long for any line, such as a path, is left where it is for the terminal to break.
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
