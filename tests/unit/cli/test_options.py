"""Options that would change nothing beside others are mistakes, and so are files that cannot be written."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click
import pytest

from clusterctl.cli.command_table import COMMANDS
from clusterctl.cli.main import cli, run

if TYPE_CHECKING:
    from pathlib import Path

FILE = "version: 1\nhosts: [{host: localhost, transport: local, gpus: 0}]\njob: {command: 'true'}\n"
HOSTFILE = "gpu01 slots=8\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cluster file, and a head without runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "cluster.yaml").write_text(FILE)
    (folder / "inventory").write_text("[train]\ngpu01\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "up --dry-run -d",
        "up --dry-run --all-ranks",
        "up --dry-run --timings",
        "up --dry-run --progress plain",
        "up --dry-run --no-health",
        "up --dry-run -v",
        "up -d --all-ranks",
        "up -d -t",
        "up --no-health --strict",
        "up --quiet --progress json",
        "up -q -v",
        "up -v -q",
        "up --json",
        "down --all RUN",
        "down --all --stalled",
        "down --orphans --kill",
        "down --orphans --stalled",
        "down --orphans --all",
        "down --orphans -v",
        "ps -q --json",
        "status -q --json",
        "status -v --json",
        "logs --format raw -t",
        "logs --format raw --no-prefix",
        "logs --format json -t",
        "logs --format json --no-prefix",
        "logs --all-ranks --rank 1",
        "attach --all-ranks --rank 1",
        "health --format prometheus --json",
        "health --format table --json",
        "health --format json -v",
        "health --json -v",
        "health --list --nodes localhost",
        "health --list cluster.yaml",
        "health --list --strict",
        "health --list --record x",
        "health --list --format json",
        "health --replay x --watch 1s",
        "health --replay x --record y",
        "health --record x --watch 1s",
        "why --redact",
        "why --bundle B --save F",
        "why --bundle B --redact",
        "why --bundle B RUN",
        "diff A B -q --json",
        "stats -v --json",
        "exec --json -v -- true",
        "exec --json --diff -- true",
        "exec -w a --set name=b -- true",
        "exec -w a --in-job -- true",
        "shell -w a --file cluster.yaml",
        "shell --rank 0 --set name=b",
        "shell --run RUN",
        "port-forward 80 -w a --set name=b",
        "port-forward 80 --rank 0 --node b",
        "cp a b",
        "sync --to x",
        "sync --max-size 1GiB",
        "sync --pull x --dry-run",
        "config --ranks --origin",
        "config -q --ranks",
        "config -q --env 0",
        "config -q --json",
        "export slurm --image X",
        "init --list -q --json",
        "doctor --set name=b",
        "config -o x",
        "config --schema --ranks",
        "config --schema cluster.yaml",
        "init --json",
        "init --list --force",
        "init --template keras_ddp --schema",
        "init --gpus 8 x.yaml",
        "clean RUN --keep 1",
        "stats --watch 0",
        "stats --watch 0s",
        "health --watch 0",
        "top --interval 0",
    ],
)
def test_options_of_which_one_would_be_ignored_are_a_mistake(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split(line)) == 2

    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_ends_with_its_examples(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    text = command.get_help(click.Context(command, info_name=name))

    assert text.endswith("".join(f"\n  {line}" for line in COMMANDS[name].examples))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        pytest.param("config --schema -o no/folder/x", 6, id="schema"),
        pytest.param("health --record no/folder/x", 6, id="health-record"),
        pytest.param("init a no/folder/x.yaml --script t.py", 6, id="init"),
        pytest.param("init a no/folder/x.yaml --schema --script t.py", 6, id="init-schema"),
        pytest.param("init --template keras_ddp cluster.yaml/x", 6, id="init-template"),
        pytest.param("cp localhost:cluster.yaml cluster.yaml/x", 6, id="cp-from-a-node"),
        pytest.param("sync --pull cluster.yaml --to cluster.yaml/x", 6, id="sync-pull"),
        pytest.param("cp no/folder/x localhost:x", 102, id="cp-to-a-node"),
        pytest.param("why --bundle no/folder/x", 102, id="why-bundle"),
        pytest.param("health --replay no/folder/x", 102, id="health-replay"),
        pytest.param("init --from no/folder/x x.yaml", 102, id="init-from"),
        pytest.param("config no/folder/x.yaml", 3, id="config"),
        pytest.param("config --file no/folder/x.yaml", 3, id="config-file"),
        pytest.param("up no/folder/x.yaml", 3, id="up"),
        pytest.param("stats no/folder/x.yaml", 102, id="stats"),
        pytest.param("down --orphans no/folder/x.yaml", 3, id="orphans"),
    ],
)
def test_a_file_whose_folder_is_missing_is_named(line: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split(line)) == code

    error = next(text for text in capsys.readouterr().err.splitlines() if "error: " in text)
    assert "bug" not in error
