"""The front page: what `clusterctl` alone shows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from clusterctl.cli.command_table import GROUPS
from clusterctl.cli.main import run
from clusterctl.cli.overview import render_overview
from clusterctl.render.console import Terminal

PLAIN = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=80)


def test_a_run_that_goes_on_stands_first() -> None:
    assert render_overview("9", ["RUN", "a-1234"], PLAIN, has_file=True)[:3] == ["RUN", "a-1234", ""]


@pytest.mark.parametrize(
    ("has_file", "said"), [(True, "`clusterctl up`"), (False, "`clusterctl init`")], ids=["a file", "none"]
)
def test_the_page_says_what_to_type_next(has_file: bool, said: str) -> None:
    assert any(said in line for line in render_overview("9", [], PLAIN, has_file=has_file))


def test_the_page_fits_80_columns() -> None:
    assert max(map(len, render_overview("10.10.10", [], PLAIN, has_file=False))) <= 80


def test_the_program_alone_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run([]) == 0
    assert "train on many machines" in capsys.readouterr().out


def test_help_lists_the_commands_in_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert [said.index(f"\n{group}:") for group in GROUPS] == sorted(said.index(f"\n{group}:") for group in GROUPS)
