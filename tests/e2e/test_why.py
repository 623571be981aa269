"""`clusterctl why` of a real run: at once, later, and from a bundle elsewhere."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

JOB = """
import os, sys, time
password_of_the_store = "hunter2"
if os.environ["RANK"] == "1":
    print("password=hunter2 of 10.1.2.3", flush=True)
    raise FileNotFoundError(f"no shard at 10.1.2.3, password={password_of_the_store}")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 1))
    assert head.run("up", "--no-health").returncode == 100
    return head


def test_the_rank_that_failed_is_named_with_its_line(head: LocalHead) -> None:
    told = json.loads(head.run("why", "--json").stdout)

    assert (told["kind"], told["class"], told["confidence"]) == ("crash", "MISSING_FILE", "certain")
    assert [(one["rank"], one["node"], one["where"]) for one in told["culprits"]] == [(1, "localhost.1", "job.py:6")]


def test_it_has_another_name(head: LocalHead) -> None:
    assert head.run("diagnose").stdout == head.run("why").stdout != ""


def test_it_is_kept_with_the_run(head: LocalHead) -> None:
    (kept,) = Path(head.env["XDG_STATE_HOME"]).glob("clusterctl/runs/*/why.txt")

    assert "rank 1" in kept.read_text()


def test_a_bundle_says_the_same_and_hides_what_it_is_asked_to(head: LocalHead, tmp_path: Path) -> None:
    bundle = tmp_path / "handed-on.tar.gz"
    assert head.run("why", "--save", str(bundle), "--redact").returncode == 0

    told = head.run("why", "--bundle", str(bundle))

    assert told.returncode == 0
    assert "rank 1 on localhost.1 failed first" in told.stdout
    with tarfile.open(bundle) as archive:
        content = b"".join(file.read() for member in archive if (file := archive.extractfile(member)) is not None)
    assert b"hunter2" not in content
    assert b"10.1.2.3" not in content


def test_a_run_and_a_bundle_exclude_each_other(head: LocalHead, tmp_path: Path) -> None:
    assert head.run("why", "some-run", "--bundle", str(tmp_path)).returncode == 2


def test_where_nothing_can_be_written_the_error_says_so(head: LocalHead, tmp_path: Path) -> None:
    for command in (("why", "--save"), ("report", "--output")):
        told = head.run(*command, str(tmp_path / "no" / "folder" / "x"))

        assert told.returncode == 6
        assert "cannot be written" in told.stderr


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        pytest.param('export PATH="$HOME/tools:$PATH"\n', "a login shell of localhost finds {tool}", id="it has it"),
        pytest.param("", "a login shell of localhost has no `my-tool` either", id="it has it neither"),
    ],
)
def test_of_a_command_that_is_missing_it_says_whether_a_login_shell_finds_it(
    make_head: MakeHead, tmp_path: Path, profile: str, said: str
) -> None:
    tool = tmp_path / "tools" / "my-tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    (tmp_path / ".bash_profile").write_text(profile)
    head = make_head()
    head.env["HOME"] = str(tmp_path)
    head.write_local({"command": "my-tool --fast"})
    assert head.run("up", "--no-health").returncode == 100

    told = json.loads(head.run("why", "--json").stdout)

    assert (told["class"], told["confidence"]) == ("COMMAND_NOT_FOUND", "certain")
    assert said.format(tool=tool) in told["summary"]
