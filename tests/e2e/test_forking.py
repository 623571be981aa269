"""`job.start_method: fork` from the command on: the ranks come of one process, and a restart does, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

SCRIPT = """\
import os, sys
if os.environ["CLUSTERCTL_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
    sys.exit("not yet")
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
"""


def test_ranks_are_forked_and_so_are_those_of_a_restart(head: LocalHead) -> None:
    (head.folder / "train.py").write_text(SCRIPT)
    job = {"script": "train.py", "args": ["a b"], "start_method": "fork", "preload": ["decimal"]}
    head.write_local(job, (2, 1), restart={"max_restarts": 1, "backoff": 0})

    done = head.run("up", "--no-health", timeout=110)

    assert done.returncode == 0, done.stderr
    # What both nodes say alike is told once, of each attempt.
    told = r"[12] forked from one process that took [\d.]+ s to import decimal: .* \(the first of 2 nodes\)"
    assert len(re.findall(told, done.stderr)) == 2
    lines = head.run("logs", "--all-ranks").stdout
    assert [f"rank {n} of 3 ['a b']" in lines for n in range(3)] == [True] * 3


def test_who_asks_for_a_fork_that_cannot_be_is_told(head: LocalHead) -> None:
    head.write_local({"command": "true", "start_method": "fork"})

    done = head.run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    assert "workers start as new processes instead: a `job.command` may be any program" in done.stderr


HELD_CHECK = """\
import os, sys, time
# The checks of a node look at its Python: they begin, and go on once the test says so.
if "facts" in sys.argv:
    open("HERE/checked", "w").close()
    while not os.path.exists("HERE/go"):
        time.sleep(0.01)
"""


def test_a_run_with_forked_ranks_that_is_still_checked_is_in_nobodys_way(head: LocalHead) -> None:
    packages = head.folder / "site-packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(HELD_CHECK.replace("HERE", str(head.folder)))
    (head.folder / "train.py").write_text("print('ran')\n")
    job = {"script": "train.py", "start_method": "fork", "preload": ["decimal"]}
    head.write_local(job, (1,), env={"PYTHONPATH": str(packages)})
    with Head.start(head, "up") as first:
        wait_for((head.folder / "checked").exists, 60, what="the checks of the first run")
        head.write_local({"script": "train.py"}, (1,), name="other")

        done = head.run("up", timeout=110)

        (head.folder / "go").touch()
        _, said = first.communicate(timeout=110)
    assert done.returncode == 0, done.stderr
    assert first.returncode == 0, said
    assert "1 forked from one process" in said
