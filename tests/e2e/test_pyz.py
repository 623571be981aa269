"""The start of the `.pyz` file (.ci/pyz_main.py): once for each Python it makes an environment, later it only runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

START = Path(__file__).resolve().parents[2] / ".ci" / "pyz_main.py"
PROGRAM = "import json, sys\ndef main():\n    print(json.dumps([sys.argv[1:], sys.prefix]))\n    return 7\n"
HERE = "{}.{}-{}".format(*sys.version_info[:2], os.uname().machine)


class Archive:
    """An archive with one wheel for one Python."""

    def __init__(self, folder: Path, *, python: str = HERE, glibc: tuple[int, int] = (2, 17)) -> None:
        self.path, self.cache = folder / "clusterctl.pyz", folder / "cache"
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            wheel.writestr("clusterctl/__init__.py", "")
            wheel.writestr("clusterctl/cli/__init__.py", "")
            wheel.writestr("clusterctl/cli/main.py", PROGRAM)
        contents = {"digest": "d1", "glibc": glibc, "wheels": {python: ["x.whl"]}}
        with zipfile.ZipFile(self.path, "w") as archive:
            archive.write(START, "__main__.py")
            archive.write(folder / "x.whl", "wheels/x.whl")
            archive.writestr("contents.json", json.dumps(contents))

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "XDG_CACHE_HOME": str(self.cache)}
        words = [sys.executable, "-I", str(self.path), *arguments]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_the_first_start_makes_an_environment_and_every_start_runs_its_program(tmp_path: Path) -> None:
    archive = Archive(tmp_path)

    first = archive.start("up", "a b")
    (made,) = (archive.cache / "clusterctl/pyz").iterdir()
    age = made.stat().st_mtime_ns
    second = archive.start("ps")

    assert (first.returncode, second.returncode) == (7, 7), first.stderr
    assert json.loads(first.stdout) == [["up", "a b"], str(made)]
    assert json.loads(second.stdout) == [["ps"], str(made)]
    assert (made.name, made.stat().st_mtime_ns) == (f"d1-{HERE}", age)


def test_an_environment_whose_python_was_removed_is_made_again(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.start()
    python = archive.cache / "clusterctl/pyz" / f"d1-{HERE}" / "bin/python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")

    again = archive.start("ps")

    assert again.returncode == 7, again.stderr


@pytest.mark.parametrize(
    ("python", "glibc", "named"),
    [
        pytest.param("3.2-sparc", (2, 17), "runs with CPython 3.2-sparc", id="another-python"),
        pytest.param(HERE, (9, 99), "glibc 9.99 or later", id="a-newer-glibc"),
    ],
)
def test_a_machine_without_wheels_gets_an_error_that_names_what_fits(
    tmp_path: Path, python: str, glibc: tuple[int, int], named: str
) -> None:
    done = Archive(tmp_path, python=python, glibc=glibc).start()

    assert done.returncode == 1
    assert named in done.stderr
    assert "hint: use another Python" in done.stderr
    assert not (tmp_path / "cache").exists()
