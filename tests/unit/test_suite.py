"""The suite itself: what its programs begin with does not depend on what the suite was started by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.file_order import sort_files
from tests.ignoring import ignored

REPOSITORY = Path(__file__).resolve().parents[2]


def test_files_that_wait_are_spread_over_those_that_compute_and_begin_before_the_end() -> None:
    lab, unit = [f"tests/lab/test_{i}.py" for i in range(4)], [f"tests/unit/test_{i}.py" for i in range(10)]

    found = sort_files(["tests/e2e/test_cp.py", *lab, *unit])

    assert found[0] == "tests/e2e/test_cp.py", "it needs the network that a lab takes away"
    assert [place for place, file in enumerate(found) if file in lab] == [1, 4, 6, 8]
    assert [file for file in found if file in lab] == lab[::-1]
    assert [file for file in found if file in unit] == unit


def test_a_program_that_a_test_starts_ignores_no_signal() -> None:
    said = subprocess.run(["grep", "SigIgn", "/proc/self/status"], check=True, capture_output=True, text=True).stdout

    assert ignored(said) == set()


def test_nor_does_it_where_the_suite_was_told_to_ignore_some(tmp_path: Path) -> None:
    test = f"{Path(__file__).relative_to(REPOSITORY)}::{test_a_program_that_a_test_starts_ignores_no_signal.__name__}"
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", test]
    for workers in ([], ["-n", "1"]):
        done = subprocess.run(
            ["/bin/sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "sh", *suite, *workers],
            cwd=REPOSITORY,
            env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.returncode == 0, done.stdout
        assert "1 passed" in done.stdout
