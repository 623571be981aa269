"""How far the clock of a node is from the head's is written down when it is measured better, or has moved."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from clusterctl.run.controller.reconnection import Reconnection
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import NodeState, RunState
from clusterctl.run.rules.state_updates import apply_controller_event
from clusterctl.session.controller_inbox import ClockMeasured
from tests.compiled import compiled

if TYPE_CHECKING:
    from clusterctl.run.controller.controlled_run import ControlledRun


class Recorded(SimpleNamespace):
    """What a controller knows of its run, and what it has written of clocks."""

    def __init__(self) -> None:
        state = RunState(nodes={"n0": NodeState(node="n0", node_rank=0)})
        super().__init__(state=state, told=[], links=SimpleNamespace())

    def record_event(self, event: controller_events.ClockEstimated) -> None:
        self.told.append(event)
        self.state = apply_controller_event(self.state, 0.0, event)


def ahead_after(*offsets: float, error: float = 0.01) -> list[float]:
    """What was written of a wall clock that was so far ahead at each beat."""
    run = Recorded()
    connections = Reconnection(cast("ControlledRun", run))
    for offset in offsets:
        connections.record_clock(ClockMeasured("n0", wall_offset_s=offset, mono_offset_s=50.0, error_s=error, boot="b"))
    return [clock.ahead for clock in run.told]


def approx(offsets: list[float]) -> object:
    return pytest.approx(offsets, abs=0.01)


def test_a_clock_is_written_down_once_while_it_goes_on_as_it_did() -> None:
    assert ahead_after(5.0, 5.04, 4.96) == approx([5.0])


def test_a_clock_that_is_set_is_written_down_again() -> None:
    assert ahead_after(5.0, 0.0, 0.01, -3600.0) == approx([5.0, 0.0, -3600.0])


def test_what_may_be_the_error_of_the_measure_is_no_move() -> None:
    assert ahead_after(0.0, 1.0, error=2.0) == approx([0.0])


def test_where_somebody_sets_the_clock_of_the_head_the_clock_of_events_and_how_far_nodes_are_from_it_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600.0)
    assert ahead_after(5.0 - 3600.0) == approx([5.0])


SLEPT = """
import os, struct, sys, time
from clusterctl.run.record.head_clock import read_head_time
with open(os.environ["ASLEEP"], "r+b") as file:
    file.write(struct.pack("<q", 3600 * 10**9))
print(read_head_time() - time.time())
"""


def test_events_after_a_sleep_of_the_head_have_the_time_of_its_wall_clock(tmp_path: Path) -> None:
    library = compiled(Path(__file__).parents[2] / "lab/asleep.c", "libasleep.so", "-shared", "-fPIC") / "libasleep.so"
    asleep = tmp_path / "asleep"
    asleep.write_bytes(struct.pack("<q", 0))
    env = {**os.environ, "LD_PRELOAD": str(library), "ASLEEP": str(asleep)}
    done = subprocess.run([sys.executable, "-c", SLEPT], env=env, check=True, capture_output=True, text=True)
    assert abs(float(done.stdout)) < 1.0
