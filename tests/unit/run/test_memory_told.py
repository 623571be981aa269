"""A SIGKILL that nobody explains is told with how full the memory of the node was."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest

from clusterctl.render.console import Terminal
from clusterctl.render.end_report import ReportContext, render_end_report
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.sample_files import find_memory_before_kill
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState
from tests.unit.run.told import RUNNING, exited, told, wrote

PIPE = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=0)
IN_STEP = told(RUNNING, controller_events.ClockEstimated(node="n1", offset=1000.0, error=0.0, ahead=5.0))
KILLED = wrote(IN_STEP, "n1", exited(2, signal=signal.SIGKILL, earliest=99.0, latest=100.0))
"""At 1100 by the clock of the head, which is 1105 by that of the node."""
FAILED = wrote(IN_STEP, "n1", exited(2, exit_code=1, earliest=99.0, latest=100.0))


def measured(folder: Path, **full: float) -> RunDir:
    run = RunDir(folder)
    lines = [json.dumps({"kind": "health", "t": float(at[1:]), "m": 1.0, "mem": mem}) for at, mem in full.items()]
    run.node("n1").mkdir(parents=True)
    (run.node("n1") / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run


@pytest.mark.parametrize(
    ("state", "full", "known"),
    [
        pytest.param(KILLED, {"t1085": 60.0, "t1100": 97.0, "t1110": 10.0}, (97.0, 5.0), id="the newest before it"),
        pytest.param(KILLED, {"t1000": 97.0}, None, id="long before"),
        pytest.param(KILLED, {}, None, id="not measured"),
        pytest.param(FAILED, {"t1100": 97.0}, None, id="not killed"),
    ],
)
def test_what_was_measured_last_before_a_kill_is_known(
    tmp_path: Path, state: RunState, full: dict[str, float], known: tuple[float, float] | None
) -> None:
    assert find_memory_before_kill(measured(tmp_path, **full), state) == known


def test_the_report_says_how_full_the_memory_was() -> None:
    over = told(KILLED, controller_events.RunEnded(state="failed", exit_code=100))

    assert "  memory of n1 was 97% full 5 s before" in render_end_report(
        over, PIPE, ReportContext(node_memory=(97.4, 5.0))
    )
    assert "memory of" not in "".join(render_end_report(over, PIPE))
