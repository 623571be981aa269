"""What comes of a zygote that was kept is what a fresh start would be: what was read at import is looked at again."""

from __future__ import annotations

import os
import resource
import signal
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.record.rundir import RunDir
from clusterctl.agent.supervisor.forking.kept import ask
from tests.agent.conftest import gone
from tests.agent.test_early_imports import COUNTED, imported
from tests.agent.test_kept_warm import SAYS, anew, finish, job_of, keepers, kept, run, warm
from tests.agent.test_zygote import zygotes
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent.conftest import Node
    from tests.agent.started import Job


@pytest.fixture(autouse=True)
def nothing_stays(node: Node) -> Iterator[None]:
    yield
    for pid in keepers(node):
        os.kill(pid, signal.SIGKILL)


def kept_job(node: Node, special: str = COUNTED) -> Job:
    """A job whose imports are kept already; what follows is another run of it."""
    job = job_of(node, special=special)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    return anew(job)


# --- what was read at import


READS = {
    "open": "TEXT = open(os.environ['PLACE']).read()\n",
    "a path": "import pathlib\nTEXT = pathlib.Path(os.environ['PLACE']).read_text()\n",
    "in vain": "try:\n    TEXT = open(os.environ['PLACE']).read()\nexcept OSError:\n    pass\n",
}


@pytest.mark.parametrize("how", READS)
def test_a_file_that_was_read_at_import_and_has_changed_means_other_imports(node: Node, how: str) -> None:
    place = node.home / "settings.json"
    if how != "in vain":
        place.write_text("first")
    job = job_of(node, special=COUNTED + READS[how], PLACE=str(place))
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    place.write_text("other")
    assert not warm(run(anew(job))[0])
    assert imported(job) == 2
    assert warm(run(anew(job))[0])


@pytest.mark.parametrize(
    "look",
    [
        "from sys import argv",
        "import sys\nWORDS = sys.argv",
        "import sys\nFAST = sys.argv.count('--fast')",
        "import sys\nTEXT = f'{sys.argv}'",
        "import sys\nNONE = sys.argv == ['train.py']",
        "import sys\nTWICE = sys.argv + sys.argv",
        "import sys\nWORDS = sys.orig_argv[1:]",
    ],
)
def test_whoever_has_the_arguments_of_the_last_run_is_not_used_for_others(node: Node, look: str) -> None:
    job = kept_job(node, COUNTED + look + "\n")
    job.argv.append("--fast")
    assert not warm(run(job)[0])
    assert imported(job) == 2


@pytest.mark.parametrize("changed", ["a .pth", "pyvenv.cfg", "the interpreter"])
def test_a_python_that_has_changed_means_other_imports(node: Node, changed: str) -> None:
    place = node.home / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    (folder,) = place.glob("lib/*/site-packages")
    pth = folder / "more.pth"
    pth.write_text("\n")
    job = job_of(node)
    job.python = str(place / "bin/python")
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    if changed == "the interpreter":
        link = place / "bin/python"
        whole = link.resolve().read_bytes()
        link.unlink()
        link.write_bytes(whole)
        link.chmod(0o755)
    else:
        with (pth if changed == "a .pth" else place / "pyvenv.cfg").open("a") as file:
            file.write("# another\n")
    assert not warm(run(anew(job))[0])
    assert imported(job) == 2


def test_what_the_compiler_says_of_a_script_is_said_by_its_ranks_alone(node: Node) -> None:
    job = job_of(node, SAYS, PYTHONWARNINGS="always::DeprecationWarning:<unknown>")
    job.forked["preload"] = None
    job.write("train.py", SAYS + "import re\nre.compile('\\d')\n")
    for _ in range(2):
        run(anew(job))
        wait_for(lambda: kept(node), what="the zygote that is kept")


def test_a_log_counts_from_the_start_of_its_run(node: Node) -> None:
    begun = "begun = time.time() - logging.makeLogRecord({}).relativeCreated / 1e3\n"
    says = "import special, logging, time\n" + begun + "assert begun > float(open('before').read())\n" + SAYS
    job = job_of(node, says, special=COUNTED + "import logging\n")
    for number in range(2):
        (job.work / "before").write_text(f"{time.time()}")
        assert warm(run(anew(job))[0]) is bool(number)
        wait_for(lambda: kept(node), what="the zygote that is kept")


