"""All mistakes of a file are told in one go."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from clusterctl.errors import ConfigError
from clusterctl.render.console import Terminal
from clusterctl.render.error_messages import render_config_error
from clusterctl.render.terminal_sanitizer import sanitize_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile


def rendered(error: ConfigError, *, colour: bool = False, width: int = 0) -> str:
    """Return what a terminal of that width shows of an error."""
    terminal = Terminal(io.StringIO(), colour=colour, live=False, unicode=True, width=width)
    return "\n".join(render_config_error(error, terminal))


MANY = """\
version: 1
name: my run
hosts:
  - gpu[04-01]
  - host: gpu05
    gpu: 8
  - {host: gpu06, port: 70000}
  - gpu06
env:
  RANK: 1
  RANK: 2
sync: {max_size: 5 miles}
job:
  script: tran.py
  grace: soon
  checkpoint: {patern: x}
stall: {action: resart}
restarts: {max_restarts: 1}
secrets: {TOKEN: {env: NOPE}}
"""


def test_mistakes_in_every_section_are_all_reported_in_order(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(MANY, with_secrets=True)
    assert [(p.line, p.column) for p in caught.value.problems] == [
        (2, 7),
        (4, 9),
        (6, 5),
        (7, 25),
        (10, 3),
        (11, 3),
        (12, 18),
        (15, 10),
        (16, 16),
        (17, 17),
        (18, 1),
        (19, 24),
    ]


def test_mistakes_of_two_files_are_grouped_by_file(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text("version: 1\nhosts: gpu01\nstall: {timeout: x}\n", "logs: {max_size: x}\nenv: {RANK: 1}\n")
    places = [(p.path, p.line) for p in caught.value.problems]
    assert places == [("cluster.yaml", 3), ("more.yaml", 1), ("more.yaml", 2)]


def test_an_anchor_used_twice_tells_its_mistake_once(parse_text: Callable[..., LoadedClusterFile]) -> None:
    text = "version: 1\nhosts:\n  a: &big {gpus: 8, port: 0}\n  b: *big\n"
    with pytest.raises(ConfigError) as caught:
        parse_text(text)
    assert {(p.line, p.column) for p in caught.value.problems} == {(3, 27)}


def test_mistakes_in_an_env_file_point_into_it(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text("version: 1\nhosts: a\nenv_file: bad.env\n")
    assert [(p.path, p.line, p.column) for p in caught.value.problems] == [("bad.env", 2, 1), ("bad.env", 3, 1)]


def test_the_text_shows_place_line_caret_hint_and_count(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text("version: 1\nhosts:\n  - host: gpu01\n    gpu: 8\nstall: {action: resart}\n")
    assert rendered(caught.value) == (
        "cluster.yaml:4:5: error: hosts[0].gpu: unknown key\n"
        " 4 |     gpu: 8\n"
        "   |     ^~~\n"
        "  hint: did you mean `gpus`?\n"
        "cluster.yaml:5:17: error: stall.action: must be `report`, `stop` or `restart`, not the text `resart`\n"
        " 5 | stall: {action: resart}\n"
        "   |                 ^~~~~~\n"
        "  hint: did you mean `restart`?\n"
        "2 problems in cluster.yaml; nothing was done"
    )


def test_colour_changes_nothing_but_colour(parse_text: Callable[..., LoadedClusterFile]) -> None:
    import re

    with pytest.raises(ConfigError) as caught:
        parse_text(MANY)
    lines = rendered(caught.value, colour=True).split("\n")
    coloured = "\n".join(map(sanitize_line, lines))
    assert "\x1b[31m" in coloured
    assert re.sub("\x1b\\[[0-9]+m", "", coloured) == rendered(caught.value)


def test_a_long_line_is_cut_around_the_caret(parse_text: Callable[..., LoadedClusterFile]) -> None:
    text = "version: 1\nhosts: gpu01\nenv: {A: " + "x" * 300 + ", RANK: 1, B: " + "y" * 300 + "}\n"
    with pytest.raises(ConfigError) as caught:
        parse_text(text)
    _, source, caret, *_ = rendered(caught.value, width=80).splitlines()
    assert len(source) <= 80
    assert source[caret.index("^") :].startswith("RANK")


def test_control_sequences_of_a_file_never_reach_the_terminal(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(b"version: 1\nhosts: \x1b[2Jgpu\n")
    assert "\x1b" not in rendered(caught.value)


def test_the_caret_stands_below_wide_characters(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text("version: 1\nhosts: gpu01\nenv: {名: 1, RANK: 1}\n")
    lines = rendered(caught.value).splitlines()
    assert lines[2].index("^") == lines[1].index("RANK") + 1
