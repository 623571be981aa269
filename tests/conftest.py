"""The suite as a whole: how it begins, whatever it was started by, and what its summary says."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

from tests.file_order import sort_files
from tests.lab import kernel

if TYPE_CHECKING:
    import pytest

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Python itself ignores these, and `subprocess` gives them back.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def pytest_configure(config: pytest.Config) -> None:
    """Make the suite independent of what it was started by, and of who else has been on this machine."""
    # Controllers raise where a thread changes what is not its own (`run.record.thread_ownership`).
    os.environ["CLUSTERCTL_DEBUG"] = "1"
    # Thousands of programs would each compile all of their modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _hand_on_no_ignored_signal(config)
    _avoid_a_foreign_folder()
    _keep_mounts_to_itself(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Play the files in an order that leaves no core idle."""
    files = {item: item.nodeid.partition("::")[0] for item in items}
    places = {file: place for place, file in enumerate(sort_files(list(dict.fromkeys(files.values()))))}
    items.sort(key=lambda item: places[files[item]])


def _keep_mounts_to_itself(config: pytest.Config) -> None:
    """Hide what the tests of this process mount from those of the others, whose health checks ask every mount.

    Some tests mount a file system that never answers. Where nobody may have mounts of his own, none mounts any.
    """
    if hasattr(config, "workerinput"):
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.NEWNS)
            kernel.private_mounts()


def _hand_on_no_ignored_signal(config: pytest.Config) -> None:
    """Let every program that a test starts begin with the signals of a terminal.

    Under `nohup` SIGHUP is ignored here, in the background of a script SIGINT is, and what is ignored is inherited. A
    handler is not: one that does nothing keeps this process as deaf as it was asked to be, and nobody else.
    """
    starts_workers_only = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if starts_workers_only:
        return
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _avoid_a_foreign_folder() -> None:
    """Have `tmp_path` elsewhere where somebody else owns the folder that pytest would take: it refuses to."""
    try:
        place = Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}")
    except (KeyError, OSError):
        return  # a user without a name gets a folder that pytest chooses otherwise
    if os.path.lexists(place) and place.lstat().st_uid != os.getuid():
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="clusterctl-test-")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave word of how the suite ended, for `.ci/suite.py`: make says only that it did not end well."""
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("clusterctl/exit_status", int(exitstatus))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran on lab nodes: a run without a lab must not look like one with it."""
    kinds = {kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "skipped")}
    counts = {
        kind: sum(report.nodeid.startswith("tests/lab/") and report.when != "teardown" for report in reports)
        for kind, reports in kinds.items()
    }
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none ran"
    terminalreporter.write_line(f"lab tests: {said}")
