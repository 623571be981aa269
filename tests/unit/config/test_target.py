"""What a job runs is looked at before anything starts: by its kind, its place, and how many worlds it would make."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.loader import ClusterFileText, LoadedClusterFile, parse_cluster_file
from clusterctl.config.spec import JobSpec
from clusterctl.errors import ConfigError
from clusterctl.plan.launch import build_job_argv
from tests.unit.config.conftest import FOLDER, Shelf

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = b"import sys\nprint(sys.argv)\n"
NOTEBOOK = b'{"cells": [], "metadata": {}, "nbformat": 4}'


def load(job: str, files: dict[str, bytes], hosts: str = "{a: 1, b: 1}", more: str = "") -> LoadedClusterFile:
    """A cluster file beside some files."""
    text = f"version: 1\nhosts: {hosts}\njob: {job}\n{more}"
    source = ClusterFileText(path="c.yaml", absolute_path=f"{FOLDER}/c.yaml", content=text)
    shelf = Shelf({f"{FOLDER}/{name}": data for name, data in files.items()} | {f"{FOLDER}/src/x.py": b""})
    return parse_cluster_file([source], environ={"HOME": "/home/me"}, files=shelf)


def job_of(loaded: LoadedClusterFile) -> JobSpec:
    assert loaded.spec.job is not None
    return loaded.spec.job


@pytest.mark.parametrize(
    ("name", "data", "what", "remedy"),
    [
        pytest.param("run.sh", b"#!/bin/bash\ntrain\n", "is run by `bash`", "`command: ./run.sh`", id="shell_shebang"),
        pytest.param("go", b"#!/usr/bin/env -S perl -w\n1;\n", "is run by `perl`", "`command: ./go`", id="perl"),
        pytest.param("run.sh", b"python train.py\n", "is a shell script", "`command: bash run.sh`", id="sh_no_shebang"),
        pytest.param(
            "run", b"cd /data\nexec ./go\n", "is not Python", "`command: bash run`", id="shell_without_any_sign"
        ),
        pytest.param("n.ipynb", NOTEBOOK, "is a notebook", "nbconvert", id="notebook"),
        pytest.param("n", NOTEBOOK, "is a notebook", "nbconvert", id="notebook_by_content"),
        pytest.param("a.json", b'{"lr": 1}', "is a data file", "`args: [a.json]`", id="json"),
        pytest.param("a.yaml", b"lr: rate\n", "is a data file", "`args: [a.yaml]`", id="yaml"),
        pytest.param("t.toml", b"[job]\n", "is a data file", "`args: [t.toml]`", id="toml"),
        pytest.param("train", b"\x7fELF\x02\0\0", "is a binary file", "`command: ./train`", id="binary"),
    ],
)
def test_a_script_that_is_no_python_is_refused_with_the_key_that_runs_it(
    name: str, data: bytes, what: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(f"{{script: {name}}}", {name: data})
    assert what in error.value.problems[0].text
    assert remedy in (error.value.problems[0].hint or "")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param("train.py", PYTHON, id="plain"),
        pytest.param("train", PYTHON, id="no_suffix"),
        pytest.param("train", b"#!/usr/bin/env python3.12\n" + PYTHON, id="shebang"),
        pytest.param("train.py", b"#!/usr/bin/env -S uv run --script\n" + PYTHON, id="shebang_of_uv"),
        pytest.param("train.py", b"", id="empty"),
        pytest.param("train.py", b'"""What it does."""\n', id="docstring"),
        pytest.param("train.py", PYTHON.replace(b"\n", b"\r\n"), id="windows_lines"),
        pytest.param("app.pyz", b"#!/usr/bin/env python3\nPK\3\4\0", id="archive"),
        pytest.param("train.py", "# -*- coding: latin-1 -*-\ns = 'ä'\n".encode("latin-1"), id="other_encoding"),
    ],
)
def test_python_by_any_sign_is_taken_without_a_word(name: str, data: bytes) -> None:
    loaded = load(f"{{script: {name}}}", {name: data})
    assert (job_of(loaded).script, loaded.warnings) == (name, ())


def test_python_that_this_one_cannot_read_is_doubted_and_taken() -> None:
    (warning,) = load("{script: t.py}", {"t.py": b"x = 1\nprint 'a'\n"}).warnings
    assert "syntax error in `t.py`: line 2" in warning.text


@pytest.mark.parametrize(
    ("script", "path"),
    [
        pytest.param(f"{FOLDER}/bin/train.py", "bin/train.py", id="absolute"),
        pytest.param("../llm/bin/train.py", "bin/train.py", id="up_and_down"),
        pytest.param("./bin//train.py", "bin/train.py", id="crooked"),
        pytest.param("~/llm/bin/train.py", "bin/train.py", id="home"),
        pytest.param("/home/me/link/bin/train.py", "bin/train.py", id="through_a_link"),
        pytest.param("/opt/train.py", "/opt/train.py", id="a_place_of_the_nodes"),
    ],
)
def test_a_script_inside_what_is_synced_is_named_relative_to_it(script: str, path: str) -> None:
    shelf = Shelf({f"{FOLDER}/bin/train.py": PYTHON, "/home/me/link/bin/train.py": PYTHON})
    text = f"version: 1\nhosts: a\njob: {{script: {script}}}\n"
    loaded = parse_cluster_file(
        [ClusterFileText(path="c.yaml", absolute_path=f"{FOLDER}/c.yaml", content=text)],
        environ={"HOME": "/home/me"},
        files=shelf,
    )
    assert job_of(loaded).script == path


def test_a_script_below_a_home_that_is_not_synced_is_refused() -> None:
    with pytest.raises(ConfigError, match="`~` in `~/other/t.py`"):
        load("{script: ~/other/t.py}", {})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param("torchrun --nproc-per-node 2 t.py", "`torchrun` without `--nnodes`", id="torchrun"),
        pytest.param("cd x && exec torchrun t.py | tee log", "`torchrun` without", id="in_a_line"),
        pytest.param("[torchrun, t.py]", "`torchrun` without", id="list"),
        pytest.param("torchrun --nnodes=1 t.py", "`torchrun` for one node", id="one_node"),
        pytest.param("torchrun --standalone t.py", "`torchrun` for one node", id="standalone"),
        pytest.param("python3 -m torch.distributed.run t.py", "`python -m torch.distributed.run`", id="module"),
        pytest.param("python -m torch.distributed.launch t.py", "torch.distributed.launch`", id="old_module"),
        pytest.param("accelerate launch t.py", "`accelerate launch` without `--num_machines`", id="accelerate"),
        pytest.param("deepspeed --num_gpus 2 t.py", "`deepspeed` without `--hostfile`", id="deepspeed"),
        pytest.param("mpirun -np 2 python t.py", "`mpirun` without", id="mpirun"),
        pytest.param("./run.sh", "`torchrun` without", id="in_a_script"),
    ],
)
def test_a_launcher_that_knows_of_one_node_is_warned_of_on_several(command: str, words: str) -> None:
    (warning,) = load(f"{{command: {command}}}", {"run.sh": b"#!/bin/sh\ntorchrun \\\n  t.py\n"}).warnings
    assert words in warning.text
    assert "each of the 2 hosts" in warning.text


@pytest.mark.parametrize(
    ("command", "hosts"),
    [
        pytest.param("torchrun --nnodes $GROUP_WORLD_SIZE --node-rank $NODE_RANK t.py", "{a: 1, b: 1}", id="nnodes"),
        pytest.param("torchrun --nproc-per-node 2 t.py", "{a: {workers: 1}}", id="one_host"),
        pytest.param("accelerate launch --num_machines 2 t.py", "{a: 1, b: 1}", id="machines"),
        pytest.param("pip install deepspeed && python t.py", "{a: 1, b: 1}", id="only_installed"),
        pytest.param("python t.py --deepspeed ds.json", "{a: 1, b: 1}", id="an_argument"),
    ],
)
def test_a_launcher_that_knows_of_all_nodes_is_none_to_warn_of(command: str, hosts: str) -> None:
    assert load(f"{{command: {command}}}", {}, hosts).warnings == ()


@pytest.mark.parametrize(
    ("command", "data"),
    [
        pytest.param("./run.sh", b"#!/bin/bash\r\npython t.py\r\n", id="executed"),
        pytest.param("bash run.sh", b"python t.py\r\n", id="given_to_bash"),
        pytest.param("./run.sh", b"#!/usr/bin/env python3\r\nprint()\r\n", id="python_with_a_shebang"),
    ],
)
def test_a_script_of_a_command_with_line_ends_of_windows_is_refused(command: str, data: bytes) -> None:
    with pytest.raises(ConfigError, match="`(./)?run.sh` has Windows line ends"):
        load(f"{{command: {command}}}", {"run.sh": data})


def test_a_command_with_line_ends_of_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match="Windows line ends"):
        load('{command: "a\\r\\nb"}', {})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("false | tee out", id="pipe"),
        pytest.param("false; echo done", id="later_command"),
        pytest.param("no-such-program\necho done", id="not_found"),
        pytest.param("cd /nowhere\necho done", id="no_folder"),
    ],
)
def test_a_command_that_fails_inside_a_text_ends_the_worker(text: str, tmp_path: Path) -> None:
    assert subprocess.run(
        build_job_argv(JobSpec(command=text)), cwd=tmp_path, capture_output=True, check=False
    ).returncode
