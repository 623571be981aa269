from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from clusterctl.logs.fold import FoldedLine
from clusterctl.logs.log_line import LogLine
from clusterctl.render.log_output import LogWriter, Timestamps, encode_raw_line, format_json_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Screen

NODES = ("gpu01", "gpu02")


def test_prefixes_are_aligned(new_screen: type[Screen]) -> None:
    screen = new_screen()
    LogWriter(screen.terminal, NODES, range(12)).write(
        [
            LogLine(0.0, "gpu01", 0, 0, "step 10"),
            LogLine(0.0, "gpu02", 11, 0, "step 10"),
            FoldedLine(0.0, NODES, (0, 1, 2, 7), 0, "warning"),
        ]
    )
    assert screen.text == "gpu01 r0  │ step 10\ngpu02 r11 │ step 10\nr0-2,7    │ warning\n"


def test_an_empty_line_that_comes_alone_is_a_line(new_screen: type[Screen]) -> None:
    screen = new_screen()
    LogWriter(screen.terminal, prefix=False).write([LogLine(0.0, "gpu01", 0, 0, "")])
    assert screen.text == "\n"


def test_a_wide_set_of_ranks_is_counted(new_screen: type[Screen]) -> None:
    screen = new_screen()
    line = FoldedLine(0.0, NODES, tuple(range(0, 64, 2)), 0, "x")
    LogWriter(screen.terminal, NODES, range(64)).write([line])
    assert screen.text == "r0-62 (32 ranks)                 │ x\n" or screen.text.startswith("r0-62 (32 ranks)")


def test_ascii_where_the_terminal_knows_no_more(new_screen: type[Screen]) -> None:
    screen = new_screen(unicode=False)
    LogWriter(screen.terminal, NODES, range(2)).write([LogLine(0.0, "gpu01", 0, 0, "x")])
    assert screen.text == "gpu01 r0 | x\n"


def test_nodes_have_the_colour_of_their_place(new_screen: type[Screen]) -> None:
    screen = new_screen(colour=True)
    LogWriter(screen.terminal, NODES, range(2)).write([LogLine(0.0, "gpu02", 1, 0, "\x1b[31mred\x1b[0m")])
    assert screen.text == "\x1b[33mgpu02 r1 │\x1b[0m \x1b[31mred\x1b[0m\n"


def test_colours_of_workers_need_a_stream_with_colours(new_screen: type[Screen]) -> None:
    screen = new_screen()
    LogWriter(screen.terminal, prefix=False).write([LogLine(0.0, "gpu02", 1, 0, "\x1b[31mred\x1b[0m")])
    assert screen.text == "red\n"


@pytest.fixture
def in_vladivostok(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "VLAT-10")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_vladivostok")
def test_timestamps_are_those_of_the_reader(new_screen: type[Screen]) -> None:
    screen = new_screen()
    writer = LogWriter(screen.terminal, NODES, range(2), timestamps=Timestamps.SHORT)
    writer.write([LogLine(2_000_038_400.125, "gpu01", 0, 0, "x")])
    assert screen.text == "00:13:20.125 gpu01 r0 │ x\n"


def test_a_progress_bar_is_rewritten_in_place_on_a_terminal(new_screen: type[Screen]) -> None:
    screen = new_screen(live=True, width=14)
    writer = LogWriter(screen.terminal, NODES, range(2))
    writer.write([LogLine(0.0, "gpu01", 0, 0, "10% and more", partial=True)])
    writer.write([LogLine(0.0, "gpu01", 0, 0, "done")])
    assert screen.text == "\r\x1b[Kgpu01 r0 │ 10\r\x1b[Kgpu01 r0 │ done\n"


def test_a_progress_bar_is_a_line_in_a_pipe(new_screen: type[Screen]) -> None:
    screen = new_screen()
    LogWriter(screen.terminal, NODES, range(2)).write([LogLine(0.0, "gpu01", 0, 0, "10%", partial=True)])
    assert screen.text == "gpu01 r0 │ 10%\n"


def test_a_pipe_gets_long_lines_whole(new_screen: type[Screen]) -> None:
    screen = new_screen()
    LogWriter(screen.terminal, prefix=False).write([LogLine(0.0, "gpu01", 0, 0, "x" * 100_000)])
    assert len(screen.text) == 100_001


def test_a_screen_gets_the_beginning_of_a_long_line(new_screen: type[Screen]) -> None:
    screen = new_screen(live=True, width=80)
    LogWriter(screen.terminal, prefix=False).write([LogLine(0.0, "gpu01", 0, 0, "x" * 100_000)])
    assert screen.text.endswith("x … [100,000 characters; all of them with --format raw]\n")


def test_json_has_the_agreed_keys() -> None:
    line = LogLine(2_000_038_400.125, "gpu01", 0, 2, "\x1b[1mä\x1b[0m")
    assert json.loads(format_json_line(line)) == {
        "time": "2033-05-18T14:13:20.125Z", "node": "gpu01", "rank": 0, "attempt": 2, "text": "ä",
    }  # fmt: skip


def test_raw_is_byte_exact() -> None:
    assert encode_raw_line(LogLine(0.0, "n", 0, 0, b"\xff\x00".decode("utf-8", "surrogateescape"))) == b"\xff\x00\n"
    assert encode_raw_line(LogLine(0.0, "n", 0, 0, "end", partial=True)) == b"end"
