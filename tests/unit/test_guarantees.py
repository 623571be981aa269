"""Every promise of docs/guarantees.md names a test that exists, and its table of worlds has every world as it is played."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.lab.world import ENDED, FAILS, OUTCOMES, WELL, World
from tests.lab.worlds import EVERYDAY, WORLDS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "guarantees.md").read_text().partition("## The random killer")[0]
HEAD = "| world |"
NOTES = "¹²³⁴⁵⁶⁷⁸⁹"
COLUMNS = {"ends well": WELL, "no false alarm": None, "told truly": None, "`down`": ENDED, "failure named": FAILS}
"""Which run a column is about, where how that run ends may differ from world to world."""


def test_every_promise_names_a_test_that_exists() -> None:
    before, _, rest = PAGE.partition(HEAD)
    lines = before.splitlines() + rest.partition("\n\n")[2].splitlines()
    promises = [line for line in lines if line.startswith("| ") and not line.startswith("| promise")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line) for line in promises]

    assert all(named), [line for line, tests in zip(promises, named, strict=True) if not tests]
    missing = [f"{path}::{name}" for tests in named for path, name in tests if name not in functions(path)]
    assert not missing


def test_every_world_is_in_the_table_with_a_test_or_a_reason_in_each_cell() -> None:
    columns, rows = table()

    assert columns == list(COLUMNS)
    assert list(rows) == [world.name for world in WORLDS]
    wrong = {world.name: problems for world in WORLDS if (problems := unlike(world, rows[world.name]))}
    assert not wrong


def test_every_column_of_worlds_is_a_promise_with_a_test() -> None:
    promised = re.findall(r"\| ([^|]+) \| `tests/lab/test_worlds\.py::\w+` \|", PAGE)

    assert [name for name in promised if not name.startswith("refused")] == list(COLUMNS)


def table() -> tuple[list[str], dict[str, list[str]]]:
    lines = (HEAD + PAGE.partition(HEAD)[2].partition("\n\n")[0]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[0][1:], {row[0]: row[1:] for row in cells[2:]}


def unlike(world: World, row: list[str]) -> list[str]:
    """Return the cells that say something else than what is played."""
    played = "suite" if world.name in EVERYDAY else "long"
    problems = []
    for number, (cell, run) in enumerate(zip(row, COLUMNS.values(), strict=True)):
        word, _, notes = cell.partition(" ")
        differs = world.refused or (run is not None and world.outcomes[run] != OUTCOMES[run])
        differs = differs or (run == ENDED and world.held_up_s)
        unsaid = [note for note in notes if note not in NOTES or f"\n{note} " not in PAGE]
        if word != ("–" if world.refused and number else played) or unsaid or (differs and not notes):
            problems.append(cell)
    return problems


def functions(path: str) -> set[str]:
    file = REPOSITORY / path
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
