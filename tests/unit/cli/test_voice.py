"""What commands say: output of many nodes folded, usage errors in the words of the program, lists that fit."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from clusterctl.cli.command_table import COMMANDS
from clusterctl.cli.commands.init import render_templates
from clusterctl.cli.follow.exit_report import FollowEndReason, print_final_report
from clusterctl.cli.main import run
from clusterctl.cli.templates import Template
from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.console import Console, Terminal
from clusterctl.render.exec_output import CommandResult, diff_stdout, fold_stdout
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunPhase, RunState

PLAIN = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=0)


@pytest.mark.parametrize("colour", [False, True])
def test_a_run_that_lost_its_controller_is_an_error_with_its_hint_right_below(tmp_path: Path, colour: bool) -> None:
    said = io.StringIO()
    terminal = Terminal(said, colour=colour, live=False, unicode=True, width=0)
    code = print_final_report(
        RunDir(tmp_path / "demo-x"), FollowEndReason.UNATTENDED, RunState(), Console(PLAIN, terminal)
    )
    error, hint = said.getvalue().splitlines()

    assert code == 101
    assert strip_colours(error) == "error: demo-x goes on without a controller"
    assert strip_colours(hint).startswith("hint: `clusterctl attach --adopt demo-x` starts a new one")
    assert (error != strip_colours(error)) is colour


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize(
    ("leave", "told"),
    [
        pytest.param(FollowEndReason.ENDED, {"state": "failed", "exit_code": 100}, id="ended"),
        pytest.param(FollowEndReason.DETACHED, {"state": "failed", "exit_code": None}, id="detached"),
        pytest.param(FollowEndReason.UNATTENDED, {"state": "failed", "exit_code": None}, id="unattended"),
    ],
)
def test_after_phases_in_json_the_end_is_one_line_of_json(
    tmp_path: Path, leave: FollowEndReason, told: dict[str, object], colour: bool
) -> None:
    said = io.StringIO()
    terminal = Terminal(said, colour=colour, live=False, unicode=True, width=0)
    state = RunState(run="demo-x", phase=RunPhase.FAILED, exit_code=100, error={"message": "no"})

    print_final_report(RunDir(tmp_path / "demo-x"), leave, state, Console(PLAIN, terminal), as_json=True, quiet=True)

    (line,) = said.getvalue().splitlines()
    record = json.loads(line)
    assert record["run"] == "demo-x"
    assert record["report"] == [strip_colours(text) for text in record["report"] if text]
    assert {key: record[key] for key in told} == told


def answers(**outputs: str) -> dict[str, CommandResult]:
    return {node: CommandResult(exit_code=0, stdout=text.encode()) for node, text in outputs.items()}


@pytest.mark.parametrize(
    ("outputs", "lines"),
    [
        pytest.param({"n1": "", "n2": ""}, [], id="silence"),
        pytest.param({"n1": "a\n", "n2": "a\n"}, ["n[1-2] (2)  a"], id="one line for all"),
        pytest.param({"n1": "a\n", "n10": "b\n"}, ["n1   a", "n10  b"], id="a line a node, aligned"),
        pytest.param(
            {"n1": "a\nb\n", "n2": "c\n"},
            ["-" * 15, "n1", "-" * 15, "a", "b", "-" * 15, "n2", "-" * 15, "c"],
            id="blocks where one is longer",
        ),
        pytest.param({"n1": "\x1b]0;x\x07\x1b[31mred\x1b[0m\n"}, ["n1  red"], id="no control sequences"),
    ],
)
def test_equal_output_is_shown_once(outputs: dict[str, str], lines: list[str]) -> None:
    assert fold_stdout(answers(**outputs), PLAIN) == lines


def test_a_difference_is_shown_against_what_most_nodes_say() -> None:
    lines = diff_stdout(answers(n1="a\nx\n", n2="a\ny\n", n3="a\nx\n"), PLAIN)
    assert lines[3:] == ["a", "x", "--- n[1,3]", "+++ n2", "@@ -1,2 +1,2 @@", " a", "-x", "+y"]


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["stat"], "error: No such command `stat`. Did you mean `stat", "clusterctl --help"),
        (["up", "--dryrun"], "error: No such option `--dryrun`. Did you mean `--dry-run`?", "clusterctl up --help"),
        (["exec"], "error: no command: write it after `--`", "clusterctl exec --help"),
    ],
    ids=["command", "option", "our own"],
)
def test_a_mistake_on_the_command_line_is_an_error_and_a_hint(
    words: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith(said)
    assert remedy == f"hint: see `{hint}`"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("run", "up"),
        ("start", "up"),
        ("submit", "up"),
        ("sbatch", "up"),
        ("stop", "down"),
        ("kill", "down"),
        ("cancel", "down"),
        ("scancel", "down"),
        ("Stop", "down"),
        ("list", "ps"),
        ("ls", "ps"),
        ("lsit", "ps"),
        ("squeue", "ps"),
        ("ssh", "shell"),
        ("tail", "logs"),
        ("log", "logs"),
        ("info", "status"),
        ("show", "status"),
        ("describe", "status"),
        ("inspect", "status"),
        ("rm", "clean"),
        ("prune", "clean"),
        ("forward", "port-forward"),
        ("probe", "health"),
        ("nvidia-smi", "stats"),
        ("monitor", "top"),
        ("scp", "cp"),
        ("validate", "config"),
        ("debug", "why"),
        ("stat", "stats"),
        ("heatlh", "health"),
        ("cluster.yaml", "up cluster.yaml"),
        ("train.py", "up --script train.py"),
    ],
)
def test_the_word_of_another_program_leads_to_ours(
    word: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cluster.yaml", "train.py"):
        (tmp_path / name).touch()

    assert run([word]) == 2
    assert capsys.readouterr().err.startswith(f"error: No such command `{word}`. Did you mean `{meant}`?\n")


def test_a_word_that_is_like_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["qwxyz"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_no_word_of_another_program_leads_to_two_of_our_commands_or_is_one() -> None:
    words = [word for info in COMMANDS.values() for word in info.synonyms.split()]
    assert len(set(words)) == len(words)
    assert not set(words) & set(COMMANDS)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        pytest.param(["up", "clutser.yaml"], "did you mean `cluster.yaml`?", id="up"),
        pytest.param(["config", "--file", "cluster.yml"], "did you mean `cluster.yaml`?", id="--file"),
        pytest.param(["config", "sub/clster.yaml"], "did you mean `sub/cluster.yaml`?", id="in a folder"),
        pytest.param(["logs", "clutser.yaml"], "did you mean `cluster.yaml`?", id="logs"),
        pytest.param(["stats", "clutser.yaml"], "did you mean `cluster.yaml`?", id="stats"),
        pytest.param(["down", "--orphans", "clutser.yaml"], "did you mean `cluster.yaml`?", id="orphans"),
        pytest.param(["health", "--replay", "record.jsn"], "did you mean `record.json`?", id="replay"),
        pytest.param(["why", "--bundle", "record.jsn"], "did you mean `record.json`?", id="bundle"),
        pytest.param(["init", "--from", "record.jsn", "x.yaml"], "did you mean `record.json`?", id="init"),
        pytest.param(["up", "--script", "trian.py"], "did you mean `train.py`?", id="script"),
        pytest.param(
            ["up", "train.py"], "`clusterctl up --script train.py` runs the script on", id="a script for a file"
        ),
        pytest.param(["health", "--only", "gpu.cuont"], "did you mean `gpu.count`?", id="check"),
        pytest.param(["port-forward", "80", "--node", "gpu1"], "did you mean `gpu01`?", id="node"),
    ],
)
def test_a_mistyped_file_or_name_gets_a_suggestion(
    words: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    for name in ("cluster.yaml", "sub/cluster.yaml"):
        (tmp_path / name).write_text("version: 1\nhosts: gpu[01-02]\njob: {script: train.py}\n")
    for name in ("record.json", "train.py"):
        (tmp_path / name).touch()

    assert run(words) in (2, 3, 102)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        pytest.param(["up", "--epochs", "3"], "`clusterctl up -- --epochs`", id="an option"),
        pytest.param(["up", "--lr=0.1"], "`clusterctl up -- --lr`", id="an option with its value"),
        pytest.param(["up", "cluster.yaml", "sched", "b"], "`clusterctl up -- sched`", id="words"),
        pytest.param(["exec", "cluster.yaml", "x"], "`clusterctl exec -- x`", id="another command"),
    ],
)
def test_arguments_of_the_job_without_dashes_are_told_where_they_belong(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"hint: arguments of the job come after `--`, as in {hint}"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["ps", "x"], id="a command without a job"),
        pytest.param(["up", "--detac"], id="nearly an option"),
        pytest.param(["up", "--nonsense", "--", "x"], id="dashes stand there"),
    ],
)
def test_other_mistakes_say_nothing_of_the_job(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert "come after" not in capsys.readouterr().err


@pytest.mark.parametrize(("width", "lines"), [(None, 1), (40, 3)], ids=["pipe", "narrow terminal"])
def test_a_list_is_wrapped_on_a_terminal_and_never_in_a_pipe(width: int | None, lines: int) -> None:
    found = render_templates([Template(name="some", path=Path(), summary="word " * 15)], width)
    assert len(found) == lines
    assert width is None or all(len(line) < width for line in found)
