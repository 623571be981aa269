"""Curves in a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.render.console import Terminal
from clusterctl.render.line_chart import MIN_WIDTH, render_line_chart

VALUES = st.floats(allow_nan=False, allow_infinity=False, width=32)
CURVES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.lists(st.tuples(VALUES, VALUES), max_size=20), max_size=5
)


def terminal(*, unicode: bool = True) -> Terminal:
    return Terminal(io.StringIO(), colour=False, live=False, unicode=unicode, width=100)


@given(curves=CURVES, width=st.integers(MIN_WIDTH, 90), height=st.integers(3, 20), unicode=st.booleans())
def test_a_chart_has_exactly_its_height_and_no_more_than_its_width(
    curves: dict[str, list[tuple[float, float]]], width: int, height: int, unicode: bool
) -> None:
    lines = render_line_chart(
        {name: sorted(points) for name, points in curves.items()}, width, height, terminal(unicode=unicode)
    )

    assert len(lines) == height
    assert max(map(len, lines[:-1])) <= width + 4  # A label of a number with an exponent is a little wider.


@pytest.mark.parametrize(
    ("unicode", "drawn"),
    [
        pytest.param(True, ["       2      ⢀⠔⠊", "           ⢀⡠⠊⠁", "       0 ⡠⠔⠁", "         0s   10s"], id="braille"),
        pytest.param(False, ["       2       **", "           ****", "       0 **", "         0s   10s"], id="ascii"),
    ],
)
def test_a_line_rises_from_the_lower_left_to_the_upper_right(unicode: bool, drawn: list[str]) -> None:
    lines = render_line_chart({"x": [(5.0, 0.0), (15.0, 2.0)]}, 17, 4, terminal(unicode=unicode))

    assert [line.rstrip() for line in lines] == drawn


def test_several_curves_are_named() -> None:
    assert "low high" in render_line_chart({"low": [(0, 1.0)], "high": [(0, 2.0)]}, 60, 4, terminal())[-1]
