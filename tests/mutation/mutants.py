"""All mutants of a module, made by the operators of mutmut.

mutmut itself mutates undecorated functions only, for it puts its mutants side by side into one file. Here each is a file
of its own, so constants, decorators and what is below them are mutated too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import libcst as cst
from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_VALUES: Final = {"dataclass", "field", "cast", "TypeVar", "NewType"}
"""Calls that say what a value is: they decide nothing when the program runs."""

_BLOCKS: Final = (cst.IndentedBlock, cst.Match)
"""What sets in the lines below it."""


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        module: As in `modules.TESTS`.
        source: The whole text as it is.
        line: The first that changes, from 1.
        old, new: The lines that go, and those that come.
    """

    module: str
    source: str
    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole text with the change."""
        lines = self.source.splitlines(keepends=True)
        return "".join((*lines[: self.line - 1], *self.new, *lines[self.line - 1 + len(self.old) :]))

    @property
    def change(self) -> tuple[str, str, str]:
        """The module and both sides of the change without indentation, to know it by when lines have moved."""
        return self.module, _stripped(self.old), _stripped(self.new)

    @property
    def diff(self) -> list[str]:
        """The change for a person."""
        return [*(f"-{line.rstrip()}" for line in self.old), *(f"+{line.rstrip()}" for line in self.new)]

    @property
    def compiles(self) -> bool:
        """Whether it is a program."""
        try:
            compile(self.text, "mutant", "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module, each once, in the order of the text."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    finder = _Finder(wrapper.module)
    wrapper.visit(finder)
    made = (_mutant(module, source, *change) for change in finder.changes)
    return list(dict.fromkeys(mutant for mutant in made if mutant.old != mutant.new))


def _mutant(module: str, source: str, start: tuple[int, int], end: tuple[int, int], new: str) -> Mutant:
    """Make the mutant that has `new` in a place, given by lines from 1 and columns from 0."""
    lines = source.splitlines(keepends=True)
    old = lines[start[0] - 1 : end[0]]
    tail = old[-1][end[1] :] if old else ""
    after = f"{old[0][: start[1]] if old else ''}{new}{tail}".splitlines(keepends=True)
    same = _equal(old, after)
    last = _equal(old[same:][::-1], after[same:][::-1])
    return Mutant(
        module, source, start[0] + same, tuple(old[same : len(old) - last]), tuple(after[same : len(after) - last])
    )


def _equal(some: Sequence[str], others: Sequence[str]) -> int:
    """Return how many lines are the same from the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def _stripped(lines: Iterable[str]) -> str:
    return "\n".join(line.strip() for line in lines)


class _Finder(cst.CSTVisitor):
    """Asks the operators about every node that has something to do when the program runs."""

    METADATA_DEPENDENCIES = (WhitespaceInclusivePositionProvider,)

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self._module = module
        self._depth = 0
        self.changes: list[tuple[tuple[int, int], tuple[int, int], str]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _only_describes(node):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for new in _once(operator, operator(node)):
                    self._add(node, new)
        self._depth += isinstance(node, _BLOCKS)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._depth -= isinstance(original_node, _BLOCKS)

    def _add(self, node: cst.CSTNode, new: cst.CSTNode) -> None:
        span = self.get_metadata(WhitespaceInclusivePositionProvider, node)
        start, end = (span.start.line, span.start.column), (span.end.line, span.end.column)
        # The text of a node alone begins its lines where those of a module begin.
        begins = r"(?m)^(?=.)" if isinstance(node, cst.BaseCompoundStatement) else r"(?<=\n)(?=.)"
        text = re.sub(begins, self._module.default_indent * self._depth, self._module.code_for_node(new))
        self.changes.append((start, end, text))


def _once(operator: object, changed: Iterable[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """Give what an operator makes; of a text only the first: the same in capitals is the same mistake."""
    for count, new in enumerate(changed):
        if count == 0 or operator is not operator_string:
            yield new


def _only_describes(node: cst.CSTNode) -> bool:
    """Whether it is there for readers and tools alone: types, imports, docstrings."""
    match node:
        case cst.Annotation() | cst.Import() | cst.ImportFrom():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.If(test=cst.Name(value="TYPE_CHECKING")):
            return True
        case cst.Call(func=cst.Name(value=name)):
            return name in _VALUES
        case _:
            return False
