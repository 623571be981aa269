"""Commands that are typed again and again import nothing that only other commands need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, dump_spec
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules.controller_events import RunCreated

HEAVY = ("pydantic", "pydantic_core", "psutil", "importlib.metadata", "asyncio")
CLUSTER = """\
version: 1
hosts:
- {host: localhost, transport: local, python: %s}
job: {script: train.py, args: [--epochs, 3]}
stall: {timeout: 10m}
"""
PROGRAM = """\
import json, sys
from clusterctl.cli.main import run
code = run(json.loads(sys.argv[1]))
print(code, [name for name in json.loads(sys.argv[2]) if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cluster.yaml").write_text(CLUSTER % sys.executable)
    return tmp_path


def told(folder: Path, *arguments: str, heavy: tuple[str, ...] = HEAVY, **env: str) -> str:
    """Return the exit code of a command, and which heavy modules it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments), json.dumps(heavy)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **env},
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("--help",), ("exec", "--help"), ("ps", "-a")])
def test_a_command_that_reads_no_cluster_file_imports_nothing_that_validates_one(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    assert told(folder, *arguments) == "0 []"


def test_help_of_the_program_imports_none_of_its_commands(folder: Path) -> None:
    heavy = (*HEAVY, "clusterctl.cli.options", "clusterctl.config.spec", "clusterctl.run.record.rundir")
    assert told(folder, "--help", heavy=heavy) == "0 []"


@pytest.mark.parametrize("command", ["status", "ps"])
def test_a_command_that_reads_a_run_imports_nothing_of_cluster_files(folder: Path, command: str) -> None:
    runs = folder / "state" / "clusterctl" / "runs"
    runs.mkdir(parents=True)
    writer = RunDirWriter(rundir.create_run_dir("demo", runs))
    writer.append(RunCreated(run="demo", name="demo", path=str(folder / "cluster.yaml")), 1.0)
    writer.close()
    spec = ClusterSpec(name="demo", path="", hosts=(HostSpec(name="a", host="a"),), job=JobSpec(script="train.py"))
    writer.run.spec.write_text(dump_spec(spec))
    assert told(folder, command, heavy=(*HEAVY, "yaml", "clusterctl.config.loader", "paramiko")) == "0 []"
