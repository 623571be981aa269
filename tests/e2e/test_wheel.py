"""`pip install .` into an environment that has nothing of this repository: it brings the templates, and they run."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import documented

pytestmark = pytest.mark.timeout(400)

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATES = sorted(path.parent.name for path in REPOSITORY.glob("templates/*/cluster.yaml"))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment into which this repository was installed as the README says.

    What it depends on (and torch, and what builds the wheel) is found where the tests have it, but none of this
    repository: an editable installation is a `.pth` file, and those are not followed from another environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (next(venv.glob("lib/python*/site-packages")) / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "project").mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "PYTHON"))}
    env |= {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    # No package index is needed: what pip would fetch for the build is there (pip reads this "no" as "not isolated").
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "no", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = documented.typed("pip install .")
    subprocess.run([str(venv / "bin/pip"), *words], cwd=REPOSITORY, env=env | offline, check=True)

    def run(program: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(venv / "bin" / program), *arguments],
            cwd=folder / "project", env=env, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return run


def test_it_is_the_wheel_that_runs_and_it_lists_every_template_with_a_line(run: Run) -> None:
    place = run("python", "-c", "import clusterctl; print(clusterctl.__file__)").stdout
    listed = run("clusterctl", "init", "--list")

    assert str(REPOSITORY) not in place
    assert listed.returncode == 0, listed.stderr
    found = dict(line.split(maxsplit=1) for line in listed.stdout.splitlines() if not line.startswith(" "))
    assert sorted(found) == TEMPLATES
    assert all(found.values())


@pytest.mark.torch
def test_a_template_is_copied_out_of_it_and_runs(run: Run) -> None:
    if not all(map(find_spec, ("torch", "sklearn"))):
        pytest.skip("needs torch and scikit-learn")

    copied = run("clusterctl", "init", "--template", "torch_dataparallel")
    checked = run("clusterctl", "config", "-q")
    done = run("clusterctl", "up", "--no-health", "--", "--epochs", "2", "--min-accuracy", "0.5", timeout=300)

    assert copied.returncode == 0, copied.stderr
    assert checked.returncode == 0, checked.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy" in done.stdout
