"""Workers that a launcher of the node starts: each is seen, and its end told, as if we had started it."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command
from tests.agent.conftest import gone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

# What torchrun is to us: it starts its arguments once for each rank in a group of its own, and ends badly if one does.
LAUNCHER = """\
import os, subprocess, sys
print("launching", flush=True)
children = [
    subprocess.Popen(
        sys.argv[1:],
        env={**os.environ, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": f"{os.environ['PET_LOG_DIR']}-{rank}.json"},
        start_new_session=True,
    )
    for rank in (0, 1)
]
codes = [child.wait() for child in children]
print("launched:", codes, flush=True)
sys.exit(any(codes))
"""


def launch(node: Node, script: str, launcher: str = LAUNCHER) -> Talk:
    talk = node.talk()
    node.prepare(talk, 2)
    node.follow(talk)
    worker = {
        "rank": 0,
        "local_rank": 0,
        "argv": [sys.executable, "-c", launcher],
        "env": {},
        "hosts": [0, 1],
        "hosted": ["/bin/sh", "-c", script],
    }
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], inject=False)
    return talk


def output(talk: Talk, rank: int) -> bytes:
    return bytes(talk.files.get(f"attempt-0/rank-{rank}.log", b""))


def test_each_rank_of_a_launcher_has_its_own_output_and_exit(node: Node) -> None:
    talk = launch(node, "echo out $RANK; echo err $RANK >&2; exit 0")
    talk.wait_for("swept")
    assert {rank: (end["exit_code"], end["stopped"]) for rank, end in talk.exits().items()} == {
        0: (0, False),
        1: (0, False),
    }
    talk.until(lambda: b"launched: [0, 0]" in output(talk, 0))
    assert b"out 0\nerr 0\n" in output(talk, 0)
    assert output(talk, 1) == b"out 1\nerr 1\n"
    assert sorted(event["rank"] for event in talk.of("started")) == [0, 1]


def test_the_rank_that_fails_is_the_one_told_to_have_failed(node: Node) -> None:
    error = json.dumps({"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback ..."}}})
    fail = f"if [ $RANK = 1 ]; then echo dying; printf '%s' '{error}' > $TORCHELASTIC_ERROR_FILE; exit 7; fi"
    talk = launch(node, f"{fail}; exec sleep 1000")
    talk.wait_for("swept")
    end = talk.exits()[1]
    assert (end["exit_code"], end["stopped"], end["tail"]) == (7, False, "dying\n")
    assert end["error"] == {"message": "ValueError: no", "traceback": "Traceback ..."}
    assert talk.exits()[0]["stopped"]


def test_the_signal_that_ended_a_rank_is_told(node: Node) -> None:
    talk = launch(node, "if [ $RANK = 1 ]; then kill -SEGV $$; fi; exec sleep 1000")
    talk.wait_for("swept")
    assert (talk.exits()[1]["exit_code"], talk.exits()[1]["signal"]) == (None, signal.SIGSEGV)


def test_a_launcher_that_starts_nothing_is_the_failure_of_its_first_rank(node: Node) -> None:
    talk = launch(node, "exit 0", launcher="import sys; sys.exit('no such module')")
    talk.wait_for("swept")
    first, second = talk.exits()[0], talk.exits()[1]
    assert (first["exit_code"], first["stopped"], first["tail"]) == (1, False, "no such module\n")
    assert second["stopped"]


def test_a_launcher_that_dies_takes_its_ranks_along(node: Node) -> None:
    talk = launch(node, "echo up; exec sleep 1000")
    talk.until(lambda: len(talk.of("started")) == 2)
    launcher = json.loads((node.folder / "attempt-0/rank-0.launcher.spawn").read_text())["pid"]
    os.kill(launcher, signal.SIGKILL)
    talk.wait_for("swept")
    assert all(end["stopped"] for end in talk.exits().values())
    assert [event["code"] for event in talk.of("alarm")] == ["launcher"]
    assert all(gone(event["pid"]) for event in talk.of("started"))


def test_a_supervisor_killed_under_a_launcher_loses_no_exit(node: Node, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    talk = launch(node, f"while [ ! -e {gate} ]; do sleep 0.02; done; exit $RANK")
    talk.until(lambda: len(talk.of("started")) == 2)
    os.kill(node.supervisor(), signal.SIGKILL)
    talk.wait_for("adopted")
    gate.touch()
    talk.wait_for("swept")
    assert [talk.exits()[rank]["exit_code"] for rank in (0, 1)] == [0, 1]


def test_a_stop_ends_the_launcher_and_its_ranks(node: Node) -> None:
    talk = launch(node, "trap '' TERM; echo up; while :; do sleep 0.05; done")
    talk.until(lambda: len(talk.of("started")) == 2 and b"up" in output(talk, 1))
    node.stop(talk, grace=0.3)
    swept = talk.wait_for("swept")[0]
    assert swept["remaining"] == []
    assert all(end["stopped"] for end in talk.exits().values())
