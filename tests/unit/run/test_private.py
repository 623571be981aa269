"""What the head and its nodes keep is for their user alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.agent.record.folders import make_workdir
from clusterctl.cli import main
from clusterctl.run.nodes.code import ContentStore
from clusterctl.run.nodes.files.sensitive import sentence
from clusterctl.run.record import rundir


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a head, as a umask of 022 left it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "clusterctl"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def test_the_folder_of_runs_is_its_users_alone(state: Path) -> None:
    run = rundir.create("llm")
    assert (mode(state), mode(run.path)) == ("0o700", "0o700")


def test_so_is_the_folder_of_what_was_synced(state: Path) -> None:
    assert (mode(ContentStore(state / "content").root), mode(state)) == ("0o700", "0o700")


def test_the_traceback_of_a_bug_is_its_users_alone(state: Path) -> None:
    (state / "bug.log").write_text("an older one\n")
    (state / "bug.log").chmod(0o644)
    try:
        raise ValueError("sekrit")
    except ValueError:
        main._bug()
    assert (mode(state), mode(state / "bug.log")) == ("0o700", "0o600")
    assert "sekrit" in (state / "bug.log").read_text()


def test_so_is_code_on_a_node_that_names_no_folder_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = tmp_path / ".local/share/clusterctl"
    ours.mkdir(parents=True)
    ours.chmod(0o755)
    make_workdir(f"{ours}/work/llm-1")
    make_workdir(f"{tmp_path}/chosen")
    assert (mode(ours), mode(tmp_path / "chosen")) == ("0o700", oct(0o777 & ~umask()))


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_controller_leaves_no_core_dump_and_its_workers_may() -> None:
    text = """
import resource, subprocess, sys
from clusterctl import limits
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
limits.leave_no_core()
child = subprocess.Popen(["sh", "-c", "read go; ulimit -c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
limits.give_back(child.pid)
print(resource.getrlimit(resource.RLIMIT_CORE)[0], child.communicate(b"go\\n")[0].decode().strip() != "0", hard != 0)
"""
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    own, child, possible = done.stdout.split()
    assert (own, child) == ("0", possible)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        pytest.param(["train.py", "data/env.py", "id_rsa.pub", ".env.example"], None, id="none"),
        pytest.param([".env"], "`.env` may", id="env"),
        pytest.param(
            ["conf/creds.env.local", "a/key.pem", "id_ed25519"],
            "`a/key.pem`, `conf/creds.env.local`, `id_ed25519` may",
            id="several",
        ),
        pytest.param([f"{n}.pem" for n in range(5)], "`0.pem`, `1.pem`, `2.pem` and 2 more may", id="many"),
    ],
)
def test_names_of_secrets_among_the_code_are_told_once_with_the_remedy(paths: list[str], said: str | None) -> None:
    found = sentence(paths)
    assert (found is None) is (said is None)
    if said is not None:
        assert str(found).startswith(said)
        assert "`sync.exclude`" in str(found)
