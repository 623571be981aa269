"""What the head and its nodes keep is for their user alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.agent.workdir.file_tree import make_workdir
from clusterctl.cli import main
from clusterctl.run.nodes.code_exclusions import describe_secret_files
from clusterctl.run.nodes.code_manifest import ContentStore
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
    run = rundir.create_run_dir("llm")
    assert (mode(state), mode(run.path)) == ("0o700", "0o700")


def test_so_is_the_folder_of_what_was_synced(state: Path) -> None:
    assert (mode(ContentStore(state / "content").root), mode(state)) == ("0o700", "0o700")


def test_the_traceback_of_a_bug_is_its_users_alone(state: Path) -> None:
    (state / "bug.log").write_text("an older one\n")
    (state / "bug.log").chmod(0o644)
    try:
        raise ValueError("sekrit")
    except ValueError:
        main._report_bug()
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
from clusterctl import rlimits
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
rlimits.disable_own_core_dumps()
child = subprocess.Popen(["sh", "-c", "read go; ulimit -c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
rlimits.restore_rlimits(child.pid)
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
    found = describe_secret_files([(path, 10) for path in paths], lambda _path: b"")
    assert (found is None) is (said is None)
    if said is not None:
        assert str(found).startswith(said)
        assert "`sync.exclude`" in str(found)


@pytest.mark.parametrize(
    "path",
    [
        *("gcp-key.json", "conf/service-account.json", "client_secret_1.apps.json", "kaggle.json"),
        *(".netrc", ".npmrc", ".pypirc", ".bash_history", ".python_history", ".aws/config", ".kube/config"),
        *(".docker/config.json", ".config/gh/hosts.yml", ".cache/huggingface/token", "hf_token", ".git-credentials"),
        *(".config/gcloud/legacy_credentials/a/adc.json", "tls/server.key", "token.json", "secrets.yaml"),
    ],
)
def test_files_of_tokens_are_told_of_like_keys(path: str) -> None:
    assert str(describe_secret_files([(path, 10)], lambda _path: b"")).startswith(f"`{path}` may hold secrets")


@pytest.mark.parametrize("path", ["tokenizer.json", "tokens.py", "keys.csv", "config.json", "hosts.yml", "history.csv"])
def test_files_of_training_are_no_secrets(path: str) -> None:
    assert describe_secret_files([(path, 2000)], lambda _path: b'{"a": 1}') is None


def test_a_key_is_known_by_what_it_begins_with(tmp_path: Path) -> None:
    account = b'{"type": "service_account", "project_id": "p", "private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}'
    texts = {"my-project-1a2b.json": account, "deploy": b"-----BEGIN OPENSSH PRIVATE KEY-----", "a.txt": b"x" * 100}
    told = str(describe_secret_files([(path, 2000) for path in texts], texts.__getitem__))
    assert told.startswith("`deploy`, `my-project-1a2b.json` may hold secrets")
