"""YAML parser: text becomes a tree with marks; YAML 1.2 scalars, with limits for size and depth.

libyaml's errors say what it expected; ours name the mistake of the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from clusterctl.config.text.tree import Document, Mark, Problems, TreeNode


def report_syntax_error(document: Document, error: Exception, report: Problems) -> None:
    """Report a syntax error of libyaml at the position of the user's mistake."""
    place = getattr(error, "problem_mark", None)
    if place is None:
        report.add(Mark(document, 1, 1), f"not YAML: {str(error).splitlines()[0]}")
        return
    context = getattr(error, "context_mark", None)
    mark = _move_into_text(Mark(document, place.line + 1, place.column + 1))
    opened = None if context is None else Mark(document, context.line + 1, context.column + 1)
    problem = str(getattr(error, "problem", "") or "")
    for words, answer in _SYNTAX:
        if words in problem:
            text, hint, at = answer(mark, opened) if callable(answer) else (*answer, mark)
            report.add(at, text, hint)
            return
    report.add(mark, f"not YAML: {problem}")


def _move_into_text(mark: Mark) -> Mark:
    """Return a position in the text: libyaml points behind the end of the text if something is not closed."""
    lines = mark.document.lines
    if mark.line <= len(lines) and not (mark.line == len(lines) and not lines[-1] and mark.line > 1):
        return mark
    last = max(1, len(lines) - (0 if lines[-1] else 1))
    return Mark(mark.document, last, len(lines[last - 1]) + 1)


_Message = tuple[str, "str | None", Mark]


def _character_at(mark: Mark) -> str:
    lines = mark.document.lines
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    return line[mark.column - 1 : mark.column]


def _cannot_start(mark: Mark, _: Mark | None) -> _Message:
    if _character_at(mark) == "\t":
        return *_TAB, mark
    return f"a value cannot begin with `{_character_at(mark)}`", "put the value in quotes", mark


def _second_colon(mark: Mark, _: Mark | None) -> _Message:
    line = mark.document.lines[mark.line - 1]
    before = line[: mark.column - 1]
    if "\t" in before[: len(before) - len(before.lstrip())]:
        return *_TAB, mark.shift(1 - mark.column, 1)
    if ":" in before:
        return "a second `: ` in one line", "put the value in quotes", mark
    key = mark.shift(len(before) - len(before.lstrip()) - mark.column + 1, max(1, len(before.strip())))
    hint = "check the indentation, and whether a `:` is missing in the line above"
    return "a key cannot stand here: this line continues the value above", hint, key


def _no_colon(mark: Mark, opened: Mark | None) -> _Message:
    at = opened or mark
    return "no `:` after this key", "write `key: value`, with a blank after the colon", at


def _not_closed(mark: Mark, opened: Mark | None) -> _Message:
    at = opened or mark
    before = mark.document.lines[mark.line - 1][: mark.column - 1] if mark.line <= len(mark.document.lines) else ""
    if _character_at(mark) == "{" and before.endswith("$"):
        return "a `${` inside of brackets must be quoted", 'write `"${env:NAME}"`', mark.shift(-1, 2)
    if mark.line == at.line and _character_at(mark) in ("[", "]"):
        return "a `[` inside of brackets must be quoted", 'write `"gpu[01-02]"`', mark
    return f"this `{_character_at(at)}` is not closed, or a comma is missing in it", None, at


def _key_expected(mark: Mark, opened: Mark | None) -> _Message:
    if opened is not None and mark.column == opened.column and _character_at(mark) == "-":
        return "a list item among keys", "indent the list below its key", mark
    begins_line = not mark.document.lines[mark.line - 1][: mark.column - 1].strip()
    if opened is not None and begins_line and mark.column != opened.column:
        text = f"the indentation fits neither the keys above nor below (they begin in column {opened.column})"
        return text, None, mark
    return "something is left behind the value", "put the whole value in quotes", mark


def _quote_open(mark: Mark, opened: Mark | None) -> _Message:
    return "this quote is not closed", None, opened or mark


