"""What a rank leaves at work when it ends well, and what a stop has to kill, is named before it is gone."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.agent.conftest import gone

if TYPE_CHECKING:
    from tests.agent.conftest import Node

PYTHON = shlex.quote(sys.executable)
WORKS = "import time\ntime.sleep(300)\n"
CLONES = "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(300)\n"


@pytest.fixture
def work(node: Node) -> Any:
    folder = node.home / "work"
    folder.mkdir()
    (folder / "works.py").write_text(WORKS)
    (folder / "clones.py").write_text(CLONES)
    return folder


@pytest.mark.parametrize(
    ("shell", "command"),
    [
        pytest.param(f"nohup {PYTHON} works.py > log 2>&1 &", "works.py", id="background"),
        pytest.param(f"setsid {PYTHON} works.py > log 2>&1 &", "works.py", id="another_session"),
        pytest.param(f"exec {PYTHON} clones.py", "clones.py", id="fork_whose_parent_ends"),
    ],
)
@pytest.mark.usefixtures("work")
def test_what_a_rank_leaves_at_work_is_named_and_ended(node: Node, shell: str, command: str) -> None:
    talk = node.launch(["bash", "-c", shell], ["true"], env={"RANK": "0"})
    (left,) = talk.wait_for("swept")[0]["leftovers"]
    assert (left["rank"], command in left["command"]) == (0, True)
    assert 0.0 < left["age_s"] < 60.0
    assert gone(left["pid"])


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param("sleep 0.2 & exit 0", id="gone_in_a_moment"),
        pytest.param("exec -a nvidia-smi sleep 300 & exit 0", id="only_looks_on"),
        pytest.param("sleep 300 & exit 3", id="a_rank_that_failed"),
    ],
)
def test_what_goes_by_itself_or_is_no_work_is_not_named(node: Node, shell: str) -> None:
    talk = node.launch(["bash", "-c", shell])
    assert talk.wait_for("swept")[0]["leftovers"] == []


def test_what_a_stop_had_to_kill_is_named(node: Node) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
    talk = node.launch(["bash", "-c", f"{PYTHON} -c {shlex.quote(script)}; true"])
    talk.until(lambda: b"up" in talk.files.get("attempt-0/rank-0.log", b""))
    node.stop(talk, grace=0.3)
    (killed,) = talk.wait_for("swept")[0]["past_grace"]
    assert (killed["rank"], "signal.SIG_IGN" in killed["command"]) == (0, True)


def test_what_a_stop_without_any_grace_kills_is_not_named(node: Node) -> None:
    talk = node.launch(["sleep", "300"])
    node.stop(talk, grace=0.0)
    assert talk.wait_for("swept")[0]["past_grace"] == []


def test_ranks_are_stopped_by_the_signal_of_the_job(node: Node) -> None:
    script = "import time\nprint('up', flush=True)\ntry: time.sleep(300)\nexcept KeyboardInterrupt: print('saved')"
    talk = node.launch([sys.executable, "-c", script], stop_signal="SIGINT")
    talk.until(lambda: b"up" in talk.files.get("attempt-0/rank-0.log", b""))
    node.stop(talk, grace=20.0)
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 0
    talk.until(lambda: b"saved" in talk.files.get("attempt-0/rank-0.log", b""))
