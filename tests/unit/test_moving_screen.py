"""The moving picture of the README: an SVG of what a terminal showed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.moving_screen import Shot, draw_picture, join_shots, split_runs

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "screens" / "clusterctl.svg"


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        pytest.param("a b  c", [(0, "a b", set()), (5, "c", set())], id="columns"),
        pytest.param("\x1b[31mred\x1b[0m off", [(0, "red", {"31"}), (4, "off", set())], id="colour"),
        pytest.param("\x1b[1m\x1b[31mx\x1b[39my", [(0, "x", {"1", "31"}), (1, "y", {"1"})], id="default-colour"),
        pytest.param("", [], id="blank"),
    ],
)
def test_a_captured_line_is_split_by_blanks_and_styles(line: str, runs: list[tuple[int, str, set[str]]]) -> None:
    assert [(column, text, set(styles)) for column, text, styles in split_runs(line)] == runs


def test_equal_neighbours_become_one_shot() -> None:
    shots = [Shot(("a",), 1.0), Shot(("a",), 2.0), Shot(("b",), 0.5)]
    assert join_shots(shots) == [Shot(("a",), 3.0), Shot(("b",), 0.5)]


def test_a_line_that_many_shots_show_is_drawn_once_and_the_picture_rests_on_the_chosen_shot() -> None:
    picture = draw_picture([Shot(("$ <up>",), 1.0), Shot(("$ <up>", "done"), 1.0)], still=1)

    ElementTree.fromstring(picture)
    assert picture.count("$ &lt;up&gt;") == 1
    assert ".film{transform:translateY(-442px)" in picture


def test_the_picture_is_small_and_shows_each_scene() -> None:
    text = PICTURE.read_text()

    ElementTree.fromstring(text)
    assert len(text) < 300_000
    assert "prefers-color-scheme:dark" in text
    for shown in ("clusterctl up", "first observed failure", "clusterctl why", "stopped (state T)", "clusterctl who"):
        assert shown in text
