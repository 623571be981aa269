"""A damaged spec of one run must not end a program that shows all runs, such as `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.node_stats import read_run_gpus
from clusterctl.run.record.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="torn"),
        pytest.param("[]", id="a list"),
        pytest.param('{"hosts": 7}', id="hosts is a number"),
        pytest.param('{"hosts": ["a"]}', id="a host is a text"),
        pytest.param('{"hosts": [{"name": "a", "gpus": 1.5}]}', id="half a GPU"),
    ],
)
def test_a_damaged_spec_names_no_gpus(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path / "demo-abcd")
    run.path.mkdir()
    run.spec.write_text(text)

    assert read_run_gpus(run) == {}
