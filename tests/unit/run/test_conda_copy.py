"""A conda environment of the head that cannot be copied: one clear sentence before anything is packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.environments.venv_recipe import load_venv_recipe, read_venv_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("names", "version"),
    [
        pytest.param(["python-3.11.7-h1_0_cpython.json", "python-dateutil-3.2-0.json"], "3.11", id="a Python"),
        pytest.param(["python-dateutil-3.2-0.json"], None, id="none"),
    ],
)
def test_the_python_of_a_conda_environment_is_that_of_its_packages(
    tmp_path: Path, names: list[str], version: str | None
) -> None:
    (tmp_path / "conda-meta").mkdir()
    for name in names:
        (tmp_path / "conda-meta" / name).touch()

    if version is not None:
        assert read_venv_python(str(tmp_path)) == version
    else:
        with pytest.raises(EnvironmentFailed, match=f"the conda environment {tmp_path} has no Python"):
            read_venv_python(str(tmp_path))


@pytest.mark.parametrize("platform", [Platform("aarch64", "glibc 2.36", "3.11"), Platform("x86_64", "musl", "3.11")])
def test_a_conda_environment_for_other_nodes_is_refused(tmp_path: Path, platform: Platform) -> None:
    (tmp_path / "conda-meta").mkdir()

    with pytest.raises(EnvironmentFailed, match=f"the conda environment {tmp_path} does not run on {platform}"):
        load_venv_recipe(str(tmp_path), platform).gather_parts(lambda _: None, by_nodes=False)
