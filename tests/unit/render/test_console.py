from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.render.console import (
    ASCII,
    ColorChoice,
    Console,
    Terminal,
    fit,
    safe,
    wants_colour,
)
from clusterctl.render.line_wrapping import count_columns

if TYPE_CHECKING:
    from conftest import Screen


@pytest.mark.parametrize(
    ("choice", "env", "isatty", "expected"),
    [
        pytest.param("auto", {"TERM": "xterm"}, True, True, id="terminal"),
        pytest.param("auto", {"TERM": "xterm"}, False, False, id="pipe"),
        pytest.param("auto", {"TERM": "dumb"}, True, False, id="dumb terminal"),
        pytest.param("auto", {"NO_COLOR": "1", "TERM": "xterm"}, True, False, id="NO_COLOR"),
        pytest.param("auto", {"NO_COLOR": "", "TERM": "xterm"}, True, True, id="NO_COLOR that is empty"),
        pytest.param("auto", {"FORCE_COLOR": "1"}, False, True, id="FORCE_COLOR in a pipe"),
        pytest.param("auto", {"FORCE_COLOR": "0", "TERM": "xterm"}, True, False, id="FORCE_COLOR=0"),
        pytest.param("auto", {"CLICOLOR_FORCE": "1"}, False, True, id="CLICOLOR_FORCE"),
        pytest.param("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False, id="NO_COLOR beats FORCE_COLOR"),
        pytest.param("always", {"NO_COLOR": "1"}, False, True, id="the flag beats all"),
        pytest.param("never", {"FORCE_COLOR": "1"}, True, False, id="the flag beats all, too"),
    ],
)
def test_colours_follow_flag_then_environment_then_stream(
    choice: str, env: dict[str, str], isatty: bool, expected: bool
) -> None:
    assert wants_colour(ColorChoice(choice), env, isatty=isatty) is expected


def test_a_pipe_has_no_width() -> None:
    assert Terminal.for_stream(io.StringIO(), env={"TERM": "xterm"}).width is None


def test_an_encoding_that_lacks_signs_gets_words() -> None:
    raw = io.BytesIO()
    terminal = Terminal.for_stream(io.TextIOWrapper(raw, encoding="ascii"), env={})
    assert terminal.glyphs is ASCII
    terminal.write_line("größe \udcff")
    assert raw.getvalue() == b"gr\\xf6\\xdfe \\udcff\n"


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        pytest.param({"LC_ALL": "C"}, "größe - 3 ok\n", id="C"),
        pytest.param({"LC_ALL": "POSIX"}, "größe - 3 ok\n", id="POSIX"),
        pytest.param({"LC_ALL": "C.UTF-8"}, "größe · 3 ✓\n", id="C.UTF-8"),
        pytest.param({"LC_ALL": "C", "PYTHONUTF8": "1"}, "größe · 3 ✓\n", id="C, but UTF-8 of Python"),
        pytest.param({"LANG": "C", "LC_ALL": ""}, "größe · 3 ✓\n", id="C unless something else is said"),
    ],
)
def test_the_locale_c_has_plain_signs_and_leaves_the_words_of_others_as_they_are(
    env: dict[str, str], shown: str
) -> None:
    raw = io.BytesIO()
    terminal = Terminal.for_stream(io.TextIOWrapper(raw, encoding="utf-8"), env=env)
    terminal.write_line(f"größe · 3 {terminal.glyphs.ok}")
    assert raw.getvalue().decode() == shown


def test_output_takes_the_transient_line_of_either_stream_away(new_screen: type[Screen]) -> None:
    out, err = new_screen(live=True), new_screen(live=True)
    console = Console(out.terminal, err.terminal)
    out.terminal.draw(["50%"])
    console.write_stderr("note")
    console.write_stdout("line")
    assert out.text == "\r\x1b[K50%\r\x1b[Kline\n"
    assert err.text == "note\n"


def test_a_pipe_gets_no_transient_lines(new_screen: type[Screen]) -> None:
    screen = new_screen()
    screen.terminal.draw(["50%"])
    assert screen.text == ""


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])), st.integers(0, 30))
def test_a_fitted_text_is_never_wider_than_asked(text: str, width: int) -> None:
    assert count_columns(fit(text, width)) <= max(width, 0)


@given(st.text())
def test_safe_text_is_one_line_without_controls(text: str) -> None:
    assert all(c.isprintable() or not (c < " " or "\x7f" <= c <= "\x9f") or c == "\t" for c in safe(text))


def test_our_signs_are_plain_where_the_stream_has_no_others() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)

    Terminal.for_stream(stream, env={}).write_line("master 10.0.0.1 · attempt 0 → é, 83 °C")

    assert raw.getvalue() == b"master 10.0.0.1 - attempt 0 -> \\xe9, 83 C\n"
