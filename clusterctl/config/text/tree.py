"""The tree of a parsed document: each value and each key has a mark with its file, line and column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from clusterctl.errors import Problem

# libyaml counts lines by the line breaks of YAML 1.1.
_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")

KeyPath = tuple["str | int", ...]


@dataclass(frozen=True)
class Document:
    """The source of values: a file, or an option of the command line, which has no lines and columns."""

    path: str
    text: str
    has_places: bool = True

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, without line breaks."""
        return _BREAK.split(self.text)


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of a line of a document. `line` and `column` count from 1; `length` is in characters."""

    document: Document
    line: int
    column: int
    length: int = 1

    @property
    def place(self) -> str:
        """The position as text: `cluster.yaml:12:3`, or the name of the option."""
        if not self.document.has_places:
            return self.document.path
        return f"{self.document.path}:{self.line}:{self.column}"

    def build_problem(self, text: str, hint: str | None = None) -> Problem:
        """Return a problem at this position."""
        if not self.document.has_places:
            return Problem(self.document.path, 0, 0, text, hint)
        lines = self.document.lines
        source = lines[self.line - 1] if self.line <= len(lines) else ""
        return Problem(self.document.path, self.line, self.column, text, hint, self.length, source)

    def shift(self, offset: int, length: int) -> Mark:
        """Return the position `offset` characters further on the same line."""
        return replace(self, column=self.column + offset, length=length)


@dataclass(slots=True)
class TreeNode:
    """A value of a parsed document with its position. A node must never change, because YAML aliases share nodes.

    Attributes:
        value: A scalar, a list of nodes, or a dict of nodes by key.
        mark: Position of the value.
        raw: For a scalar: its text before conversion to a number, a boolean or null; else `None`.
        quoted: Whether a scalar is in quotes or a block, and therefore always text.
        keys: For a mapping: the position of each key.
        size: Number of nodes of this subtree. A node with aliases counts once for each alias.
        depth: Levels of nesting, 1 for a scalar.
    """

    value: Any
    mark: Mark
    raw: str | None = None
    quoted: bool = False
    keys: dict[str, Mark] = field(default_factory=dict)
    size: int = 1
    depth: int = 1

    def child(self, key: str | int) -> TreeNode | None:
        """Return an entry of a mapping or an item of a list, or `None`."""
        if isinstance(self.value, dict):
            node = self.value.get(key)
            return node if isinstance(node, TreeNode) else None
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            item: TreeNode = self.value[key]
            return item
        return None

    def find(self, *path: str | int) -> TreeNode | None:
        """Return the node at a path below this node, or `None`."""
        node: TreeNode | None = self
        for part in path:
            node = node.child(part) if node is not None else None
        return node

    def find_mark(self, *path: str | int) -> Mark:
        """Return the position of the node at a path below this node; if there is no such node, this node's position."""
        node = self.find(*path)
        return node.mark if node is not None else self.mark

    def key_mark(self, key: str | int) -> Mark:
        """Return the position of a key; if there is no such key, the position of this node."""
        mark = self.keys.get(str(key))
        return mark if mark is not None else self.mark

    def replace_entries(self, entries: dict[str, TreeNode], keys: dict[str, Mark] | None = None) -> TreeNode:
        """Return a copy of this mapping with other entries."""
        return TreeNode(entries, self.mark, keys={**self.keys, **(keys or {})})

    def to_plain_value(self) -> Any:
        """Return the value without positions, as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.to_plain_value() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.to_plain_value() for child in self.value]
        return self.value

    def mark_substring(self, offset: int, length: int) -> Mark:
        """Return the position of a part of a scalar; if escapes hide it, the position of the whole scalar."""
        line = self.mark.document.lines[self.mark.line - 1] if self.mark.document.has_places else ""
        start = self.mark.column - 1 + (1 if self.quoted else 0)
        if self.raw is None or not line.startswith(self.raw, start):
            return self.mark
        return self.mark.shift(start - self.mark.column + 1 + offset, length)


def list_env_mappings(root: TreeNode) -> list[tuple[KeyPath, TreeNode]]:
    """Return path and node of each mapping `env`: at the top level, in `defaults` and in the hosts."""
    nodes = [*list_host_values(root, "env"), (("env",), root.find("env"))]
    return [(path, node) for path, node in nodes if node is not None and isinstance(node.value, dict)]


def list_host_values(root: TreeNode, key: str) -> list[tuple[KeyPath, TreeNode]]:
    """Return path and node of each value that `defaults` or a host has for a key."""
    hosts = root.child("hosts")
    entries = hosts.value if hosts is not None and isinstance(hosts.value, (dict, list)) else ()
    names = entries if isinstance(entries, dict) else range(len(entries))
    paths: list[KeyPath] = [("defaults", key), *(("hosts", name, key) for name in names)]
    return [(path, node) for path in paths if (node := root.find(*path)) is not None]


@dataclass
class Problems:
    """The errors (`problems`) and warnings of a file, in the order found, without duplicates."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    _seen: set[tuple[bool, str, int, int, str]] = field(default_factory=set)

    def add(self, mark: Mark, text: str, hint: str | None = None) -> None:
        """Add an error."""
        self._add_once(self.problems, mark, text, hint)

    def warn(self, mark: Mark, text: str, hint: str | None = None) -> None:
        """Add a warning about something that is allowed but probably a mistake."""
        self._add_once(self.warnings, mark, text, hint)

    def _add_once(self, target: list[Problem], mark: Mark, text: str, hint: str | None) -> None:
        # The same mistake in an anchor is found again at each alias.
        problem = mark.build_problem(text, hint)
        key = (target is self.warnings, problem.path, problem.line, problem.column, text)
        if key not in self._seen:
            self._seen.add(key)
            target.append(problem)

    def sort_problems(self, paths: Iterable[str]) -> list[Problem]:
        """Return the errors, sorted by file in the order of `paths`, then by position."""
        order = {path: index for index, path in enumerate(paths)}
        return sorted(self.problems, key=lambda p: (order.get(p.path, len(order)), p.line, p.column))


def format_path(path: KeyPath) -> str:
    """Return a path as text, such as `hosts[1].gpus`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
