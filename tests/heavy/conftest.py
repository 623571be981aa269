"""Tests with frameworks that are too large for every change: `make heavy` runs them, `make test` does not see them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.lab.conftest import head_env, lab, nodes

__all__ = ["head_env", "lab", "nodes"]

collect_ignore_glob = [] if "CLUSTERCTL_HEAVY" in os.environ else ["test_*.py"]

CACHE = Path(os.environ.get("CLUSTERCTL_HEAVY") or Path(__file__).resolve().parents[2] / ".venv-heavy")

Environment = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def made(request: pytest.FixtureRequest) -> dict[str, Path | Exception]:
    """The environments of all chosen tests, made before a lab starts: in there is no way to a package index."""
    params = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    cases = [case for param in params if (case := param.get("case"))]
    wanted = {case.environment: case.installs for case in cases if case.environment}
    found: dict[str, Path | Exception] = {}
    for name, installs in wanted.items():
        try:
            found[name] = make(name, installs)
        except subprocess.CalledProcessError as error:
            found[name] = error
    return found


@pytest.fixture
def environment(made: dict[str, Path | Exception]) -> Environment:
    """Gives a virtual environment by its name, or fails as its making did."""

    def give(name: str) -> Path:
        found = made[name]
        if isinstance(found, Exception):
            raise found
        return found

    return give


def make(name: str, installs: Sequence[Sequence[str]]) -> Path:
    """Return an environment that is kept; each list of requirements is one call of pip.

    What this interpreter has (torch, keras, scikit-learn) is seen in it, behind what is installed there.
    """
    folder = CACHE / name
    asked = repr((sys.version, installs))
    ready = folder / "ready"
    if ready.is_file() and ready.read_text() == asked:
        return folder
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for requirements in installs:
        subprocess.run([*pip, *requirements], check=True)
    ready.write_text(asked)
    return folder
