"""YAML's own mistakes in words that name the cause: libyaml tells what it expected, people want what they did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.config.text.tree import Document, Mark, Report

if TYPE_CHECKING:
    from collections.abc import Callable


def syntax_problem(document: Document, error: Exception, report: Report) -> None:
    """Report what libyaml refused, at the place where a person looks for it."""
    place = getattr(error, "problem_mark", None)
    if place is None:
        report.add(Mark(document, 1, 1), f"not YAML: {str(error).splitlines()[0]}")
        return
    context = getattr(error, "context_mark", None)
    mark = _inside_text(Mark(document, place.line + 1, place.column + 1))
    opened = None if context is None else Mark(document, context.line + 1, context.column + 1)
    problem = str(getattr(error, "problem", "") or "")
    for words, answer in _SYNTAX:
        if words in problem:
            text, hint, at = answer(mark, opened)
            report.add(at, text, hint)
            return
    report.add(mark, f"not YAML: {problem}")


def _inside_text(mark: Mark) -> Mark:
    """Libyaml points behind the end of the text when something is not closed; people look at the last line."""
    lines = mark.document.lines
    if mark.line <= len(lines) and not (mark.line == len(lines) and not lines[-1] and mark.line > 1):
        return mark
    last = max(1, len(lines) - (0 if lines[-1] else 1))
    return Mark(mark.document, last, len(lines[last - 1]) + 1)


_Answer = tuple[str, "str | None", Mark]


def _character(mark: Mark) -> str:
    lines = mark.document.lines
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    return line[mark.column - 1 : mark.column]


def _cannot_start(mark: Mark, _: Mark | None) -> _Answer:
    if _character(mark) == "\t":
        return "a tab is used for indentation", "indent with spaces", mark
    return f"a value cannot begin with `{_character(mark)}`", "put the value in quotes", mark


def _tab(mark: Mark, _: Mark | None) -> _Answer:
    return "a tab is used for indentation", "indent with spaces", mark


def _second_colon(mark: Mark, _: Mark | None) -> _Answer:
    line = mark.document.lines[mark.line - 1]
    before = line[: mark.column - 1]
    if "\t" in before[: len(before) - len(before.lstrip())]:
        return "a tab is used for indentation", "indent with spaces", mark.shifted(1 - mark.column, 1)
    if ":" in before:
        return "a second `: ` in one line", "put the value in quotes", mark
    key = mark.shifted(len(before) - len(before.lstrip()) - mark.column + 1, max(1, len(before.strip())))
    hint = "check the indentation, and whether a `:` is missing in the line above"
    return "a key cannot stand here: this line continues the value above", hint, key


def _no_colon(mark: Mark, opened: Mark | None) -> _Answer:
    at = opened or mark
    return "no `:` after this key", "write `key: value`, with a blank after the colon", at


def _not_closed(mark: Mark, opened: Mark | None) -> _Answer:
    at = opened or mark
    before = mark.document.lines[mark.line - 1][: mark.column - 1] if mark.line <= len(mark.document.lines) else ""
    if _character(mark) == "{" and before.endswith("$"):
        return "a `${` inside of brackets must be quoted", 'write `"${env:NAME}"`', mark.shifted(-1, 2)
    if mark.line == at.line and _character(mark) in ("[", "]"):
        return "a `[` inside of brackets must be quoted", 'write `"gpu[01-02]"`', mark
    return f"this `{_character(at)}` is not closed, or a comma is missing in it", None, at


def _key_expected(mark: Mark, opened: Mark | None) -> _Answer:
    if opened is not None and mark.column == opened.column and _character(mark) == "-":
        return "a list item among keys", "indent the list below its key", mark
    begins_line = not mark.document.lines[mark.line - 1][: mark.column - 1].strip()
    if opened is not None and begins_line and mark.column != opened.column:
        text = f"the indentation fits neither the keys above nor below (they begin in column {opened.column})"
        return text, None, mark
    return "something is left behind the value", "put the whole value in quotes", mark


def _dash_expected(mark: Mark, _: Mark | None) -> _Answer:
    return "a key among list items", "begin it with `- `, or check the indentation", mark


def _quote_open(mark: Mark, opened: Mark | None) -> _Answer:
    return "this quote is not closed", None, opened or mark


def _dash_in_line(mark: Mark, _: Mark | None) -> _Answer:
    return "a list cannot begin here", "begin it on a line of its own, or write `[a, b]`", mark


def _escape(mark: Mark, _: Mark | None) -> _Answer:
    return "an unknown escape after `\\`", "use single quotes to keep a backslash", mark


_SYNTAX: tuple[tuple[str, Callable[[Mark, Mark | None], _Answer]], ...] = (
    ("cannot start any token", _cannot_start),
    ("a tab character", _tab),
    ("mapping values are not allowed", _second_colon),
    ("could not find expected ':'", _no_colon),
    ("did not find expected ',' or", _not_closed),
    ("did not find expected key", _key_expected),
    ("did not find expected '-'", _dash_expected),
    ("unexpected end of stream", _quote_open),
    ("block sequence entries are not allowed", _dash_in_line),
    ("escape c", _escape),
)
