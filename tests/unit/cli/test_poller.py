"""Looks at a run: when one is due, and where the run stands at it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import run_files
from clusterctl.cli.follow.poller import RunAttendance, RunPoller
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENDED = controller_events.RunEnded(state="succeeded", exit_code=0)


def begun(root: Path, *written: controller_events.ControllerEvent) -> rundir.RunDir:
    """A run without a controller."""
    run = rundir.create_run_dir("demo", root)
    with closing(RunDirWriter(run)) as writer:
        for event in (controller_events.RunCreated(run=run.run, name="demo", path=""), *written):
            writer.append(event, 1.0)
    return run


class Controller:
    """As much of a controller as a bell needs: it takes a watcher in and rings."""

    def __init__(self, run: rundir.RunDir) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(run.control_address())
        self._listener.listen()
        self._watcher: socket.socket | None = None

    def ring(self) -> None:
        if self._watcher is None:
            self._watcher, _ = self._listener.accept()
        self._watcher.send(b"\n")

    def close(self) -> None:
        self._listener.close()
        if self._watcher is not None:
            self._watcher.close()


def test_the_only_look_at_a_run_that_is_over_says_so(tmp_path: Path) -> None:
    run = begun(tmp_path, ENDED)
    assert [look.attendance for look in RunPoller(run).watch()] == [RunAttendance.OVER]


def test_the_only_look_at_a_run_without_a_controller_says_so_and_what_is_new(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (look,) = RunPoller(run).watch()
    assert look.attendance is RunAttendance.UNATTENDED
    assert [type(event) for _, event in look.new_controller_events] == [controller_events.RunCreated]


def test_a_run_is_looked_at_until_it_is_over_while_its_controller_lives(tmp_path: Path) -> None:
    run = begun(tmp_path)
    courses = []
    with closing(RunDirWriter(run)) as writer:
        for look in RunPoller(run).watch(lambda: 0.0):
            courses.append(look.attendance)
            if len(courses) == 2:
                writer.append(ENDED, 2.0)
    assert courses == [RunAttendance.ATTENDED, RunAttendance.ATTENDED, RunAttendance.OVER]


@contextmanager
def attended_from(host: str, run: rundir.RunDir) -> Iterator[None]:
    """The lock of a run is held, by a controller on that machine."""
    with run.lock.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate()
        lock.write(json.dumps({"host": host, "pid": 1}))
        lock.flush()
        yield


def test_the_last_words_of_a_controller_on_another_machine_are_waited_for(tmp_path: Path) -> None:
    run = begun(tmp_path)
    with closing(RunPoller(run, write_delay=1000.0)) as watching:
        with attended_from("another", run):
            assert watching.poll().attendance is RunAttendance.ATTENDED
        assert watching.poll().attendance is RunAttendance.ATTENDED
        with closing(RunDirWriter(run)) as writer:
            writer.append(ENDED, 2.0)
        assert watching.poll().attendance is RunAttendance.OVER


def test_they_are_waited_for_too_where_it_had_gone_before_the_first_look(tmp_path: Path) -> None:
    run = begun(tmp_path)
    with attended_from("another", run):
        pass
    with closing(RunPoller(run, write_delay=1000.0)) as watching, closing(RunDirWriter(run)) as writer:
        assert watching.poll().attendance is RunAttendance.ATTENDED
        writer.append(ENDED, 2.0)
        assert watching.poll().attendance is RunAttendance.OVER


@pytest.mark.parametrize(
    ("host", "write_delay"),
    [
        pytest.param("another", 0.0, id="on another machine, for long"),
        pytest.param(socket.gethostname(), 1000.0, id="on this machine, where all it wrote is seen"),
    ],
)
def test_a_run_whose_controller_is_gone_is_unattended(tmp_path: Path, host: str, write_delay: float) -> None:
    run = begun(tmp_path)
    with closing(RunPoller(run, write_delay=write_delay)) as watching:
        with attended_from(host, run):
            watching.poll()
        assert watching.poll().attendance is RunAttendance.UNATTENDED


def test_a_ring_of_the_controller_ends_the_wait_and_a_look_takes_it(tmp_path: Path) -> None:
    run = begun(tmp_path)
    with closing(Controller(run)) as controller, closing(RunPoller(run)) as watching:
        controller.ring()
        assert watching.wait_for_change()
        assert watching.poll().attendance is RunAttendance.ATTENDED
        assert not watching.wait_for_change(until=0.0)


def test_another_descriptor_ends_the_wait_too(tmp_path: Path) -> None:
    run = begun(tmp_path)
    keyboard, person = os.pipe()
    os.write(person, b"d")
    assert RunPoller(run).wait_for_change(keyboard) == [keyboard]
    os.close(person)
    os.close(keyboard)


def test_a_run_whose_controller_was_replaced_is_attended_and_rings_again(tmp_path: Path) -> None:
    run = begun(tmp_path)
    with closing(Controller(run)):
        watching = RunPoller(run)
    with closing(Controller(run)) as successor, closing(watching):
        assert watching.poll().attendance is RunAttendance.ATTENDED
        successor.ring()
        assert watching.wait_for_change(until=time.monotonic())


def test_a_look_tells_which_workers_are_gone(tmp_path: Path) -> None:
    run = begun(tmp_path)
    gone = node_events.Exited(attempt=0, rank=3, exit_code=1)
    journal = run.node("gpu01") / run_files.JOURNAL_FILE
    journal.parent.mkdir(parents=True)
    journal.write_text(node_events.encode_event(node_events.Stamp(1, 2.5, 0.5, "b0"), gone) + "\n")
    assert RunPoller(run).poll().worker_exits == [("gpu01", 2.5, gone)]
