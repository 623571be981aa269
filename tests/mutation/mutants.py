"""All mutants of a module, made by the operators of mutmut.

mutmut itself mutates undecorated functions only, for it puts its mutants side by side into one file. Here each is a file
of its own, so constants, decorators and what is below them are mutated too.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import libcst as cst
from mutmut.mutation.mutators import mutation_operators, operator_string

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_VALUES: Final = {"dataclass", "field", "cast", "TypeVar", "NewType"}
"""Calls that say what a value is: they decide nothing when the program runs."""


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        module: As in `modules.TESTS`.
        before, after: The whole text.
    """

    module: str
    before: str
    after: str

    @cached_property
    def diff(self) -> list[str]:
        """The change with a line around it, without the names of files."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=1, lineterm="")
        return list(lines)[2:]

    @property
    def line(self) -> int:
        """Where it is, in the module as it was."""
        same = zip(self.before.splitlines(), self.after.splitlines(), strict=False)
        return next((number for number, (old, new) in enumerate(same, 1) if old != new), 1)

    @property
    def was(self) -> str:
        """The lines that the change takes away, each without its indentation."""
        return self._lines("-")

    @property
    def becomes(self) -> str:
        """The lines that the change puts there."""
        return self._lines("+")

    def _lines(self, sign: str) -> str:
        return "\n".join(line[1:].strip() for line in self.diff if line.startswith(sign))


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module that can be compiled, each once, in the order of the text."""
    tree = cst.parse_module(source)
    finder = _Finder()
    tree.visit(finder)
    texts = dict.fromkeys(cst.ensure_type(tree.deep_replace(old, new), cst.Module).code for old, new in finder.changes)
    return [Mutant(module, source, text) for text in texts if text != source and _compiles(text)]


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


class _Finder(cst.CSTVisitor):
    """Asks the operators about every node that has something to do when the program runs."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _only_describes(node):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self.changes += [(node, new) for new in _once(operator, operator(node))]
        return True


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
