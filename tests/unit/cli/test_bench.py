"""What `bench` refuses before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from clusterctl.cli.main import cli
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        pytest.param(("--plot", "x.doc"), click.BadParameter, "must end in .png", id="a plot of an unknown kind"),
        pytest.param(("--plot", "nowhere/x.png"), RefusedError, "cannot be written", id="a plot in no folder"),
        pytest.param(("--workers", "1,x"), click.BadParameter, "no list of numbers", id="workers that are no numbers"),
        pytest.param(("--workers", "9"), RefusedError, "9 workers", id="more workers than there is room for"),
    ],
)
def test_bench_refuses(
    words: tuple[str, ...], kind: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("version: 1\nhosts: {'gpu[01-02]': 2}\njob: {command: [x]}\n")
    error = CliRunner().invoke(cli, ["bench", *words], standalone_mode=False).exception
    assert isinstance(error, kind)
    assert said in str(error)
