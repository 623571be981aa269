"""The locks are made of what pyproject.toml declares, and a check says where they are not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / ".ci" / "lock.py"), "--check"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_locks_are_those_of_pyproject() -> None:
    assert check(REPOSITORY).returncode == 0


def test_a_lock_that_is_stale_is_named_with_the_remedy(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    text = (REPOSITORY / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"click>=', '"one-more",\n    "click>='))
    done = check(tmp_path)
    assert done.returncode == 1
    assert "head.lock, dev.lock" in done.stdout
    assert "make lock" in done.stdout


def test_everything_that_is_locked_has_hashes() -> None:
    for name in ("head.lock", "dev.lock"):
        text = (REPOSITORY / "requirements" / name).read_text()
        blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
        assert len(blocks) > 10
        assert all("--hash=sha256:" in block for block in blocks)
