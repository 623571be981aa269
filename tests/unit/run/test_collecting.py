"""Which files of a folder are synced, also while it changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.spec import SyncSpec
from clusterctl.errors import RefusedError
from clusterctl.run.nodes import code

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERYTHING = ["a.py", "pkg/b.py", "prod.env", "secrets.py"]


def write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def collected(root: Path, content: Path, *exclude: str) -> list[str]:
    sync = SyncSpec(source=str(root), exclude=exclude)
    return sorted(code.collect(sync, code.ContentStore(content)).files)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def content(tmp_path: Path) -> Path:
    return tmp_path / "content"


@pytest.mark.parametrize(
    ("ignores", "exclude", "missing"),
    [
        pytest.param({}, [], [], id="nothing is excluded"),
        pytest.param({".gitignore": "*.env\n"}, [], ["prod.env"], id="git ignores it"),
        pytest.param({".gitignore": "*.env\n!prod.env\n"}, ["prod.env"], ["prod.env"], id="git lets it in again"),
        pytest.param(
            {".gitignore": "*\n!*.py\n!pkg/\n"}, ["secrets.py"], ["prod.env", "secrets.py"], id="git has a list of some"
        ),
        pytest.param({"pkg/.gitignore": "!b.py\n"}, ["pkg/b.py"], ["pkg/b.py"], id="git lets it in further down"),
        pytest.param({".gitignore": "*.env\n"}, ["!prod.env"], [], id="the cluster file lets it in again"),
    ],
)
def test_what_the_cluster_file_excludes_has_the_last_word(
    source: Path, content: Path, ignores: dict[str, str], exclude: list[str], missing: list[str]
) -> None:
    write(source, *EVERYTHING)
    for path, text in ignores.items():
        (source / path).write_text(text)

    found = collected(source, content, *exclude)

    assert [path for path in EVERYTHING if path not in found] == missing


TREE = [
    "a.py",
    "a.txt",
    "build/x.o",
    "data/keep.csv",
    "data/raw/big.csv",
    "pkg/__init__.py",
    "pkg/build/y.o",
    "pkg/m.py",
    "pkg/m.txt",
]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    "ignores",
    [
        pytest.param({".gitignore": "*.txt\nbuild/\n"}, id="files and folders anywhere"),
        pytest.param({".gitignore": "/build/\n/*.txt\n"}, id="at the top"),
        pytest.param({".gitignore": "*\n!*/\n!*.py\n"}, id="a list of what is let in, from every folder"),
        pytest.param({".gitignore": "*\n!pkg/\n!*.py\n"}, id="a list of what is let in, from one folder"),
        pytest.param({".gitignore": "*\n!*.py\n!.gitignore\n"}, id="a list of what is let in, at the top"),
        pytest.param({".gitignore": "data/*\n!data/keep.csv\n"}, id="one file of a folder"),
        pytest.param({".gitignore": "data/\n!data/keep.csv\n"}, id="nothing comes back from an ignored folder"),
        pytest.param({".gitignore": "data/**\n!data/**/\n!*.csv\n"}, id="two asterisks"),
        pytest.param({".gitignore": "*.py\n", "pkg/.gitignore": "!m.py\n"}, id="a folder of its own mind"),
        pytest.param({".gitignore": "build/\n!pkg/\n"}, id="a folder let in does not let in what it holds"),
        pytest.param({".gitignore": "pkg\n", "pkg/.gitignore": "!m.py\n"}, id="an ignored folder is not asked"),
        pytest.param({".gitignore": "# note\n\n\\#x\n*.[ot]*\n"}, id="notes and ranges"),
    ],
)
def test_what_git_would_take_is_taken(source: Path, ignores: dict[str, str]) -> None:
    write(source, *TREE)
    for path, text in ignores.items():
        (source / path).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=source, check=True)
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=source, capture_output=True, text=True, check=True)

    assert [path for path, _ in code.walk(source, ())] == sorted(listed.stdout.split(), key=lambda p: p.split("/"))


def test_what_vanishes_while_a_folder_is_walked_is_left_out(source: Path) -> None:
    write(source, "a.py", "b.py", "c/d.py", "e.py")
    walk = code.walk(source, ())
    found = [next(walk)[0]]
    (source / "b.py").unlink()
    shutil.rmtree(source / "c")

    assert [*found, *(path for path, _ in walk)] == ["a.py", "e.py"]


def test_a_busy_editor_beside_it_ends_no_sync(source: Path, content: Path) -> None:
    write(source, "a.py")
    over = threading.Event()

    def edit() -> None:
        while not over.is_set():
            for number in range(20):
                write(source, f".{number}.swp", f"{number}/x")
            for number in range(20):
                (source / f".{number}.swp").unlink()
                shutil.rmtree(source / str(number))

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        found = [collected(source, content) for _ in range(60)]
    finally:
        over.set()
        editor.join()

    assert all("a.py" in paths for paths in found)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder in which this process may not do everything, even where it is root's."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(before)
        shutil.rmtree(folder)


@pytest.mark.parametrize("path", ["model.pt", "data", "data/.gitignore"])
def test_what_cannot_be_read_is_named(unprivileged: Path, path: str) -> None:
    source = unprivileged / "source"
    write(source, "model.pt", "data/.gitignore", "data/b.py")
    (source / path).chmod(0)

    with pytest.raises(RefusedError) as caught:
        collected(source, unprivileged / "content")

    (source / path).chmod(0o700)
    assert str(caught.value) == f"cannot read {source / path}: Permission denied"
    assert "`sync.exclude`" in str(caught.value.hint)


def test_links_that_lead_nowhere_are_left_out(source: Path, content: Path) -> None:
    write(source, "a.py")
    (source / "circle").symlink_to("circle")
    (source / "broken").symlink_to("nothing")
    (source / "inside").symlink_to("a.py")

    assert collected(source, content) == ["a.py", "inside"]


def test_hashes_of_what_is_gone_or_has_changed_are_forgotten(source: Path, content: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(source, "a.py", "b.py")
    write(other, "c.py")

    def known() -> int:
        return sum(len(hashes) for hashes in json.loads((content / "known.json").read_text()).values())

    collected(source, content)
    collected(other, content)
    assert known() == 3
    (source / "b.py").unlink()
    for number in range(5):
        (source / "a.py").write_text(f"edit {number}")
        collected(source, content)
    assert known() == 2
    shutil.rmtree(other)
    collected(source, content)
    assert known() == 1
