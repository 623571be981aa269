"""Every promise of docs/guarantees.md names a test that exists, and the page names every world as it is played."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.lab.world import ENDED, FAILS, OUTCOMES, WELL, World
from tests.lab.worlds import EVERYDAY, WORLDS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "guarantees.md").read_text().partition("## The random killer")[0]
PROMISES = {"ends well": WELL, "no false alarm": None, "told truly": None, "`down`": ENDED, "failure named": FAILS}
"""The promises of a world, each with the run it is about if that run may end in another way in some world."""

EXCEPTIONS = re.findall(r"(?m)^- (\*\*.+?\*\*): ((?:.|\n  )+)", PAGE)
"""The worlds of each exception, and what is said of them."""


def test_every_promise_names_a_test_that_exists() -> None:
    promises = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line) for line in promises]

    assert all(named), [line for line, tests in zip(promises, named, strict=True) if not tests]
    missing = [f"{path}::{name}" for tests in named for path, name in tests if name not in functions(path)]
    assert not missing


def test_every_world_is_named_with_the_command_that_plays_it() -> None:
    suite, long = worlds_after("`make test` plays: "), worlds_after("and also: ")

    assert set(suite) == EVERYDAY
    assert sorted(suite + long) == sorted(world.name for world in WORLDS)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_a_world_is_an_exception_of_the_promises_that_it_breaks(world: World) -> None:
    broken = {name for name, run in PROMISES.items() if run is not None and world.outcomes[run] != OUTCOMES[run]}
    broken |= {"`down`"} if world.held_up_s else set()
    broken = {"refused"} if world.refused else broken

    said = next((text for names, text in EXCEPTIONS if f"**{world.name}**" in names), "")

    assert not [name for name in broken if name not in said]


def test_every_exception_is_about_a_world() -> None:
    named = [name for names, _ in EXCEPTIONS for name in re.findall(r"\*\*(.+?)\*\*", names)]

    assert sorted(named) == sorted({*named} & {world.name for world in WORLDS})


def test_every_promise_of_a_world_has_a_test() -> None:
    promised = re.findall(r"\| ([^|]+) \| `tests/lab/test_worlds\.py::\w+` \|", PAGE)

    assert promised == [*PROMISES, "refused"]


def worlds_after(words: str) -> list[str]:
    """Return the names of worlds in the list that begins after these words."""
    found = re.search(re.escape(words) + r"(.+?)\.\n\n", PAGE, re.DOTALL)
    assert found is not None
    return " ".join(found[1].split()).split("; ")


def functions(path: str) -> set[str]:
    file = REPOSITORY / path
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
