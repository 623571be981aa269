"""What a start says of checkpoints: where each node keeps its own, and which are of earlier runs. Each is said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

OWN = "is on disks of the nodes' own: a restart copies the newest checkpoint to nodes that lack it"
CONTRADICTION = "`job.checkpoint.shared` says that all nodes see the same files, but"
OLDER = "of earlier runs match"


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    return make_head()


def started(head: LocalHead, checkpoint: str, *, name: str = "p") -> str:
    """Start a job that may be restarted on two machines that have homes of their own; return what was said."""
    homes = head.folder.parent / "homes"
    for node in ("gpu01", "gpu02"):
        (homes / node).mkdir(parents=True, exist_ok=True)
    enter = f"[env, -u, XDG_STATE_HOME, 'HOME={homes}/{{host}}', /bin/sh]"
    (head.folder / "cluster.yaml").write_text(
        f"version: 1\nname: {name}\n"
        "hosts: [{host: gpu01, address: 127.0.0.1}, {host: gpu02, address: 127.0.0.2}]\n"
        f"defaults: {{gpus: 0, workers: 1, transport: {{command: {enter}}}}}\n"
        f"job: {{command: 'mkdir -p ckpt; date > ckpt/step-1', checkpoint: {{{checkpoint}}}}}\n"
        "restart: {max_restarts: 1}\n"
    )
    assert head.run("trust", "--yes").returncode == 0
    done = head.run("up", "--no-health")
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_disks_of_their_own_are_told_at_the_first_start_of_a_job(head: LocalHead) -> None:
    first, second = (started(head, "pattern: 'ckpt/step-*'") for _ in range(2))

    assert f"`ckpt/step-*` {OWN}\n" in first
    assert OWN not in second
    assert OWN in started(head, "pattern: 'ckpt/step-*'", name="p-2")


def test_a_file_that_calls_them_shared_is_contradicted_at_each_start(head: LocalHead) -> None:
    told = [started(head, "pattern: 'ckpt/step-*', shared: true") for _ in range(2)]

    assert [CONTRADICTION in text for text in told] == [True, True]


def test_checkpoints_of_earlier_runs_are_told_when_there_are_some_for_the_first_time(head: LocalHead) -> None:
    told = [started(head, "pattern: 'ckpt/step-*'") for _ in range(3)]

    assert [OLDER in text for text in told] == [False, True, False]


def test_who_never_goes_on_from_any_is_told_nothing(head: LocalHead) -> None:
    told = [started(head, "pattern: 'ckpt/step-*', resume: never") for _ in range(2)]

    assert not any(OLDER in text or OWN in text for text in told)


def test_local_nodes_are_one_machine(head: LocalHead) -> None:
    job = {"command": "true", "checkpoint": {"pattern": "ckpt/step-*"}}
    head.write_local(job, workers=(1, 1), restart={"max_restarts": 1})

    assert OWN not in head.run("up", "--no-health").stderr
