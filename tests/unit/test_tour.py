"""The tour and the glossary lead to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOUR = (REPOSITORY / "docs" / "tour.md").read_text()
GLOSSARY = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Words")[2].partition("\n## ")[0]
PATH = re.compile(r"`((?:clusterctl|tests)/[\w./]+|pyproject\.toml)`")
NAMED = re.compile(r"`(\w+)` in `([\w./]+)`")
SHOWN = re.compile(r"`([\w./]+\.py)` \(`(\w+)`\)")


def rows(page: str) -> list[str]:
    """The rows of all tables of a page, without their heads."""
    return [
        line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| question", "| word"))
    ]


@pytest.mark.parametrize("page", [TOUR, GLOSSARY], ids=["tour", "glossary"])
def test_every_path_is_there(page: str) -> None:
    assert [path for path in PATH.findall(page) if not (REPOSITORY / path).is_file()] == []


@pytest.mark.parametrize("page", [TOUR, GLOSSARY], ids=["tour", "glossary"])
def test_every_row_names_a_place(page: str) -> None:
    assert [row for row in rows(page) if not PATH.search(row) and "](" not in row] == []


def test_the_tour_answers_at_least_25_questions() -> None:
    assert len(rows(TOUR)) >= 25


def test_what_is_said_to_be_in_a_file_is_in_it() -> None:
    places = [*NAMED.findall(GLOSSARY), *((name, path) for path, name in SHOWN.findall(TOUR))]

    assert len(places) > 20
    assert [
        (name, path)
        for name, path in places
        if not re.search(rf"^(class|def) {name}\b", (REPOSITORY / path).read_text(), re.MULTILINE)
    ] == []
