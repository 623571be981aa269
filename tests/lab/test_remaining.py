"""What `down` cannot end it names, and says so with its exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import json_shapes as shapes
from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab

# A worker that becomes root: the user's supervisor may not send it a signal.
PROGRAM = "$( = $) = 0; $< = $> = 0; $| = 1; print qq(beyond reach\\n); sleep 600"


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


def test_a_process_beyond_reach_is_named_and_the_code_is_7(lab: Lab, nodes: NodeFactory, head: Head) -> None:
    (made,) = nodes(1, user="me")
    rooted = lab.shared / "rooted"
    shutil.copy("/usr/bin/perl", rooted)
    rooted.chmod(0o4755)
    head.write({made.name: 1}, {"command": ["/srv/shared/rooted", "-e", PROGRAM], "grace": "1s"})
    run = str(head.json("up", "-d", "--no-health")["run"])
    pid = made.wait_for(lambda: made.pid_of("rooted"), what="the worker")
    made.wait_for(lambda: "beyond reach" in head.run("logs", run).stdout, what="the worker to be root")

    ended = head.run("down", run)
    told = head.json("down", run)
    status = head.json("status", run)

    assert ended.returncode == 7, ended.stderr
    assert "rooted" in ended.stderr
    assert head.run("wait", run).returncode == 7
    shapes.check(shapes.filled(shapes.DOWN), told)
    shapes.check(shapes.STATUS, status)
    assert [(r["node"], r["pid"]) for r in told[0]["remaining"]] == [(made.name, pid)]
    assert status["remaining"] == told[0]["remaining"]
    assert (status["state"], status["exit_code"]) == ("cancelled", 103)
