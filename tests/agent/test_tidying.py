"""`systemd-tmpfiles --clean` takes what is old from /var/tmp; it takes nothing from a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.supervisor.gpu_claims import GpuClaimError, GpuClaims

if TYPE_CHECKING:
    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

pytestmark = pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="needs systemd-tmpfiles")


def tidy(folder: Path) -> None:
    """Have everything under a folder taken away that nobody keeps, whatever its age."""
    rules = folder.with_suffix(".conf")
    rules.write_text(f"e {folder} - - - 0\n")
    subprocess.run(["systemd-tmpfiles", "--clean", rules], check=True)


def gated(node: Node) -> tuple[Talk, Path]:
    gate = node.home / "gate"
    talk = node.launch(["/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.02; done; exit 5"])
    talk.wait_for("started")
    return talk, gate


def files(node: Node) -> list[str]:
    return sorted(str(path.relative_to(node.folder)) for path in node.folder.rglob("*"))


def test_nothing_is_taken_from_a_live_run(node: Node) -> None:
    talk, gate = gated(node)
    before = files(node)
    (node.home / "state/forgotten").touch()
    tidy(node.home / "state")
    assert files(node) == before
    assert not (node.home / "state/forgotten").exists()
    gate.touch()
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 5


def test_nor_from_one_whose_waiters_alone_are_left(node: Node) -> None:
    talk, gate = gated(node)
    talk.kill()
    os.kill(node.supervisor(), signal.SIGKILL)
    before = files(node)
    tidy(node.home / "state")
    assert files(node) == before
    gate.touch()
    again = node.talk(epoch=2)
    node.follow(again)
    again.wait_for("swept")
    assert again.exits()[0]["exit_code"] == 5


def test_nor_from_one_between_two_attempts(node: Node) -> None:
    talk = node.launch(["false"])
    talk.wait_for("swept")
    tidy(node.home / "state")
    assert json.loads((node.folder / "prepare.json").read_text())["attempt"] == 0
    talk.ask(Command.FINISH, **node.where, state="failed", exit_code=100)


def test_a_gpu_is_not_claimed_twice_after_a_tidying(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "forgotten").touch()
    first, second = (GpuClaims(run, "node", str(locks)) for run in ("first", "second"))
    first.claim([990])
    tidy(locks)
    with pytest.raises(GpuClaimError, match="GPU 990 is held by run first"):
        second.claim([990])
    assert not (locks / "forgotten").exists()
    first.release()


def test_what_a_run_needs_is_touched_while_a_supervisor_watches(node: Node) -> None:
    talk, _ = gated(node)
    os.kill(node.supervisor(), signal.SIGKILL)
    month = time.time() - 40 * 86400
    for path in node.folder.rglob("*"):
        os.utime(path, (month, month))
    talk.wait_for("adopted")
    talk.eventually(lambda: all(path.stat().st_mtime > month + 86400 for path in node.folder.rglob("*")))
