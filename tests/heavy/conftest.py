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

MakeEnvironment = Callable[..., Path]


@pytest.fixture(scope="session")
def environment() -> MakeEnvironment:
    """Makes virtual environments that are kept: `environment(name, [requirements], ...)` returns one.

    What this interpreter has (torch, keras, scikit-learn) is seen in them, behind what is installed there. Each list of
    requirements is one call of pip.
    """

    def make(name: str, *installs: Sequence[str]) -> Path:
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

    return make
