"""Sentences are broken between words where a terminal is narrow; nothing is lost by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.line_wrapping import count_columns, wrap_line

if TYPE_CHECKING:
    from tests.unit.render.conftest import Screen

HINT = '  hint: work of one rank looks like this; declare it by `with clusterctl.phase("checkpoint")`, or its files'


@pytest.mark.parametrize(
    ("line", "width", "expected"),
    [
        pytest.param(
            HINT,
            60,
            [
                "  hint: work of one rank looks like this; declare it by",
                '    `with clusterctl.phase("checkpoint")`, or its files',
            ],
            id="a command is never broken",
        ),
        pytest.param(HINT, None, [HINT], id="a pipe"),
        pytest.param(
            "  next   clusterctl logs demo --rank 2",
            24,
            ["  next   clusterctl logs", "         demo --rank 2"],
            id="below its own column",
        ),
        pytest.param("  │ raise ValueError(a b c d e f)", 20, ["  │ raise ValueError(a b c d e f)"], id="what is quoted"),
        pytest.param("see /a/path/that/is/longer now", 14, ["see /a/path/that/is/longer", "  now"], id="a long word"),
    ],
)  # fmt: skip
def test_a_sentence_is_broken_between_words(line: str, width: int | None, expected: list[str]) -> None:
    assert wrap_line(line, width) == expected


@given(st.lists(st.sampled_from(["ab", "c,", " ", "`", "\x1b[1m", "中"]), max_size=60).map("".join), st.integers(8, 40))
def test_nothing_is_lost_and_no_line_is_too_wide_but_for_a_single_word(line: str, width: int) -> None:
    lines = wrap_line(line, width)

    assert "".join("".join(lines).split()) == "".join(line.split())
    longest = max((count_columns(word) for word in strip_colours(line).split()), default=0)
    fits = longest <= width - 6 and "`" not in line
    assert not fits or all(count_columns(strip_colours(one)) <= width for one in lines)


def test_what_is_told_is_broken_on_a_terminal_and_whole_in_a_pipe(new_screen: type[Screen]) -> None:
    narrow, pipe = new_screen(width=20), new_screen()
    for screen in (narrow, pipe):
        screen.terminal.write_wrapped(["a worker failed: stopping the others"])

    assert narrow.text == "a worker failed:\n  stopping the\n  others\n"
    assert pipe.text == "a worker failed: stopping the others\n"
