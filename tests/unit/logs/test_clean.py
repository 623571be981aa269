from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.safe_text import clean_block, clean_text, strip_colours
from tests.work import work

RED = "\x1b[31m"
RESET = "\x1b[0m"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        pytest.param(b"plain\ttext\n", ["plain\ttext"], id="plain text stays"),
        pytest.param("größe │ …\n".encode(), ["größe │ …"], id="non-ascii stays"),
        pytest.param(b"a\n\nb", ["a", "", "b"], id="an empty line and a line without end count"),
        pytest.param(b"bad \xff\xfe end\n", ["bad �� end"], id="bytes that are not utf-8"),
        pytest.param(b"dos\r\n", ["dos"], id="a dos line end"),
        pytest.param(b"\r\n", [""], id="an empty dos line"),
        pytest.param(b"\r", [""], id="a carriage return alone"),
        pytest.param(b"\r\r\n\rx\n", ["", "x"], id="carriage returns alone, then text"),
        pytest.param(b" 1%\r 50%\r100%\n", ["100%"], id="the last frame of a progress bar wins"),
        pytest.param(b"50%\r      \rdone\n", ["done"], id="a frame that erases is no frame"),
        pytest.param(b"99%\r    \r\n", ["99%"], id="the last frame with text wins"),
        pytest.param(b"99%\r\x1b[K\n", ["99%"], id="a frame of escapes only is no frame"),
        pytest.param(b"99%\r\x1b[2m\x1b[0m\r\n", ["99%"], id="nor is one of colours only"),
        pytest.param(b"ab\x08\x08xy\n", ["xy"], id="backspaces erase"),
        pytest.param(b"\x1b[31mred\x1b[0m\n", [f"{RED}red{RESET}"], id="colours stay"),
        pytest.param(b"\x1b[31mred\nnext\n", [f"{RED}red{RESET}", "next"], id="colours end with their line"),
        pytest.param(b"\x1b[2J\x1b[Hx\x1b[10;5Hy\n", ["xy"], id="cursor movement is stripped"),
        pytest.param(b"\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n", ["xlink"], id="titles and links"),
        pytest.param(b"\x1bP1;2qpayload\x1b\\x\n", ["x"], id="device control strings"),
        pytest.param(b"\x1bcx\x1b(By\x1b7z\n", ["xyz"], id="resets and character sets"),
        pytest.param(b"\x1b]0;never ended\n", ["^[]0;never ended"], id="an unfinished sequence hides nothing"),
        pytest.param("a\x9dtitle\x9cb\n".encode(), ["ab"], id="eight-bit strings"),
        pytest.param("\x9done\x9dtwo\x9c|\n".encode(), ["\\x9done|"], id="a string ends where another begins"),
        pytest.param(b"nul\x00 bell\x07 del\x7f\n", ["nul^@ bell^G del^?"], id="controls become visible"),
        pytest.param("c1 \x9b2J \x85\n".encode(), ["c1  \\x85"], id="eight-bit controls"),
        pytest.param("rm \u202etxt\n".encode(), ["rm \\u202etxt"], id="marks that reorder text become visible"),
        pytest.param("a\u061cb\u200bc\n".encode(), ["a\\u061cb\\u200bc"], id="so does what takes no room"),
        pytest.param("\ufeffa\u2060b\n".encode(), ["\\ufeffa\\u2060b"], id="byte order marks, joiners of words"),
        pytest.param("a\U000e0041b\n".encode(), ["a\\U000e0041b"], id="tags"),
        pytest.param("\u00adrm\u180e\n".encode(), ["\\xadrm\\u180e"], id="hyphens and vowels that nobody sees"),
        pytest.param("tr\u200dain \u200c-n\n".encode(), ["tr\\u200dain \\u200c-n"], id="joiners in a command"),
        pytest.param("👩\u200d💻 می\u200cخواهم\n".encode(), ["👩\u200d💻 می\u200cخواهم"], id="joiners that join stay"),
        pytest.param(b"\x1b[8mhid\x1b[0m den\n", ["hid\x1b[0m den\x1b[0m"], id="nothing is concealed"),
        pytest.param(b"\x1b[1;008;31mx\n", ["\x1b[1;31mx\x1b[0m"], id="also not beside a colour"),
        pytest.param(b"\x1b[1;5;8mx\n", ["\x1b[1;5mx\x1b[0m"], id="nor behind a style that has no number"),
        pytest.param(b"\x1b[38:5:1;5;8mx\n", ["\x1b[38:5:1;5mx\x1b[0m"], id="nor behind one that has it with it"),
        pytest.param(b"\x1b[38;8mx\n", ["\x1b[38mx\x1b[0m"], id="nor behind one that lacks its number"),
        pytest.param(
            b"\x1b[38;5;8ma\x1b[48;2;8;8;8mb\x1b[38:5:8mc\n",
            ["\x1b[38;5;8ma\x1b[48;2;8;8;8mb\x1b[38:5:8mc\x1b[0m"],
            id="an eight within a colour is no style",
        ),
    ],
)
def test_shows_text_and_colours_and_nothing_that_acts_on_the_terminal(raw: bytes, shown: list[str]) -> None:
    assert clean_block(raw) == shown