_TAB = ("a tab is used for indentation", "indent with spaces")
_SYNTAX: tuple[tuple[str, Callable[[Mark, Mark | None], _Message] | tuple[str, str]], ...] = (
    ("cannot start any token", _cannot_start),
    ("a tab character", _TAB),
    ("mapping values are not allowed", _second_colon),
    ("could not find expected ':'", _no_colon),
    ("did not find expected ',' or", _not_closed),
    ("did not find expected key", _key_expected),
    ("did not find expected '-'", ("a key among list items", "begin it with `- `, or check the indentation")),
    ("unexpected end of stream", _quote_open),
    (
        "block sequence entries are not allowed",
        ("a list cannot begin here", "begin it on a line of its own, or write `[a, b]`"),
    ),
    ("escape c", ("an unknown escape after `\\`", "use single quotes to keep a backslash")),
)


MAX_BYTES = 1024**2
"""Largest cluster file read; a file of a thousand hosts in long form has a tenth of it."""

MAX_NODES = 50_000
MAX_DEPTH = 24

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"

# YAML 1.2.2, 10.3.2: the core schema. Long digit strings stay text, because Python refuses to convert them.
_NOT_TEXT = frozenset(["", *"~nNtTfF.+-0123456789"])
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,64}")
_BASED_INT = re.compile(r"0o[0-7]{1,64}|0x[0-9a-fA-F]{1,64}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

# Escapes can make these, and neither an argument nor a variable can hold them.
_UNUSABLE = re.compile("[\0\ud800-\udfff]")

# Everything that YAML's `c-printable` leaves out.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parse_scalar(text: str) -> Any:
    """Return the value of a plain scalar in YAML 1.2: null, a boolean, a number, or text."""
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
    """Parse one document into a tree, or return `None`; errors go to `report`."""
    text = _decode(path, content, report)
    if text is None:
        return None
    return parse_yaml_document(Document(path, text), report)


def parse_yaml_document(document: Document, report: Problems) -> TreeNode | None:
    """Parse one decoded document."""
    match = _UNPRINTABLE.search(document.text)
    if match is not None:
        report.add(_mark_at(document, match.start()), f"a control character (U+{ord(match[0]):04X})")
        return None
    builder = _TreeBuilder(document, report)
    try:
        for event in yaml.parse(document.text, Loader=_LOADER):
            builder.take_event(event)
    except _LimitError as error:
        report.add(error.mark, str(error), error.hint)
        return None
    except yaml.YAMLError as error:
        report_syntax_error(document, error, report)
        return None
    return builder.root


def _decode(path: str, content: bytes | str, report: Problems) -> str | None:
    if len(content) > MAX_BYTES:
        report.add(Mark(Document(path, ""), 1, 1), f"larger than {MAX_BYTES // 1024} KiB: not a cluster file")
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


class _LimitError(Exception):
    def __init__(self, mark: Mark, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.mark = mark
        self.hint = hint


@dataclass(slots=True)
class _Frame:
    """A mapping or list that is being read. A mapping's children alternate between key and value."""

    mark: Mark
    mapping: bool
    anchor: str | None
    children: list[TreeNode] = field(default_factory=list)


class _TreeBuilder:
    """Turns parser events into a tree, counting as it goes."""

    def __init__(self, document: Document, report: Problems) -> None:
        self.root: TreeNode | None = None
        self._document = document
        self._report = report
        self._frames: list[_Frame] = []
        self._anchors: dict[str, TreeNode | None] = {}
        self._count = 0

    def take_event(self, event: Any) -> None:
        """Take the next event."""
        if isinstance(event, yaml.ScalarEvent):
            self._put(self._scalar(event), event.anchor, 1)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open(event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            frame = self._frames.pop()
            self._put(self._mapping(frame) if frame.mapping else self._list(frame), frame.anchor, 1)
        elif isinstance(event, yaml.AliasEvent):
            node = self._alias(event)
            self._put(node, None, node.size)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            hint = "remove the `---`; several files are merged with `--file`"
            raise _LimitError(self._mark(event), "a second document in one file", hint)

    def _mark(self, event: Any) -> Mark:
        start, end = event.start_mark, event.end_mark
        line = self._document.lines[start.line] if start.line < len(self._document.lines) else ""
        until = end.column if end.line == start.line else len(line)
        return Mark(self._document, start.line + 1, start.column + 1, max(1, until - start.column))

    def _open(self, event: Any) -> None:
        mark = self._mark(event)
        if len(self._frames) >= MAX_DEPTH:
            raise _LimitError(mark, f"nested deeper than {MAX_DEPTH} levels")
        mapping = isinstance(event, yaml.MappingStartEvent)
        self._check_tag(event, mark, "map" if mapping else "seq")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._frames.append(_Frame(mark, mapping, event.anchor))

    def _check_tag(self, event: Any, mark: Mark, *allowed: str) -> None:
        tag = event.tag
        if tag in (None, "!") or tag in {_TAG + name for name in allowed}:
            return
        shown = "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
        self._report.add(mark, f"the tag `{shown}` is not allowed here", "leave the tag out")

    def _scalar(self, event: Any) -> TreeNode:
        mark, text = self._mark(event), event.value
        if _UNUSABLE.search(text):
            self._report.add(mark, "a NUL or surrogate character cannot be used")
            text = text.replace("\0", "")
        self._check_tag(event, mark, "str", "int", "float", "bool", "null")
        plain = event.implicit[0] or event.tag not in (None, "!", _TAG + "str")
        quoted = event.style in ("'", '"', "|", ">")
        return TreeNode(parse_scalar(text) if plain else text, mark, raw=text, quoted=quoted or not plain)

    def _alias(self, event: Any) -> TreeNode:
        anchored = self._anchors.get(event.anchor)
        if anchored is not None:
            return anchored
        if event.anchor in self._anchors:
            raise _LimitError(self._mark(event), f"`*{event.anchor}` stands inside of what it repeats")
        raise _LimitError(self._mark(event), f"no anchor `&{event.anchor}` before this place")

    def _list(self, frame: _Frame) -> TreeNode:
        return _set_size(TreeNode(frame.children, frame.mark), frame.children)

    def _mapping(self, frame: _Frame) -> TreeNode:
        entries: dict[str, TreeNode] = {}
        keys: dict[str, Mark] = {}
        merged: list[tuple[int, TreeNode, Mark]] = []
        for key, value in zip(frame.children[::2], frame.children[1::2], strict=True):
            name = key.raw
            if name is None:
                self._report.add(key.mark, "a key must be plain text")
            elif name == "<<" and not key.quoted:
                merged.append((len(entries), value, key.mark))
            elif name in entries:
                first = keys[name]
                self._report.add(key.mark, f"the key `{name}` is here twice", f"first on line {first.line}")
            else:
                entries[name], keys[name] = value, key.mark
        node = TreeNode(entries, frame.mark, keys=keys)
        for position, value, mark in reversed(merged):
            self._merge(node, position, value, mark)
        return _set_size(node, list(node.value.values()))

    def _merge(self, node: TreeNode, position: int, value: TreeNode, mark: Mark) -> None:
        """Insert what `<<` brings at its place; keys that are written out win, and of a list the earlier."""
        sources = value.value if isinstance(value.value, list) else [value]
        brought: dict[str, TreeNode] = {}
        for source in sources:
            if not isinstance(source.value, dict):
                self._report.add(mark, "`<<` merges mappings only", "write `<<: *anchor`")
                return
            for name, child in source.value.items():
                if name not in node.value and name not in brought:
                    brought[name] = child
                    node.keys[name] = source.key_mark(name)
        items = list(node.value.items())
        node.value = dict([*items[:position], *brought.items(), *items[position:]])

    def _put(self, node: TreeNode, anchor: str | None, added: int) -> None:
        self._count += added
        if self._count > MAX_NODES:
            raise _LimitError(node.mark, f"more than {MAX_NODES} values: not a cluster file")
        if node.depth + len(self._frames) > MAX_DEPTH:
            raise _LimitError(node.mark, f"nested deeper than {MAX_DEPTH} levels")
        if anchor is not None:
            self._anchors[anchor] = node
        if self._frames:
            self._frames[-1].children.append(node)
        elif node.value is not None:
            self.root = node


def _set_size(node: TreeNode, children: list[TreeNode]) -> TreeNode:
    node.size = 1 + sum(child.size for child in children)
    node.depth = 1 + max((child.depth for child in children), default=0)
    return node