# --- what is left


def children(holder: int) -> list[int]:
    """All of a process, those that have ended and were not taken in, too."""
    found = [process for pid in proc.pids() if (process := proc.stat(pid)) is not None]
    return [process.pid for process in found if process.ppid == holder]


def test_a_keeper_has_one_child_and_none_that_has_ended(node: Node) -> None:
    kept_job(node)
    (holder,) = keepers(node)
    wait_for(lambda: children(holder) == kept(node), what="the zygote alone")


def test_a_run_whose_supervisor_was_a_keeper_is_adopted_when_that_is_killed(node: Node) -> None:
    job = kept_job(node)
    job.write("train.py", "import special, signal\nsignal.pause()\n")
    talk = node.talk()
    job.prepare(talk)
    node.follow(talk)
    job.begin(talk, inject=True)
    talk.wait_for("started")
    (pid,) = [event["pid"] for event in talk.of("started")]
    (zygote,), before = zygotes(node), node.supervisor()
    os.kill(before, signal.SIGKILL)
    talk.wait_for("adopted")
    assert node.supervisor() != before
    wait_for(lambda: gone(zygote), what="the end of the zygote")
    assert not gone(pid)
    node.stop(talk)
    talk.wait_for("swept")
    assert gone(pid)
    assert finish(job, talk) == {}
    assert not kept(node)


def test_to_tell_the_end_once_more_leaves_what_is_kept(node: Node) -> None:
    kept_job(node)
    (holder,) = keepers(node)
    node.talk().ask(Command.FINISH, **node.where, state="finished", exit_code=0, keep=True)
    assert keepers(node) == [holder]


def test_with_the_last_run_goes_every_folder_in_which_something_was_kept(node: Node) -> None:
    job, places = job_of(node), []
    for name in ("one", "other"):
        node.node = name
        run(anew(job))
        wait_for(lambda: kept(node), what="the zygote that is kept")
        places.append(dict(node.where))
    for where in places:
        node.talk().ask(Command.CLEAN, **where)
    wait_for(lambda: not (node.home / "state/clusterctl/warm").exists(), what="nothing left")


def test_whoever_ends_a_run_while_it_is_about_to_be_kept_ends_what_would_be(node: Node) -> None:
    job = job_of(node)
    talk = node.talk()
    job.prepare(talk)
    node.follow(talk)
    job.begin(talk, inject=True)
    talk.wait_for("swept")
    first = talk.post(Command.FINISH, **node.where, state="finished", exit_code=0, keep=True)
    second = talk.post(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    assert [talk.answer(number) for number in (first, second)] == [{}, {}]
    wait_for(lambda: not node.supervised(), what="the end of the supervisor")
    wait_for(lambda: not kept(node), what="the end of what would be kept")


@pytest.mark.parametrize("left", [1, 2, 3])
def test_who_has_no_descriptor_left_to_ask_for_what_is_kept_finds_nothing_and_harms_nothing(
    node: Node, left: int
) -> None:
    kept_job(node)
    free = os.dup(0)
    os.close(free)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, usual[1]))
    try:
        asked = ask(RunDir(str(node.home / "state/clusterctl"), "another", node.node))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert asked is None
    assert len(keepers(node)) == 1


def grown(node: Node) -> dict[str, int]:
    """What a keeper and its zygote have, beside what each run may add a little to: their memory."""
    (holder,), (zygote,) = keepers(node), kept(node)
    wait_for(lambda: children(holder) == [zygote], what="the zygote alone")
    return {
        "descriptors of the keeper": len(os.listdir(f"/proc/{holder}/fd")),
        "descriptors of the zygote": len(os.listdir(f"/proc/{zygote}/fd")),
        "areas of the keeper": Path(f"/proc/{holder}/maps").read_text().count("\n"),
        "areas of the zygote": Path(f"/proc/{zygote}/maps").read_text().count("\n"),
    }


def test_run_after_run_nothing_grows(node: Node) -> None:
    job = job_of(node)
    seen = []
    for number in range(5):
        ran, _ = run(anew(job))
        assert warm(ran) is bool(number)
        wait_for(lambda: kept(node), what="the zygote that is kept")
        seen.append(grown(node))
    assert seen[-1] == seen[1], seen
