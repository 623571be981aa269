"""A prologue that activates one environment beside a `python:` that names another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

TEXT = """\
version: 1
hosts: [{host: a}, {host: b}]
defaults: {python: PYTHON}
job:
  script: train.py
  prologue: |
    PROLOGUE
"""


@pytest.mark.parametrize(
    ("python", "prologue", "command"),
    [
        pytest.param("/e/A/bin/python", "source /e/B/bin/activate", "source /e/B/bin/activate", id="source"),
        pytest.param("/e/A/bin/python", "set -u; . ~/B/bin/activate", ". ~/B/bin/activate", id="dot"),
        pytest.param(
            "/e/A/bin/python", "source ~/conda/bin/activate B", "source ~/conda/bin/activate B", id="old conda"
        ),
        pytest.param(
            "/c/envs/A/bin/python",
            'eval "$(conda shell.bash hook)" && conda activate B',
            "conda activate B",
            id="conda",
        ),
        pytest.param(
            "/c/envs/A/bin/python", "if true; then micromamba activate B; fi", "micromamba activate B", id="micromamba"
        ),
        pytest.param(
            "/e/A/bin/python", "conda activate A\n    conda activate B", "conda activate B", id="the last one"
        ),
        pytest.param("/c/envs/A/bin/python", "conda activate", "conda activate", id="base"),
        pytest.param(
            ".venv/bin/python", "module load cuda/12.4 python/3.11", "module load cuda/12.4 python/3.11", id="module"
        ),
        pytest.param("/e/A/bin/python", "module add pytorch/2.6", "module add pytorch/2.6", id="module of torch"),
        pytest.param(".venv/bin/python", "ml Miniconda3/23.5", "ml Miniconda3/23.5", id="ml"),
        pytest.param(
            "/e/A/bin/python", "PATH=/opt/default/bin:$PATH", "PATH=/opt/default/bin:$PATH", id="path without export"
        ),
        pytest.param("/e/A/bin/python", "export PATH=/e/B/bin:$PATH", "PATH=/e/B/bin:$PATH", id="path"),
    ],
)
def test_a_prologue_that_activates_another_environment_than_python_is_warned_of(
    python: str, prologue: str, command: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    (warning,) = parse_text(TEXT.replace("PYTHON", python).replace("PROLOGUE", prologue)).warnings
    assert warning.line == 3
    assert (
        warning.text
        == f"defaults.python: the job runs with `{python}`, not with the Python of `{command}` in the prologue"
    )
    assert "remove `defaults.python`" in (warning.hint or "")


@pytest.mark.parametrize(
    ("python", "prologue"),
    [
        pytest.param("/e/A/bin/python", "source /e/A/bin/activate", id="the same"),
        pytest.param(".venv/bin/python", "source .venv/bin/activate", id="the same, relative"),
        pytest.param("~/A/bin/python3", "source $HOME/A/bin/activate", id="the same, at home"),
        pytest.param("~/c/envs/A/bin/python", "conda activate A", id="the same, of conda"),
        pytest.param("~/miniforge3/bin/python", "conda activate base", id="base of conda"),
        pytest.param("/e/A/bin/python", "module load cuda/12.4 nccl openmpi", id="modules"),
        pytest.param("/e/A/bin/python", "export PATH=/usr/local/cuda/bin:$PATH LD_LIBRARY_PATH=/x", id="tools"),
        pytest.param("/e/A/bin/python", "export PATH=$PATH:/opt/x/bin", id="last on path"),
        pytest.param("/e/A/bin/python", "export PATH=/opt/amazon/openmpi/bin:$PATH", id="openmpi"),
        pytest.param("/e/A/bin/python", "export PYTHONPATH=/e/B/bin; source setup.sh", id="no activation"),
        pytest.param("python3", "source /e/B/bin/activate", id="a name, which PATH decides"),
    ],
)
def test_a_prologue_that_leaves_the_python_of_the_file_is_not_warned_of(
    python: str, prologue: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    assert parse_text(TEXT.replace("PYTHON", python).replace("PROLOGUE", prologue)).warnings == ()


def test_the_python_of_a_host_is_named_by_its_place(parse_text: Callable[..., LoadedClusterFile]) -> None:
    text = "version: 1\nhosts: [{host: a}, {host: b, python: /e/A/bin/python}]\n"
    job = "job: {module: m, prologue: conda activate B}\n"
    (warning,) = parse_text(text + job).warnings
    assert (warning.line, warning.text.partition(":")[0]) == (2, "hosts[1].python")


def test_a_command_runs_what_the_prologue_puts_first(parse_text: Callable[..., LoadedClusterFile]) -> None:
    text = "version: 1\nhosts: a\ndefaults: {python: /e/A/bin/python}\n"
    assert parse_text(text + "job: {command: python x.py, prologue: conda activate B}\n").warnings == ()


@pytest.mark.parametrize(
    ("environ", "hosts", "warns"),
    [
        pytest.param({"VIRTUAL_ENV": "/e/A"}, "a", True, id="another virtualenv"),
        pytest.param({"CONDA_PREFIX": "/c/envs/A", "CONDA_DEFAULT_ENV": "A"}, "a", True, id="a conda environment"),
        pytest.param({"CONDA_PREFIX": "/c", "CONDA_DEFAULT_ENV": "base"}, "a", False, id="base of conda"),
        pytest.param({"VIRTUAL_ENV": sys.prefix}, "a", False, id="the one of clusterctl"),
        pytest.param({"VIRTUAL_ENV": "/e/A"}, "{a: {python: /e/A/bin/python}}", False, id="python is set"),
        pytest.param({}, "a", False, id="none"),
    ],
)
def test_an_active_environment_that_does_not_run_the_ranks_is_named(
    parse_text: Callable[..., LoadedClusterFile], environ: dict[str, str], hosts: str, warns: bool
) -> None:
    loaded = parse_text(f"version: 1\nhosts: {hosts}\njob: {{module: torch.utils.collect_env}}\n", environ=environ)

    assert any("the active environment" in str(problem) for problem in loaded.warnings) is warns
