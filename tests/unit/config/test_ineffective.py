"""Keys that change nothing beside what else the file says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.loader import load_cluster_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

ROOT = Path(__file__).parents[3]
SSH = "hosts: [a, b]\n"
LOCAL = "hosts: [{host: a, transport: local}]\n"
COMMAND = "hosts: [{host: a, transport: {command: [in, '{host}', sh]}}]\n"


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        pytest.param(SSH + "restart: {backoff: 5s}\n", "restart.backoff", "max_restarts", id="backoff"),
        pytest.param(SSH + "restart: {max_restarts: 0, on: crash}\n", "restart.on", "max_restarts", id="on"),
        pytest.param(SSH + "restart: {on: node_lost}\n", "restart.on", "max_restarts", id="on said once"),
        pytest.param(SSH + "restart: {never_codes: [2]}\n", "restart.never_codes", "max_restarts", id="codes"),
        pytest.param(SSH + "restart: {window: 1h}\n", "restart.window", "max_restarts", id="window"),
        pytest.param(SSH + "restart: {avoid: repeat_offenders}\n", "restart.avoid", "takes all nodes", id="avoid"),
        pytest.param("hosts: [a, {host: b, role: spare}]\n", "hosts[1].role", "max_restarts", id="spare"),
        pytest.param(
            SSH + "restart: {max_restarts: 1, on: crash}\nstall: {action: restart}\n",
            "stall.action",
            "`restart.on` does not contain `stall`",
            id="stall",
        ),
        pytest.param(SSH + "idle: {action: end}\n", "idle.action", "no run counts as idle", id="idle"),
        pytest.param(
            SSH + "job: {script: train.py, checkpoint: {shared: true}}\n",
            "job.checkpoint.shared",
            "pattern",
            id="shared",
        ),
        pytest.param(
            SSH + "job: {script: train.py, checkpoint: {resume: any}}\n",
            "job.checkpoint.resume",
            "pattern",
            id="resume",
        ),
        pytest.param(
            SSH + "job: {script: train.py, preload: torch}\n", "job.preload", "does not fork workers", id="preload"
        ),
        pytest.param(LOCAL + "sync: {exclude: [data/]}\n", "sync.exclude", "nothing is copied", id="exclude"),
        pytest.param(LOCAL + "ssh: {host_keys: strict}\n", "ssh.host_keys", "no host uses SSH", id="host keys"),
        pytest.param(COMMAND + "defaults: {user: ann}\n", "defaults.user", "no host uses SSH", id="user of all"),
        pytest.param(
            "hosts: [b, {host: 'a[1-3]', port: 23, transport: local}]\n", "hosts[1].port", "does not use SSH", id="port"
        ),
    ],
)
def test_a_key_without_an_effect_is_warned_of_at_its_place(
    text: str, key: str, why: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    (warning,) = parse_text("version: 1\n" + text).warnings
    assert warning.text.startswith(f"{key}: has no effect: ")
    assert why in warning.text
    assert warning.hint
    assert warning.line > 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(SSH + "restart: {max_restarts: 1, backoff: 5s, on: crash}\n", id="restarts"),
        pytest.param(SSH + "restart: {max_restarts: 0}\nsync: {exclude: [data/]}\nssh: {client: openssh}\n", id="ssh"),
        pytest.param(SSH + "job: {script: train.py, checkpoint: {resume: this run, shared: false}}\n", id="defaults"),
        pytest.param(SSH + "job: {script: train.py, start_method: auto, preload: torch}\n", id="forked"),
        pytest.param(COMMAND + "sync: {exclude: [data/]}\nssh: {parallel: 4, connect_timeout: 5s}\n", id="command"),
        pytest.param("hosts: [b, {host: a, transport: local}]\ndefaults: {user: ann}\n", id="one by SSH"),
    ],
)
def test_a_key_with_an_effect_is_not_warned_of(text: str, parse_text: Callable[..., LoadedClusterFile]) -> None:
    assert parse_text("version: 1\n" + text).warnings == ()


@pytest.mark.parametrize(
    "path",
    [ROOT / "cluster.example.yaml", *sorted(ROOT.glob("templates/*/cluster.yaml"))],
    ids=lambda path: path.parent.name,
)
def test_the_files_that_come_along_have_no_key_without_an_effect(path: Path) -> None:
    assert not [warning for warning in load_cluster_file([path], environ={}).warnings if "no effect" in warning.text]
