"""Which tests reach a place of a module, as coverage saw it: only they can mind a change there.

Also a plugin of pytest (`-p tests.mutation.reached`) that tells coverage which test runs, fixtures included.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import coverage
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.mutation.mutants import Mutant

Lines = dict[str, dict[int, list[str]]]
"""Module to line to the tests that run it; the empty name stands for what runs at an import."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Name the test that runs from here on."""
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid.partition("[")[0])
    return (yield)


def lines_of(data_file: Path, project: Path, modules: Sequence[str]) -> Lines:
    """Read what coverage wrote down of some modules."""
    data = coverage.CoverageData(str(data_file))
    data.read()
    return {module: data.contexts_by_lineno(str(project / "clusterctl" / f"{module}.py")) for module in modules}


def outermost(places: Iterable[str]) -> list[str]:
    """Return the files and folders that are inside of no other, each once, in their order."""
    every = list(dict.fromkeys(places))
    return [place for place in every if not any(place.startswith(f"{other}/") for other in every)]


def has_processes(place: str) -> bool:
    """Whether tests start processes, which coverage does not see."""
    return place.startswith("tests/agent/")


def tests_for(mutant: Mutant, lines: Lines, everything: Sequence[str]) -> list[str]:
    """Return the tests that can notice a mutant, in the order of `everything`, which are the files and folders of all.

    What runs when the module is imported concerns all of them. Tests with processes of their own are always among them.
    """
    inside = _body_around(mutant)
    names = {name for line in inside or () for name in lines[mutant.module].get(line, ())}
    if inside is None or "" in names:
        return list(everything)
    chosen: list[str] = []
    for place in everything:
        if has_processes(place):
            chosen.append(place)
        else:
            chosen += sorted(name for name in names if name.startswith((f"{place}/", f"{place}::")))
    return list(dict.fromkeys(chosen))


def _body_around(mutant: Mutant) -> range | None:
    """Return the lines of the innermost function body that holds the whole change; `None` outside of functions."""
    first, last = mutant.line, mutant.line + max(1, len(mutant.old)) - 1
    bodies = [
        range(node.body[0].lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(ast.parse(mutant.source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    around = [body for body in bodies if first in body and last in body]
    return min(around, key=len, default=None)
