"""The output of the work on a node before the start, as the head keeps it."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.spec import HostSpec, TransportKind
from clusterctl.errors import NodeEnvironmentError
from clusterctl.run.environments.node_entries import build_venv_request, make_entry
from clusterctl.run.record import rundir
from tests.agent.controlling import Nodes

if TYPE_CHECKING:
    from pathlib import Path

FLOOD = "head -c 8000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 3"


def test_the_end_of_a_long_output_is_kept_and_its_last_lines_are_quoted(tmp_path: Path) -> None:
    host = HostSpec(name="a", host="localhost", transport=TransportKind.LOCAL)
    session = Nodes(tmp_path / "state").dial(host, queue.SimpleQueue(), lambda _: None)
    run = rundir.create_run_dir("r", tmp_path / "runs")
    request = build_venv_request(str(tmp_path / "environments"), "py", [{"argv": ["sh", "-c", FLOOD]}], [])

    with pytest.raises(NodeEnvironmentError) as raised:
        make_entry(run, "a", session, request, threading.Event())
    session.close()

    assert "the end" in str(raised.value)
    assert len(str(raised.value)) < 2000
    log = run.path / "environment/a.environment.log"
    assert raised.value.hint == f"the end of the output is in {log}"
    assert log.stat().st_size < 3_000_000
