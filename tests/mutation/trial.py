"""What a module's tests say of a mutant: a copy of the project in a folder of its own, and one pytest at a time in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from tests.lab import kernel
from tests.mutation import reached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutation.mutants import Mutant

ROOT: Final = Path(__file__).resolve().parents[2]
_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_DOUBTS: Final = 2
"""How often the tests are begun again because the one that failed passed right afterwards."""


class Verdict(str, Enum):
    """How it went for a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Trial:
    """The outcome of one trial."""

    mutant: Mutant
    verdict: Verdict
    seconds: float


class _Place:
    """The folder of this process alone, with its copy of the project."""

    folder: Path


def settle(base: str) -> None:
    """Make this process one that tries mutants, in a folder of its own below `base`."""
    # What tests leave behind must come to us when its parents end: agents, supervisors and workers are daemons.
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    # And what they mount must go with us.
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.NEWNS)
        kernel.private_mounts()
    _Place.folder = Path(tempfile.mkdtemp(dir=base))
    _copy(_Place.folder / "project")


def _copy(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def source_of(module: str) -> str:
    """Return the text of a module."""
    return (ROOT / "clusterctl" / f"{module}.py").read_text()


def baseline(place: str, modules: Sequence[str]) -> tuple[float, reached.Lines]:
    """Run the tests of a place without a mutant; return how long they take, and which of them run which line.

    Raises:
        RuntimeError: They do not pass, twice: an hour of trials is not to end with a test that a busy machine has failed.
    """
    data_file = _Place.folder / "coverage"
    project = _Place.folder / "project"
    files = ",".join(str(project / "clusterctl" / f"{module}.py") for module in modules)
    watched = ["-m", "coverage", "run", f"--data-file={data_file}", f"--include={files}"]
    for _ in range(2):
        data_file.unlink(missing_ok=True)
        code, seconds, output = _run_tests([place], 1800.0, watched, ["-p", "tests.mutation.reached"])
        if code == 0:
            break
    else:
        raise RuntimeError(f"{place} does not pass without a mutant:\n{output}")
    return seconds, reached.lines_of(data_file, project, modules)


def try_mutant(mutant: Mutant, tests: Sequence[str], limit: float) -> Trial:
    """Run tests with a mutant in the place of its module, for at most `limit` seconds."""
    if not tests:
        return Trial(mutant, Verdict.SURVIVED, 0.0)
    path = _Place.folder / "project" / "clusterctl" / f"{mutant.module}.py"
    _write(path, mutant.text)
    began = time.monotonic()
    try:
        verdict = _verdict_of(tests, limit)
    finally:
        _write(path, mutant.source)
    return Trial(mutant, verdict, time.monotonic() - began)


def _verdict_of(tests: Sequence[str], limit: float) -> Verdict:
    """Run tests; a test notices a mutant only if it fails twice, since a busy machine makes one fail once."""
    for _ in range(1 + _DOUBTS):
        code, _, _ = _run_tests(tests, limit, more=["--cache-clear"])
        if code == 0:
            return Verdict.SURVIVED
        if code is None:
            return Verdict.TIMED_OUT
        if _run_tests(tests, limit, more=["--last-failed"])[0] != 0:
            return Verdict.KILLED
    return Verdict.SURVIVED


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # A cached module is known by size and second: a mutant may have both of the one before it.
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink()


def _run_tests(
    tests: Sequence[str], limit: float, below: Sequence[str] = (), more: Sequence[str] = ()
) -> tuple[int | None, float, str]:
    place = _Place.folder
    argv = [sys.executable, *below, "-m", "pytest", "-x", "-q", "--no-header", "--tb=short"]
    argv += [
        "-o",
        f"cache_dir={place / 'pytest'}",
        "-p",
        "no:xdist",
        "--hypothesis-seed=0",
        f"--basetemp={place / 'tmp'}",
        *more,
        *tests,
    ]
    env = {**os.environ, "PYTHONPATH": str(place / "project"), "XDG_CACHE_HOME": str(place / "cache")}
    # Most of what a run of pytest costs is compiling, unless it may keep what it has compiled.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            cwd=place / "project",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
        return done.returncode, time.monotonic() - began, done.stdout
    except subprocess.TimeoutExpired:
        return None, time.monotonic() - began, ""
    finally:
        _end_what_is_left()


def _end_what_is_left() -> None:
    """Kill every process that came from ours, until none does."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
