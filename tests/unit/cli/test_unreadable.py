"""A run whose files hold what no controller and no agent writes, among runs that are well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clusterctl.cli.main import cli
from clusterctl.run.record import rundir
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events

STAMP: dict[str, Any] = {"seq": 1, "wall": 1.0, "mono": 1.0, "boot": "b", "attempt": 0}
BAD_EVENTS: dict[str, bytes] = {
    "a rank that is a list": json.dumps({**STAMP, "kind": "exited", "rank": [1]}).encode(),
    "a tail that is a number": json.dumps({**STAMP, "kind": "exited", "rank": 0, "tail": 7}).encode(),
    "a moment that is text": json.dumps({**STAMP, "kind": "exited", "rank": 0, "earliest": "x"}).encode(),
    "an error that is a list": json.dumps({**STAMP, "kind": "exited", "rank": 0, "error": ["a"]}).encode(),
    "what remains is a number": json.dumps({**STAMP, "kind": "swept", "remaining": [1]}).encode(),
    "lists in lists": b"[" * 200_000,
    "no text": b"\xff\xfe\x00",
}
BAD_SAMPLES: dict[str, Any] = {
    "a time that is text": {"t": "x"},
    "ranks that are a list": {"ranks": [1]},
    "a rank that is empty": {"ranks": {"0": {"inside": [1]}}},
    "a rank that is text": {"ranks": {"x": {}}},
    "a step that is text": {"ranks": {"0": {"alive": True, "inside": {"step": "9\u001b]52;c;x\u0007"}}}},
}
COMMANDS = (
    ("ps",),
    ("ps", "-a", "--json"),
    ("status", "bad"),
    ("status", "bad", "--json"),
    ("logs", "bad"),
    ("clean",),
)


def made(root: Path, name: str) -> RunDir:
    run = rundir.create_run_dir(name, root / "clusterctl" / "runs")
    layout = [{"node": "n", "node_rank": 0, "ranks": [0]}]
    said = [
        controller_events.RunCreated(run=run.run, name=name, path=""),
        controller_events.AttemptStarted(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=layout),
    ]
    run.events.write_text("".join(controller_events.encode(n, 1.0, event) + "\n" for n, event in enumerate(said, 1)))
    run.node("n").mkdir(parents=True)
    return run


def say(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("line", BAD_EVENTS.values(), ids=list(BAD_EVENTS))
def test_a_line_that_does_not_fit_is_left_out_and_named_by_every_command_that_reads(root: Path, line: bytes) -> None:
    (made(root, "bad").node("n") / "journal.jsonl").write_bytes(line + b"\n")
    good = made(root, "good")

    for command in COMMANDS:
        done = say(*command)

        assert done.exit_code == 0
        assert good.run in done.output or command[0] != "ps"
        assert "nodes/n/journal.jsonl" in done.output or command[0] == "clean"


@pytest.mark.parametrize("sample", BAD_SAMPLES.values(), ids=list(BAD_SAMPLES))
def test_a_sample_that_does_not_fit_is_left_out(root: Path, sample: dict[str, Any]) -> None:
    whole = {"kind": "activity", "attempt": 0, "t": 1.0, "m": 1.0, "ranks": {}, **sample}
    (made(root, "bad").node("n") / "samples.jsonl").write_text(json.dumps(whole) + "\n")

    for command in COMMANDS:
        assert say(*command).exit_code == 0


def unreadable(root: Path, how: str) -> RunDir:
    run = made(root, "bad")
    run.events.unlink()
    if how == "a folder":
        run.events.mkdir()
    else:
        run.events.write_bytes(b"\xff\n[[[[\n")
    return run


@pytest.mark.parametrize("how", ["a folder", "noise"])
def test_a_run_that_cannot_be_read_is_one_row_and_no_end_of_the_list(root: Path, how: str) -> None:
    good, bad = made(root, "good"), unreadable(root, how)

    done = say("ps", "--json")
    rows = {row["run"]: row["state"] for row in json.loads(done.stdout)}

    assert rows == {good.run: "starting", bad.run: "unreadable"}
    assert "clusterctl clean" in say("ps").stdout


@pytest.mark.parametrize("how", ["a folder", "noise"])
def test_clean_removes_a_run_that_cannot_be_read(root: Path, how: str) -> None:
    good, bad = made(root, "good"), unreadable(root, how)

    assert say("clean", "--yes").exit_code == 0

    assert good.path.exists()
    assert not bad.path.exists()
