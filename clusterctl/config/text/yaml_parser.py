"""YAML parser: it converts a text to a tree with positions. Scalars follow YAML 1.2; size and depth are limited.

The errors of libyaml name the token that libyaml expected. This module converts each error to the likely mistake of the
user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from clusterctl.config.text.tree import Document, Mark, Problems, TreeNode


def report_syntax_error(document: Document, error: Exception, report: Problems) -> None:
    """Report a syntax error of libyaml as the likely mistake of the user, at its position."""
    place = getattr(error, "problem_mark", None)
    if place is None:
        report.add(Mark(document, 1, 1), f"not YAML: {str(error).splitlines()[0]}")
        return
    context = getattr(error, "context_mark", None)
    mark = _clamp_to_text(Mark(document, place.line + 1, place.column + 1))
    opened = None if context is None else Mark(document, context.line + 1, context.column + 1)
    problem = str(getattr(error, "problem", "") or "")
    for words, answer in _SYNTAX:
        if words in problem:
            text, hint, at = answer(mark, opened) if callable(answer) else (*answer, mark)
            report.add(at, text, hint)
            return
    report.add(mark, f"not YAML: {problem}")


def _clamp_to_text(mark: Mark) -> Mark:
    """Return a mark inside the text. For unclosed brackets and quotes libyaml reports a mark beyond the end."""
    lines = mark.document.lines
    if mark.line <= len(lines) and not (mark.line == len(lines) and not lines[-1] and mark.line > 1):
        return mark
    last = max(1, len(lines) - (0 if lines[-1] else 1))
    return Mark(mark.document, last, len(lines[last - 1]) + 1)


_Message = tuple[str, "str | None", Mark]


def _get_character(mark: Mark) -> str:
    lines = mark.document.lines
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    return line[mark.column - 1 : mark.column]


def _explain_bad_first_character(mark: Mark, _: Mark | None) -> _Message:
    if _get_character(mark) == "\t":
        return *_TAB, mark
    return f"a value must not begin with `{_get_character(mark)}`", "put the value in quotes", mark


def _explain_second_colon(mark: Mark, _: Mark | None) -> _Message:
    line = mark.document.lines[mark.line - 1]
    before = line[: mark.column - 1]
    if "\t" in before[: len(before) - len(before.lstrip())]:
        return *_TAB, mark.shift(1 - mark.column, 1)
    if ":" in before:
        return "this line contains a second `: `", "put the value in quotes", mark
    key = mark.shift(len(before) - len(before.lstrip()) - mark.column + 1, max(1, len(before.strip())))
    hint = "check the indentation, and whether a `:` is missing in the line above"
    return "a key is not allowed here: this line continues the value above", hint, key


def _explain_missing_colon(mark: Mark, opened: Mark | None) -> _Message:
    at = opened or mark
    return "no `:` after this key", "write `key: value`, with a blank after the colon", at


def _explain_open_bracket(mark: Mark, opened: Mark | None) -> _Message:
    at = opened or mark
    before = mark.document.lines[mark.line - 1][: mark.column - 1] if mark.line <= len(mark.document.lines) else ""
    if _get_character(mark) == "{" and before.endswith("$"):
        return "a `${` inside brackets must be quoted", 'write `"${env:NAME}"`', mark.shift(-1, 2)
    if mark.line == at.line and _get_character(mark) in ("[", "]"):
        return "a `[` inside brackets must be quoted", 'write `"gpu[01-02]"`', mark
    return f"this `{_get_character(at)}` is not closed, or a comma is missing after it", None, at


def _explain_unexpected_text(mark: Mark, opened: Mark | None) -> _Message:
    if opened is not None and mark.column == opened.column and _get_character(mark) == "-":
        return "a list item among keys", "indent the list below its key", mark
    begins_line = not mark.document.lines[mark.line - 1][: mark.column - 1].strip()
    if opened is not None and begins_line and mark.column != opened.column:
        text = f"the indentation differs from the other keys, which begin in column {opened.column}"
        return text, None, mark
    return "unexpected text after the value", "put the whole value in quotes", mark


def _explain_open_quote(mark: Mark, opened: Mark | None) -> _Message:
    return "this quote is not closed", None, opened or mark


_TAB = ("a tab is used for indentation", "indent with spaces")
_SYNTAX: tuple[tuple[str, Callable[[Mark, Mark | None], _Message] | tuple[str, str]], ...] = (
    ("cannot start any token", _explain_bad_first_character),
    ("a tab character", _TAB),
    ("mapping values are not allowed", _explain_second_colon),
    ("could not find expected ':'", _explain_missing_colon),
    ("did not find expected ',' or", _explain_open_bracket),
    ("did not find expected key", _explain_unexpected_text),
    ("did not find expected '-'", ("a key among list items", "begin the line with `- `, or check the indentation")),
    ("unexpected end of stream", _explain_open_quote),
    (
        "block sequence entries are not allowed",
        ("a list must not begin here", "begin the list on a new line, or write `[a, b]`"),
    ),
    ("escape c", ("an unknown escape after `\\`", "use single quotes to keep a backslash")),
)


MAX_BYTES = 1024**2
"""Largest size of a cluster file. A file with a thousand hosts as mappings has a tenth of this size."""

MAX_NODES = 50_000
MAX_DEPTH = 24

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"

# These patterns are the core schema of YAML 1.2.2 (section 10.3.2). Very long numbers stay text, because Python does
# not convert them.
_NOT_TEXT = frozenset(["", *"~nNtTfF.+-0123456789"])
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,64}")
_BASED_INT = re.compile(r"0o[0-7]{1,64}|0x[0-9a-fA-F]{1,64}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

# YAML escapes can produce these characters, but no argument or environment variable can contain them.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")

# This pattern matches all characters that YAML does not allow (outside of its `c-printable`).
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parse_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar in YAML 1.2: null, a boolean, a number, or text."""
    if text[:1] not in _NOT_TEXT:
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        return int(text)
    if _BASED_INT.fullmatch(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    if len(text) <= 64 and _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def parse_yaml_content(path: str, content: bytes | str, report: Problems) -> TreeNode | None:
    """Decode and parse the content of a file; return its tree, or report errors and return `None`."""
    text = _decode(path, content, report)
    if text is None:
        return None
    return parse_yaml_document(Document(path, text), report)


def parse_yaml_document(document: Document, report: Problems) -> TreeNode | None:
    """Parse a decoded document; return its tree, or report errors and return `None`."""
    match = _UNPRINTABLE.search(document.text)
    if match is not None:
        report.add(_mark_at(document, match.start()), f"a control character (U+{ord(match[0]):04X})")
        return None
    builder = _TreeBuilder(document, report)
    try:
        for event in yaml.parse(document.text, Loader=_LOADER):
            builder.take_event(event)
    except _FatalError as error:
        report.add(error.mark, str(error), error.hint)
        return None
    except yaml.YAMLError as error:
        report_syntax_error(document, error, report)
        return None
    return builder.root


def _decode(path: str, content: bytes | str, report: Problems) -> str | None:
    if len(content) > MAX_BYTES:
        report.add(Mark(Document(path, ""), 1, 1), f"too large for a cluster file: more than {MAX_BYTES // 1024} KiB")
        return None
    if isinstance(content, str):
        return content.removeprefix("\ufeff")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8", "replace")
        document = Document(path, content.decode("utf-8", "replace"))
        hint = "save the file as UTF-8"
        report.add(_mark_at(document, len(before)), f"byte 0x{content[error.start]:02x} is not UTF-8", hint)
        return None


def _mark_at(document: Document, index: int) -> Mark:
    before = Document(document.path, document.text[:index]).lines
    return Mark(document, len(before), len(before[-1]) + 1)


class _FatalError(Exception):
    def __init__(self, mark: Mark, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.mark = mark
        self.hint = hint


@dataclass(slots=True)
class _OpenCollection:
    """A mapping or list that the parser has not finished. The children of a mapping alternate between key and value."""

    mark: Mark
    mapping: bool
    anchor: str | None
    children: list[TreeNode] = field(default_factory=list)


class _TreeBuilder:
    """Builds a tree from parser events; raises `_FatalError` if the tree becomes too large or too deep."""

    def __init__(self, document: Document, report: Problems) -> None:
        self.root: TreeNode | None = None
        self._document = document
        self._report = report
        self._open_collections: list[_OpenCollection] = []
        self._anchors: dict[str, TreeNode | None] = {}
        self._count = 0

    def take_event(self, event: Any) -> None:
        """Process the next event of the parser."""
        if isinstance(event, yaml.ScalarEvent):
            self._add_node(self._build_scalar(event), event.anchor, 1)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open_collection(event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            collection = self._open_collections.pop()
            node = (
                self._build_mapping(collection)
                if collection.mapping
                else TreeNode(collection.children, collection.mark)
            )
            self._add_node(
                _set_size(node, [*node.value.values()] if collection.mapping else node.value), collection.anchor, 1
            )
        elif isinstance(event, yaml.AliasEvent):
            node = self._resolve_alias(event)
            self._add_node(node, None, node.size)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            hint = "remove the `---`; to merge several files, use `--file`"
            raise _FatalError(self._build_mark(event), "a second document in one file", hint)

    def _build_mark(self, event: Any) -> Mark:
        start, end = event.start_mark, event.end_mark
        line = self._document.lines[start.line] if start.line < len(self._document.lines) else ""
        until = end.column if end.line == start.line else len(line)
        return Mark(self._document, start.line + 1, start.column + 1, max(1, until - start.column))

    def _open_collection(self, event: Any) -> None:
        mark = self._build_mark(event)
        if len(self._open_collections) >= MAX_DEPTH:
            raise _FatalError(mark, f"nested deeper than {MAX_DEPTH} levels")
        mapping = isinstance(event, yaml.MappingStartEvent)
        self._check_tag(event, mark, "map" if mapping else "seq")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._open_collections.append(_OpenCollection(mark, mapping, event.anchor))

    def _check_tag(self, event: Any, mark: Mark, *allowed: str) -> None:
        tag = event.tag
        if tag in (None, "!") or tag in {_TAG + name for name in allowed}:
            return
        shown = "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
        self._report.add(mark, f"the tag `{shown}` is not allowed here", "leave the tag out")

    def _build_scalar(self, event: Any) -> TreeNode:
        mark, text = self._build_mark(event), event.value
        if _UNUSABLE.search(text):
            self._report.add(mark, "NUL and surrogate characters are not allowed")
            text = text.replace("\0", "")
        self._check_tag(event, mark, "str", "int", "float", "bool", "null")
        plain = event.implicit[0] or event.tag not in (None, "!", _TAG + "str")
        quoted = event.style in ("'", '"', "|", ">")
        return TreeNode(parse_scalar(text) if plain else text, mark, raw=text, quoted=quoted or not plain)

    def _resolve_alias(self, event: Any) -> TreeNode:
        anchored = self._anchors.get(event.anchor)
        if anchored is not None:
            return anchored
        if event.anchor in self._anchors:
            raise _FatalError(self._build_mark(event), f"`*{event.anchor}` is inside the value that it repeats")
        raise _FatalError(self._build_mark(event), f"there is no anchor `&{event.anchor}` above")

    def _build_mapping(self, collection: _OpenCollection) -> TreeNode:
        entries: dict[str, TreeNode] = {}
        keys: dict[str, Mark] = {}
        merged: list[tuple[int, TreeNode, Mark]] = []
        for key, value in zip(collection.children[::2], collection.children[1::2], strict=True):
            name = key.raw
            if name is None:
                self._report.add(key.mark, "a key must be plain text")
            elif name == "<<" and not key.quoted:
                merged.append((len(entries), value, key.mark))
            elif name in entries:
                first = keys[name]
                self._report.add(key.mark, f"the key `{name}` is a duplicate", f"the first one is on line {first.line}")
            else:
                entries[name], keys[name] = value, key.mark
        node = TreeNode(entries, collection.mark, keys=keys)
        for position, value, mark in reversed(merged):
            self._insert_merged(node, position, value, mark)
        return node

    def _insert_merged(self, node: TreeNode, position: int, value: TreeNode, mark: Mark) -> None:
        """Insert the entries of a merge key `<<` at its place. Explicit keys win, then the first mapping of a list."""
        sources = value.value if isinstance(value.value, list) else [value]
        merged_entries: dict[str, TreeNode] = {}
        for source in sources:
            if not isinstance(source.value, dict):
                self._report.add(mark, "`<<` merges mappings only", "write `<<: *anchor`")
                return
            for name, child in source.value.items():
                if name not in node.value and name not in merged_entries:
                    merged_entries[name] = child
                    node.keys[name] = source.key_mark(name)
        items = list(node.value.items())
        node.value = dict([*items[:position], *merged_entries.items(), *items[position:]])

    def _add_node(self, node: TreeNode, anchor: str | None, added: int) -> None:
        self._count += added
        if self._count > MAX_NODES:
            raise _FatalError(node.mark, f"too large for a cluster file: more than {MAX_NODES} values")
        if node.depth + len(self._open_collections) > MAX_DEPTH:
            raise _FatalError(node.mark, f"nested deeper than {MAX_DEPTH} levels")
        if anchor is not None:
            self._anchors[anchor] = node
        if self._open_collections:
            self._open_collections[-1].children.append(node)
        elif node.value is not None:
            self.root = node


def _set_size(node: TreeNode, children: list[TreeNode]) -> TreeNode:
    node.size = 1 + sum(child.size for child in children)
    node.depth = 1 + max((child.depth for child in children), default=0)
    return node
