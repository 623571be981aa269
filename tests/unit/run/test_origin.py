"""Where a run comes from: what is written down at its start, and that nothing depends on it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.spec import JobSpec
from clusterctl.run.record.run_origin import Commit, Origin, format_command, read_commit, read_origin
from clusterctl.run.record.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

ME = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *ME, "-C", folder, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_folder_that_is_clean_has_its_commit_and_no_changes(repository: Path) -> None:
    assert read_commit(str(repository)) == Commit(
        commit=git(repository, "rev-parse", "HEAD"), branch="trunk", changes=0
    )


def test_files_that_differ_or_are_new_are_counted(repository: Path) -> None:
    (repository / "train.py").write_text("2\n")
    (repository / "new.py").write_text("3\n")

    found = read_commit(str(repository))

    assert found is not None
    assert found.changes == 2


def test_a_folder_without_a_commit_has_none(tmp_path: Path) -> None:
    assert read_commit(str(tmp_path)) is None
    git(tmp_path, "init", "-q")
    assert read_commit(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("origin", "commit", "expected"),
    [
        pytest.param(None, None, None, id="an older run"),
        pytest.param("not JSON", None, None, id="not readable"),
        pytest.param('{"user": "uli"}', None, Origin(user="uli"), id="only some of it"),
        pytest.param('{"user": "uli"}', "[]", Origin(user="uli"), id="a commit that says nothing"),
        pytest.param(
            '{"user": "uli"}', '{"commit": "3f", "changes": "x"}', Origin(user="uli", commit=Commit(commit="3f")),
            id="a commit",
        ),
    ],
)  # fmt: skip
def test_what_was_written_down_is_read_as_far_as_it_goes(
    tmp_path: Path, origin: str | None, commit: str | None, expected: Origin | None
) -> None:
    for name, text in (("origin.json", origin), ("commit.json", commit)):
        if text is not None:
            (tmp_path / name).write_text(text)

    assert read_origin(RunDir(tmp_path)) == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(JobSpec(script="train.py", args=("--name", "a b")), "train.py --name 'a b'", id="a script"),
        pytest.param(JobSpec(module="llm.train", args=("-v",)), "-m llm.train -v", id="a module"),
        pytest.param(
            JobSpec(command="./run.sh | tee x", args=("a b",)), "./run.sh | tee x 'a b'", id="a shell command"
        ),
        pytest.param(JobSpec(command=("./train", "--fast")), "./train --fast", id="a program"),
    ],
)
def test_a_command_is_told_as_one_types_it(job: JobSpec, expected: str) -> None:
    assert format_command(job) == expected