@given(st.binary(max_size=200))
def test_no_bytes_get_a_control_sequence_other_than_a_colour_through(data: bytes) -> None:
    for line in clean_block(data):
        assert all(c == "\t" or (c >= " " and not "\x7f" <= c <= "\x9f") for c in strip_colours(line))
        assert line.count("\x1b") == 0 or line.endswith((RESET, "\x1b[m"))


HIDDEN = "\xad\u061c\u180e\u200b\u200e\u202e\u2060\u2066\ufeff\U000e0001\U000e007f"


PIECES = [*HIDDEN, *"\u200c\u200d👩میab8;[m", "\x1b", "\x1b[8m", "\x1b[1;8m"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_nothing_that_hides_gets_through_by_any_neighbours(text: str) -> None:
    (line,) = clean_block(f"{text}\n".encode())
    assert not set(line) & set(HIDDEN)
    assert not re.search("\x1b\\[(?:[0-9]+;)*0*8[;m]", line)


@given(st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b), max_size=20))
def test_a_block_is_cleaned_as_its_lines_are(lines: list[bytes]) -> None:
    whole = clean_block(b"".join(line + b"\n" for line in lines))
    assert whole == [clean_text(line.decode("utf-8", "replace")) for line in lines]


def test_a_string_that_goes_on_for_too_long_hides_nothing() -> None:
    assert clean_text("\x1b]0;" + "a" * 4000 + "\x07b") == "b"
    assert clean_text("\x1b]0;" + "a" * 5000 + "\x07b") == "^[]0;" + "a" * 5000 + "^Gb"


STARTERS = [
    "\x9d",
    "\x90",
    "\x98",
    "\x9e",
    "\x9f",
    "\x9b",
    "\x1b]",
    "\x1bP",
    "\x1b[",
    "\x1b",
    "\x1b[1",
    "\x9d\x1b",
    "\r\x9d",
]


UNITS = [*STARTERS, "\r", "a\x08", "\u200d", "\x1b[8m", "\x1b[8;", "\x1b[0;0"]


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_the_work_for_a_line_grows_as_its_length(unit: str) -> None:
    # Work that grows as the square would be 256 times as much.
    short, long = unit * 2_500, unit * 40_000

    assert work(lambda: clean_text(long)) < 64 * work(lambda: clean_text(short))
    assert work(lambda: clean_block(long.encode())) < 64 * work(lambda: clean_block(short.encode()))


def test_a_long_line_of_backspaces_is_cleaned() -> None:
    assert clean_text("a" * 100_000 + "\x08" * 100_000 + "b") == "b"


def test_a_block_is_cleaned_as_each_of_its_lines_whatever_one_character_it_holds() -> None:
    for code in (*range(0x3100), *range(0xD800 - 0x100, 0xD800), *range(0xE000, 0x10FFFF, 0x101)):
        line = f"a{chr(code)}b"
        if chr(code) != "\n":
            assert clean_block(f"{line}\n".encode()) == [clean_text(line)], hex(code)
