from __future__ import annotations

import json
from typing import TYPE_CHECKING

from clusterctl.render.console import ASCII, UNICODE
from clusterctl.render.start_progress import (
    PhaseProgress,
    PhaseStatus,
    ProgressMode,
    StartProgressView,
    describe_awaited_nodes,
    format_phase,
    list_awaited_nodes,
)

if TYPE_CHECKING:
    from conftest import Screen

CONNECTED = PhaseProgress(name="connect", done=4, total=4, detail="gpu[01-04]", seconds=0.62, status=PhaseStatus.OK)
WAITING = PhaseProgress(
    name="connect", done=2, total=4, seconds=4.0,
    waiting=(("gpu03", "connected, looking for Python for 4 s"), ("gpu10", "no answer to TCP for 2 s")),
)  # fmt: skip


def test_a_phase_is_one_line_of_eighty_columns_with_its_time_at_the_end() -> None:
    line = format_phase(CONNECTED, UNICODE)
    assert line.split() == ["✓", "connect", "4/4", "gpu[01-04]", "0.6s"]
    assert len(line) == 80


def test_phases_stand_below_each_other() -> None:
    started = PhaseProgress(
        name="start", done=16, total=16, detail="master gpu01:29500", seconds=12.3, status=PhaseStatus.FAIL
    )
    lines = [format_phase(CONNECTED, ASCII), format_phase(started, ASCII)]
    assert [line.index("4/4") + 3 for line in lines[:1]] == [lines[1].index("16/16") + 5]
    assert lines[1].startswith("x  start")


def test_a_pipe_gets_the_whole_detail() -> None:
    long = PhaseProgress(name="health", detail="x" * 200, status=PhaseStatus.OK)
    assert "x" * 200 in format_phase(long, UNICODE)
    assert len(format_phase(long, UNICODE, width=60)) == 60


def test_says_what_it_waits_for() -> None:
    assert describe_awaited_nodes(WAITING) == (
        "2 of 4 nodes, waiting for gpu03: connected, looking for Python for 4 s; gpu10: no answer to TCP for 2 s"
    )


def test_names_the_slowest_five() -> None:
    many = PhaseProgress(name="connect", total=99, waiting=tuple((f"gpu{n:02}", "no answer") for n in range(9)))
    assert describe_awaited_nodes(many).endswith("gpu04: no answer; and 4 more")
    assert list_awaited_nodes(many, UNICODE, 80)[-2:] == ["    gpu04  no answer", "    and 4 more"]


def test_who_wants_to_see_every_node_is_told_of_each(new_screen: type[Screen]) -> None:
    many = PhaseProgress(
        name="connect", total=99, seconds=4.0, waiting=tuple((f"gpu{n:02}", "none") for n in range(40))
    )
    pipe, live = new_screen(), new_screen(live=True, width=80)
    told = StartProgressView(pipe.console, name_all_nodes=True)
    told.update(many, 100.0)
    told.tick(106.0)
    StartProgressView(live.console, name_all_nodes=True).update(many, 100.0)
    assert "gpu39: none" in pipe.text
    # A window of 24 lines, of which the phase needs one, and what follows another.
    assert live.text.splitlines()[-1] == "    and 19 more"


def test_a_pipe_gets_a_line_when_a_phase_ends_and_a_reminder_now_and_then(new_screen: type[Screen]) -> None:
    screen = new_screen()
    writer = StartProgressView(screen.console)
    for now in (100.0, 100.1, 105.0, 105.2, 111.0):
        writer.update(WAITING, now)
    writer.update(CONNECTED, 112.0)
    writer.update(CONNECTED, 113.0)
    assert screen.text.splitlines() == [f"connect: {describe_awaited_nodes(WAITING)}", format_phase(CONNECTED, UNICODE)]


def test_a_terminal_is_redrawn_in_place(new_screen: type[Screen]) -> None:
    screen = new_screen(live=True, width=80)
    writer = StartProgressView(screen.console)
    writer.update(WAITING, 100.0)
    writer.update(CONNECTED, 101.0)
    drawn, _, rest = screen.text.partition("\r\x1b[2A\x1b[3M")
    assert drawn.count("\n") == 2
    assert rest == format_phase(CONNECTED, UNICODE, width=80) + "\n"


def test_time_goes_on_between_updates(new_screen: type[Screen]) -> None:
    screen = new_screen(live=True, width=80)
    writer = StartProgressView(screen.console)
    writer.update(WAITING, 100.0)
    writer.tick(103.5)
    assert "7.5s" in screen.text


def test_json_is_one_object_a_change(new_screen: type[Screen]) -> None:
    screen = new_screen()
    StartProgressView(screen.console, mode=ProgressMode.JSON).update(CONNECTED, 1.0)
    assert json.loads(screen.text)["state"] == "ok"


def test_among_json_narration_is_json_as_well(new_screen: type[Screen]) -> None:
    screen = new_screen(colour=True)
    StartProgressView(screen.console, mode=ProgressMode.JSON).note("warn: gpu03: full", "\x1b[31mred\x1b[0m")
    assert [json.loads(line) for line in screen.text.splitlines()] == [{"note": "warn: gpu03: full"}, {"note": "red"}]


def test_quiet_shows_failures_only(new_screen: type[Screen]) -> None:
    screen = new_screen()
    writer = StartProgressView(screen.console, mode=ProgressMode.QUIET)
    writer.update(CONNECTED, 1.0)
    writer.update(PhaseProgress(name="sync", status=PhaseStatus.FAIL), 2.0)
    assert screen.text.split()[:2] == ["✗", "sync"]


def test_what_nodes_say_steers_nothing_in_json_and_stays_what_it_is(new_screen: type[Screen]) -> None:
    hostile = "\x1b]52;c;x\x07\x9b2J\u202e größe"
    screen = new_screen()
    view = PhaseProgress(name="connect", total=2, detail=hostile, waiting=(("gpu03", hostile),))
    StartProgressView(screen.console, mode=ProgressMode.JSON).update(view, 1.0)

    assert json.loads(screen.text)["waiting"] == [["gpu03", hostile]]
    assert screen.text.removesuffix("\n").isprintable()
    assert "größe" in screen.text


def test_narration_is_one_line_of_bearable_length_whatever_it_tells_of(new_screen: type[Screen]) -> None:
    screen = new_screen()
    StartProgressView(screen.console).note("warn: gpu03: full\r\nerror: x", "a" * 1_000_000)

    said, long = screen.text.splitlines()
    assert said == "warn: gpu03: full error: x"
    assert len(long) < 9000
    assert long.endswith("[991,808 more characters]")
