"""A run that has ended is listed without reading all that ever happened in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import run_files
from clusterctl.errors import NotFoundError
from clusterctl.run.record import rundir, state_reader
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules import controller_events, outcome
from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import cause_to_json
from tests.work import work


def ended_run(root: Path, name: str, ranks: int = 8) -> rundir.RunDir:
    """A run on one node that has ended, as its controller leaves it."""
    run = rundir.create_run_dir(name, root)
    writer = RunDirWriter(run)
    nodes = [{"node": "n0", "node_rank": 0, "address": None, "ranks": list(range(ranks))}]
    attempt = controller_events.AttemptStarted(
        attempt=0, world_size=ranks, master_addr=None, master_port=None, nodes=nodes
    )
    writer.append(controller_events.RunCreated(run=run.run, name=name, path="/c.yaml"), 1.0)
    writer.append(attempt, 2.0)
    for rank in range(ranks):
        exited = node_events.Exited(attempt=0, rank=rank, exit_code=1, tail="out of luck\n" * 500)
        writer.append_node_event(
            "n0", json.loads(node_events.encode_event(node_events.Stamp(rank + 1, 1.0, 1.0, "b"), exited))
        )
    sample = {"kind": "activity", "attempt": 0, "ranks": {"0": {"inside": {"step": 7}}, "1": {"inside": {"step": 5}}}}
    writer.replicate("n0", run_files.SAMPLES_FILE, 0, json.dumps(sample).encode() + b"\n")
    left = [outcome.build_remaining_process("n0", None, outcome.OVERDUE)]
    writer.append(controller_events.RunEnded(state="failed", exit_code=100, remaining=left), 9.0)
    writer.close()
    return run


def test_lists_show_the_same_of_an_ended_run_whether_it_has_an_outline_or_not(tmp_path: Path) -> None:
    run = ended_run(tmp_path, "demo")
    outlined = state_reader.load_summary_or_state(run)
    whole = load_state(run)

    fields = (
        "run",
        "name",
        "path",
        "phase",
        "attempt",
        "world_size",
        "created",
        "ended",
        "exit_code",
        "is_over",
        "remaining",
    )
    for field in fields:
        assert getattr(outlined, field) == getattr(whole, field), field
    assert list(outlined.nodes) == list(whole.nodes)
    assert not outlined.workers
    run.summary.unlink()
    assert state_reader.load_summary_or_state(run) == whole


def test_the_step_that_the_slowest_rank_had_reached_is_kept(tmp_path: Path) -> None:
    assert json.loads(ended_run(tmp_path, "demo").summary.read_bytes())["step"] == 5


def test_lists_name_the_same_failure_whether_there_is_an_outline_or_not(tmp_path: Path) -> None:
    run = ended_run(tmp_path, "demo")
    outlined = find_final_cause(state_reader.load_summary_or_state(run))
    run.summary.unlink()

    assert outlined is not None
    assert cause_to_json(outlined) == cause_to_json(find_final_cause(state_reader.load_summary_or_state(run)))


def test_what_is_written_behind_the_end_counts(tmp_path: Path) -> None:
    run = ended_run(tmp_path, "demo")
    line = controller_events.encode(99, 10.0, controller_events.RunEnded(state="lost", exit_code=105))
    run.events.write_bytes(run.events.read_bytes() + line.encode() + b"\n")

    assert state_reader.load_summary_or_state(run).exit_code == 105


@pytest.mark.parametrize("content", [b"", b"[]", b'{"events": 1}', b"\xff"])
def test_an_outline_that_cannot_be_read_counts_for_nothing(tmp_path: Path, content: bytes) -> None:
    run = ended_run(tmp_path, "demo")
    run.summary.write_bytes(content)

    assert state_reader.load_summary_or_state(run).exit_code == 100


def test_a_run_that_goes_on_has_no_outline(tmp_path: Path) -> None:
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    writer.append(controller_events.RunCreated(run=run.run, name="demo", path=""), 1.0)
    writer.close()

    assert not run.summary.exists()


def test_many_ranks_of_ended_runs_do_not_slow_down_the_search_for_a_run(tmp_path: Path) -> None:
    for ranks in (1, 400):
        for number in range(3):
            ended_run(tmp_path / str(ranks), f"run{number}", ranks)

    def search(ranks: int) -> None:
        with pytest.raises(NotFoundError):
            state_reader.find_run("another", tmp_path / str(ranks))

    assert work(lambda: search(400)) < 10 * work(lambda: search(1))
