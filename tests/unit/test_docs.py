"""Documents stay true: links resolve, generated pages are fresh, and the README keeps to its size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterctl.cli import docs
from tests import documented

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("templates/*/README.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_relative_links_of_a_page_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())

    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]

    assert not missing


def test_the_readme_is_at_most_160_lines() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 160


def test_the_page_of_commands_is_not_stale() -> None:
    assert (REPOSITORY / "docs" / "cli.md").read_text() == docs.page(), "run `make docs`"


def test_every_command_of_a_page_is_run_by_a_test() -> None:
    run = {row.text for row in documented.STORY} | set(documented.ELSEWHERE)

    told = documented.documented()
    missing = {command: told[command] for command in told if command not in run and not documented.is_target(command)}

    assert not missing, "add them to tests/documented.py"


def test_every_command_that_a_test_runs_for_a_page_is_on_one() -> None:
    told = documented.documented()
    assert not [row.text for row in documented.STORY if row.text not in told]
    assert all((REPOSITORY / where).exists() for where in documented.ELSEWHERE.values())
