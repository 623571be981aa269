"""`job.start_method: fork` from the command on: the ranks come of one process, and a restart does, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

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
    lines = head.run("logs", "--all").stdout
    assert [f"rank {n} of 3 ['a b']" in lines for n in range(3)] == [True] * 3


def test_who_asks_for_a_fork_that_cannot_be_is_told(head: LocalHead) -> None:
    head.write_local({"command": "true", "start_method": "fork"})

    done = head.run("up", "--no-health")

    assert done.returncode == 0, done.stderr
    assert "the workers are started anew: a `job.command` may be any program" in done.stderr
