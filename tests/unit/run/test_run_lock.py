"""The lock of a run: a controller gets it unless another controller has it, whoever only asks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from clusterctl.run.record import lock_files

if TYPE_CHECKING:
    from pathlib import Path

READ = """
import sys
from pathlib import Path
from clusterctl.run.record import lock_files
print("reading", flush=True)
while True:
    lock.is_held(Path(sys.argv[1]))
"""


def test_one_that_asks_all_the_time_whether_a_run_is_held_keeps_no_controller_from_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    os.close(lock_files.take_lock(path))
    with subprocess.Popen([sys.executable, "-c", READ, path], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        try:
            for _ in range(300):
                os.close(lock_files.take_lock(path))
        finally:
            reader.kill()


def test_a_second_controller_is_refused_at_once(tmp_path: Path) -> None:
    held = lock_files.take_lock(tmp_path / "lock")
    with pytest.raises(lock_files.LockedError, match="is locked"):
        lock_files.take_lock(tmp_path / "lock")
    assert lock_files.is_locked(tmp_path / "lock")
    os.close(held)
    assert not lock_files.is_locked(tmp_path / "lock")
