from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import fold_ranks, plural
from clusterctl.render.table import Cell, Column, render_table

if TYPE_CHECKING:
    from conftest import Screen

COLUMNS = [Column(title="NAME", shrink=True), Column(title="N", right=True), Column(title="NOTE", shrink=True)]
ROWS = [["a", "1", "x" * 100], [Cell("日本", ("31",)), "20", ""]]


def test_a_pipe_gets_everything_aligned(new_screen: type[Screen]) -> None:
    assert render_table(COLUMNS, ROWS, new_screen().terminal) == [
        "NAME   N  NOTE",
        f"a      1  {'x' * 100}",
        "日本  20",
    ]


def test_a_terminal_gets_what_fits(new_screen: type[Screen]) -> None:
    lines = render_table(COLUMNS, ROWS, new_screen(width=40).terminal)
    assert max(map(len, lines)) == 40
    assert lines[1].endswith("x…")


def test_a_column_that_wraps_goes_on_in_further_lines_below_itself(new_screen: type[Screen]) -> None:
    columns = [Column(title="N", right=True), Column(title="END", shrink=True, wraps=True)]
    rows = [["0", "rank 3 on n2: no such file /a/path/that/is/long"], ["10", "succeeded"]]

    assert render_table(columns, rows, new_screen(width=20).terminal) == [
        " N  END",
        " 0  rank 3 on n2: no",
        "      such file /a/p",
        "    ath/that/is/long",
        "10  succeeded",
    ]
    assert len(render_table(columns, rows, new_screen().terminal)) == 3


def test_colours_do_not_count_as_width(new_screen: type[Screen]) -> None:
    plain = render_table(COLUMNS, ROWS, new_screen().terminal, header=False)
    screen = new_screen(colour=True)
    screen.terminal.write_lines(render_table(COLUMNS, ROWS, screen.terminal, header=False))
    assert screen.text.replace("\x1b[31m", "").replace("\x1b[0m", "").splitlines() == plain


def test_ranks_fold() -> None:
    assert fold_ranks([6, 0, 1, 2, 3, 4, 4]) == "0-4,6"
    assert fold_ranks([]) == ""
    assert (plural(1, "node"), plural(2, "node")) == ("1 node", "2 nodes")
