"""`job.start_method: fork` from the command on: the ranks come of one process, and a restart does, too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.agent.conftest import gone
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    import subprocess

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


IMPORTED = "import os\nwith open('imported', 'a') as file:\n    file.write(f'{os.getpid()} ')\n"
CHECKED_LATER = """\
import os, sys, time
# The checks of a node look at its Python: they do not end before the imports have begun.
while "facts" in sys.argv and not os.path.exists(os.path.join(os.path.dirname(__file__), "../imported")):
    time.sleep(0.01)
"""


def before_the_checks(head: LocalHead, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Start a job that preloads a module, whose checks end once it is being imported."""
    packages = head.folder / "site-packages"
    packages.mkdir()
    (packages / "special.py").write_text(IMPORTED)
    (packages / "sitecustomize.py").write_text(CHECKED_LATER)
    (head.folder / "train.py").write_text("print('ran')\n")
    job = {"script": "train.py", "start_method": "fork", "preload": ["special"]}
    head.write_local(job, (2,), env={"PYTHONPATH": str(packages)}, **more)
    return head.run("up", *options, timeout=110)


def test_imports_begin_before_the_checks_are_through(head: LocalHead) -> None:
    done = before_the_checks(head)
    assert done.returncode == 0, done.stderr
    assert "2 forked from one process" in done.stderr
    assert len((head.folder / "imported").read_text().split()) == 1


def test_what_was_imported_early_goes_where_a_check_fails(head: LocalHead) -> None:
    done = before_the_checks(head, "--strict", health={"thresholds": {"host.nofile.warn": 1e9}})
    assert done.returncode == 5, done.stderr
    (pid,) = map(int, (head.folder / "imported").read_text().split())
    wait_for(lambda: gone(pid), what="the end of the zygote")
