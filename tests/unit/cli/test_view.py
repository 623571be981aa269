"""What `up` and `attach` show, watched from outside: a process that reads a run directory and is sent signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules import controller_events
from tests.e2e.terminal import Terminal

VIEW = """
import sys
import time
from pathlib import Path
from clusterctl.cli.follow.run_screen import RunScreen, ScreenOptions
from clusterctl.render.console import Console
from clusterctl.run.record.rundir import RunDir
screen = RunScreen(RunDir(Path(sys.argv[1])), Console.for_standard_streams(), ScreenOptions(stops_on_interrupt=True))
print("left:", screen.follow().value, file=sys.stderr)
"""
LINES = 200_000


def ended_run(root: Path, output: bytes) -> rundir.RunDir:
    run = rundir.create_run_dir("demo", root)
    writer = RunDirWriter(run)
    nodes = [{"node": "gpu01", "node_rank": 0, "address": None, "ranks": [0]}]
    writer.append(controller_events.RunCreated(run=run.run, name="demo", path=""), 1.0)
    writer.append(
        controller_events.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=nodes), 2.0
    )
    writer.append(controller_events.RunEnded(state="succeeded", exit_code=0), 3.0)
    writer.close()
    log = run.node("gpu01") / format_output_path(0, 0)
    log.parent.mkdir(parents=True)
    log.write_bytes(output)
    return run


def test_a_signal_cuts_short_what_is_still_to_be_shown_of_a_run_that_has_ended(tmp_path: Path) -> None:
    run = ended_run(tmp_path, (b"x" + b"." * 60 + b"\n") * LINES)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", VIEW, run.path], stdout=pipe, stderr=pipe, text=True) as view:
        assert view.stdout is not None
        shown = view.stdout.readline().count("x")
        view.send_signal(signal.SIGTERM)
        out, err = view.communicate(timeout=60)
    assert shown + out.count("x") < LINES / 2
    assert f"the remaining output: `clusterctl logs {run.run}`" in err
    assert "left: ended" in err
    assert view.returncode == 0


@pytest.mark.parametrize(
    ("boot", "told", "untold"),
    [
        pytest.param(
            "b0", "a new supervisor has started; the workers were not affected", "rebooted", id="the same boot"
        ),
        pytest.param("b1", "the machine has rebooted, and its workers are gone", "not affected", id="another boot"),
    ],
)
def test_a_new_supervisor_is_told_with_what_it_means_for_the_workers(
    tmp_path: Path, boot: str, told: str, untold: str
) -> None:
    run = ended_run(tmp_path, b"done\n")
    lines = [
        (node_events.Stamp(1, 2.1, 2.1, "b0"), node_events.Prepared(0)),
        (node_events.Stamp(2, 2.5, 0.5, boot), node_events.RunAdopted(0, 7)),
    ]
    (run.node("gpu01") / run_files.JOURNAL_FILE).write_text(
        "".join(node_events.encode_event(*line) + "\n" for line in lines)
    )
    done = subprocess.run([sys.executable, "-c", VIEW, run.path], capture_output=True, text=True, check=True)
    assert f"gpu01: {told}" in done.stderr
    assert untold not in done.stderr


def test_a_step_of_a_new_attempt_takes_the_place_of_the_last_line(tmp_path: Path) -> None:
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    nodes = [{"node": "gpu01", "node_rank": 0, "address": None, "ranks": [0]}]
    began = time.time()
    writer.append(controller_events.RunCreated(run=run.run, name="demo", path=""), began)
    attempt = controller_events.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=nodes)
    writer.append(attempt, began)
    with Terminal(str(run.path), folder=tmp_path, env=os.environ, program=("-c", VIEW)) as person:
        person.expect("d detach")
        writer.append(controller_events.StartStepProgress(name="prepare", total=1), began)
        person.expect("prepare")
        person.press("d")
        person.wait()
    writer.close()

    rows = [text for row in person.written.split("\n") for text in re.split(r"\x1b\[(?:[0-9]+M|K)", row)]
    assert [row for row in rows if "prepare" in row]
    assert not [row for row in rows if "prepare" in row and "detach" in row]


STEPS = """
import sys
import time
from pathlib import Path
from clusterctl.cli.follow.event_backlog import JournalPosition
from clusterctl.cli.follow.run_screen import RunScreen, ScreenOptions
from clusterctl.render.console import Console
from clusterctl.run.record.rundir import RunDir
old = JournalPosition(controller_event_count=2, last_seq_by_node={"gpu01": 1})
screen = RunScreen(RunDir(Path(sys.argv[1])), Console.for_standard_streams(), ScreenOptions(verbose=True, skip_events_until=old))
screen.follow()
"""


def test_what_came_after_a_command_began_is_told_though_its_view_opened_later(tmp_path: Path) -> None:
    run = ended_run(tmp_path, b"done\n")
    steps = [node_events.Prepared(0), node_events.Swept(0, 0, [])]
    lines = [(node_events.Stamp(seq, 2.0, 2.0, "b0"), event) for seq, event in enumerate(steps, 1)]
    (run.node("gpu01") / run_files.JOURNAL_FILE).write_text(
        "".join(node_events.encode_event(*line) + "\n" for line in lines)
    )
    done = subprocess.run([sys.executable, "-c", STEPS, run.path], capture_output=True, text=True, check=True)
    assert "gpu01: nothing is left of attempt 0" in done.stderr
    assert "ready for attempt" not in done.stderr


DECIDED = controller_events.AttemptEndDecided(attempt=0, reason="cancelled")


def with_old_events(root: Path) -> rundir.RunDir:
    run = ended_run(root, b"done\n")
    (run.events).unlink()
    writer = RunDirWriter(run)
    nodes = [{"node": "gpu01", "node_rank": 0, "address": None, "ranks": [0]}]
    for event in (
        controller_events.RunCreated(run=run.run, name="demo", path=""),
        controller_events.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=nodes),
        controller_events.Note(text="an old warning", level="warn"),
        DECIDED,
        controller_events.RunEnded(state="cancelled", exit_code=103),
    ):
        writer.append(event, 3.0)
    writer.close()
    return run


def test_a_person_who_attaches_sees_what_was_before_with_its_date(tmp_path: Path) -> None:
    run = with_old_events(tmp_path)
    view = VIEW.replace("stops_on_interrupt=True", "tail=20, shows_phases=False")

    done = subprocess.run([sys.executable, "-c", view, run.path], capture_output=True, text=True, check=True)

    said = [line for line in done.stderr.splitlines() if "left:" not in line]
    assert [re.sub(r"Jan 1 \d\d:\d\d", "Jan 1 hh:mm", line) for line in said] == [
        "── Jan 1 hh:mm:03 warn: an old warning ──",
        "── Jan 1 hh:mm:03 stopping every worker ──",
    ]
    assert done.stdout.endswith("done\n")


def test_a_command_tells_nothing_of_what_was_before_it(tmp_path: Path) -> None:
    run = with_old_events(tmp_path)
    view = STEPS.replace("controller_event_count=2", "controller_event_count=3")

    done = subprocess.run([sys.executable, "-c", view, run.path], capture_output=True, text=True, check=True)

    assert done.stderr.splitlines() == ["stopping every worker"]


def test_ranks_that_have_not_said_a_word_are_told_once_where_nobody_sees_the_last_line(tmp_path: Path) -> None:
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    nodes = [{"node": "gpu01", "node_rank": 0, "address": None, "ranks": [0]}]
    began = time.time() - 60
    writer.append(controller_events.RunCreated(run=run.run, name="demo", path=""), began)
    writer.append(
        controller_events.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=nodes),
        began,
    )
    started = node_events.Started(attempt=0, rank=0, local_rank=0, pid=7, start_time=1)
    run.node("gpu01").mkdir(parents=True)
    line = node_events.encode_event(node_events.Stamp(1, began, 1.0, "b0"), started)
    (run.node("gpu01") / run_files.JOURNAL_FILE).write_text(f"{line}\n")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", VIEW, run.path], stdout=pipe, stderr=pipe, text=True) as view:
        assert view.stderr is not None
        first = view.stderr.readline()
        writer.append(controller_events.RunEnded(state="succeeded", exit_code=0), time.time())
        writer.close()
        _, rest = view.communicate(timeout=60)

    assert first == "no output yet: 1 rank running, probably importing\n"
    assert "no output yet" not in rest
