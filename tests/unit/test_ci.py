"""What `.ci/suite.py` makes of a suite in which tests fail: in a small project with a suite of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SUITE = REPOSITORY / ".ci" / "suite.py"
MAKEFILE = "test:\n\t.venv/bin/python -m pytest -q tests {options}\n"
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert False, 'as ever'\n"
FAILS_ONCE = """
import pathlib

def test_fails_once():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        assert False, "the first time"
"""
STOPS = "import pytest\ndef test_stops(): pytest.exit('of its own accord')\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE.format(options="-p no:xdist"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path / "tests")
    return tmp_path


def ci(project: Path, *files: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    for number, text in enumerate(files):
        (project / "tests" / f"test_{number}.py").write_text(text)
    argv = [sys.executable, SUITE, "--seconds", str(seconds)]
    return subprocess.run(argv, cwd=project, capture_output=True, text=True, timeout=300, check=False)


def test_a_suite_that_passes_is_run_once(project: Path) -> None:
    done = ci(project, PASSES)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "alone" not in done.stdout


def test_a_test_that_fails_once_is_run_alone_and_both_results_are_shown(project: Path) -> None:
    done = ci(project, PASSES, FAILS_ONCE)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the first time" in done.stdout
    assert done.stdout.endswith("failed at first, then alone:\n  passed  tests/test_1.py::test_fails_once\n")


def test_a_second_failure_fails(project: Path) -> None:
    (project / "Makefile").write_text(MAKEFILE.format(options="-n 2"))
    done = ci(project, FAILS_ONCE, FAILS)

    assert done.returncode == 1
    assert done.stdout.count("as ever") > 1
    assert "  passed  tests/test_0.py::test_fails_once\n" in done.stdout
    assert "  FAILED  tests/test_1.py::test_fails\n" in done.stdout


@pytest.mark.parametrize(
    ("files", "seconds", "said"),
    [
        pytest.param([PASSES, STOPS], 300.0, "did not come to its end", id="a suite that stopped"),
        pytest.param([f"from nowhere import nothing\n{PASSES}"], 300.0, "did not come to its end", id="a broken file"),
        pytest.param(
            ["".join(FAILS.replace("fails", f"fails_{i}") for i in range(11))], 300.0, "11 tests failed", id="too many"
        ),
        pytest.param([PASSES], 15.0, "takes too long", id="no time"),
    ],
)
def test_nothing_is_forgiven_but_chance(project: Path, files: list[str], seconds: float, said: str) -> None:
    done = ci(project, *files, seconds=seconds)

    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def test_a_check_that_fails_before_the_suite_is_not_forgiven(project: Path) -> None:
    ci(project, FAILS_ONCE)
    (project / "seen").unlink()
    (project / "Makefile").write_text("test:\n\tfalse\n")

    done = ci(project)

    assert done.returncode == 1
    assert "did not come to its end" in done.stderr
