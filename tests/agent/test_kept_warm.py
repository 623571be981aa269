"""What a run has imported is kept for the next one of the same job: when it is used, when it is not, and how it ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.members import guardians
from clusterctl.agent.members.marks import marks_of
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.record.rundir import RunDir
from clusterctl.agent.supervisor.forking import keeper
from tests.agent.conftest import Node, gone
from tests.agent.started import Job, Ran
from tests.agent.test_early_imports import COUNTED, imported
from tests.agent.test_start_methods import installed, path_of
from tests.agent.test_zygote import zygotes
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.agent.talk import Talk

WARM = 60.0
SAYS = "import os, special\nprint('ran', os.environ['CLUSTERCTL_RUN_ID'])\n"


def job_of(node: Node, text: str = SAYS, special: str = COUNTED, **more: Any) -> Job:
    installed(node, "special", special)
    job = Job(node, "fork", "train.py", env={**path_of(node), **more}, preload=["special"])
    job.forked |= {"inject": True, "keep_warm": WARM}
    job.write("train.py", text)
    return job


def run(job: Job, talk: Talk | None = None, *, keep: bool = True, **asked: Any) -> tuple[Ran, dict[str, Any]]:
    """Run a job to its end; return what became of it, and what the node says of its end."""
    talk = talk or job.node.talk()
    job.prepare(talk, **asked)
    job.node.follow(talk)
    job.begin(talk, inject=True)
    talk.wait_for("swept")
    ran = Ran(talk, job.node.folder)
    assert (ran.code(), ran.said()) == (0, f"ran {job.node.run}\n")
    return ran, finish(job, talk, keep=keep)


def finish(job: Job, talk: Talk, *, keep: bool = True) -> dict[str, Any]:
    answer = talk.ask(Command.FINISH, **job.node.where, state="finished", exit_code=0, keep=keep)
    wait_for(lambda: not job.node.supervised(), what="the end of the supervisor")
    return answer


def anew(job: Job) -> Job:
    """The same job, for another run."""
    job.node.run = f"run-{uuid.uuid4().hex[:10]}"
    return job


def keepers(node: Node) -> list[int]:
    """Who listens where the next run of this node asks."""
    place = node.home / "state/clusterctl/warm" / node.node
    names = {entry.name for entry in place.iterdir()} if place.is_dir() else set()
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    sockets = {f"socket:[{row[6]}]" for row in rows if len(row) > 7 and os.path.basename(row[7]) in names}
    titles = [pid for pid in proc.pids() if proc.command(pid) == "clusterctl-agent keep"]
    return [pid for pid in titles if sockets & proc.open_files(pid)]


def kept(node: Node) -> list[int]:
    """The zygotes that are kept for the next run of this node."""
    holders = keepers(node)
    found = [process for pid in proc.pids() if holders and (process := proc.stat(pid)) is not None]
    return [process.pid for process in found if process.ppid in holders and not process.gone]


def warm(ran: Ran) -> bool:
    return any("was kept warm" in alarm["message"] for alarm in ran.talk.of("alarm"))


@pytest.fixture(autouse=True)
def nothing_stays(node: Node) -> Iterator[None]:
    yield
    for pid in keepers(node):
        os.kill(pid, signal.SIGKILL)


# --- when it is used


def test_the_next_run_is_forked_from_what_the_last_one_has_imported(node: Node) -> None:
    job = job_of(node)
    first, answer = run(job)
    (pid,) = wait_for(lambda: kept(node), what="the zygote that is kept")
    assert answer["kept"]["seconds"] == WARM
    assert answer["kept"]["bytes"] > 1 << 20
    second, _ = run(anew(job))
    assert (warm(first), warm(second), imported(job)) == (False, True, 1)
    assert wait_for(lambda: kept(node), what="the zygote that is kept again") == [pid]


def test_a_run_that_uses_it_is_like_any_other(node: Node) -> None:
    job = job_of(node)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    talk = anew(job).node.talk()
    job.write("train.py", "import special, signal\nsignal.pause()\n")
    job.prepare(talk, 2)
    node.follow(talk)
    job.begin(talk, 2, inject=True)
    talk.wait_for("started", 2)
    (zygote,) = zygotes(node)
    here = RunDir(str(node.home / "state/clusterctl"), node.run, node.node)
    marks = marks_of(here)
    pids = [event["pid"] for event in talk.of("started")]
    assert all(marks.tagged(pid) and marks.named(pid) for pid in (zygote, *pids))
    assert {found.ppid for pid in guardians.waiters(here) if (found := proc.stat(pid.pid))} == {node.supervisor()}
    assert Path(f"/proc/{zygote}/cwd").resolve() == node.home / "work"
    node.stop(talk)
    talk.wait_for("swept")
    assert all(gone(pid) for pid in pids)
    assert {event["signal"] for event in talk.of("exited")} == {signal.SIGTERM}


def test_what_is_kept_is_nobodys(node: Node) -> None:
    job = job_of(node, special="", SECRET="nobody may see this")
    run(job)
    (pid,) = wait_for(lambda: kept(node), what="the zygote that is kept")
    (holder,) = keepers(node)
    marks = marks_of(RunDir(str(node.home / "state/clusterctl"), node.run, node.node))
    assert not any(marks.tagged(one) for one in (pid, holder))
    assert proc.environ(pid) == {}
    assert {os.readlink(f"/proc/{one}/cwd") for one in (pid, holder)} == {"/"}
    opened = {file for one in (pid, holder) for file in proc.open_files(one)}
    assert not [file for file in opened if str(node.home) in file]
    kinds = {file.partition(":")[0] for file in opened}
    assert kinds <= {"/dev/null", "/memfd", "/memfd:output (deleted)", "socket", "anon_inode"}, opened


def test_the_run_that_left_it_can_be_cleaned_away_and_takes_it_along(node: Node) -> None:
    job = job_of(node)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    node.talk().ask(Command.CLEAN, **node.where)
    wait_for(lambda: not kept(node), what="the end of what was kept")
    wait_for(lambda: not (node.home / "state/clusterctl/inject").exists(), what="nothing left")


def test_a_changed_script_runs_as_it_is_now(node: Node) -> None:
    job = job_of(node)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    anew(job).write("train.py", "import special\nimport os\nX = 1\nprint('ran', os.environ['CLUSTERCTL_RUN_ID'])\n")
    assert warm(run(job)[0])
    assert imported(job) == 1


def test_a_run_with_other_arguments_has_these(node: Node) -> None:
    job = job_of(node)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    anew(job).write("train.py", SAYS + "import sys\nopen('seen', 'w').write(' '.join(sys.argv))\n")
    job.argv.append("--lr=1")
    assert warm(run(job)[0])
    assert (job.work / "seen").read_text() == "train.py --lr=1"


def test_nothing_of_the_last_login_is_in_its_ranks(node: Node) -> None:
    job = job_of(node)
    run(job, node.talk(env={"SSH_CONNECTION": "::1 1 ::1 22"}))
    wait_for(lambda: kept(node), what="the zygote that is kept")
    job.write("train.py", SAYS + "open('seen', 'w').write(os.environ['SSH_CONNECTION'])\n")
    ran, _ = run(anew(job), node.talk(env={"SSH_CONNECTION": "::1 2 ::1 22"}))
    assert warm(ran)
    assert (job.work / "seen").read_text() == "::1 2 ::1 22"


def test_two_that_ask_at_once_both_run_and_one_of_them_has_it(node: Node) -> None:
    job = job_of(node)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    talks = []
    for _ in range(2):
        talk = anew(job).node.talk()
        forked = {**job.forked}
        where = {**node.where, "workdir": str(job.work), "ranks": [0], "grace": 1.0, "health_seconds": 0.0}
        number = talk.post(Command.PREPARE, **where, attempt=0, forked=forked, python=job.python)
        talks.append((talk, dict(node.where), number))
    found = []
    for talk, where, number in talks:
        talk.answer(number)
        node.run = where["run"]
        node.follow(talk)
        job.begin(talk, inject=True)
        talk.wait_for("swept")
        assert talk.exits()[0]["exit_code"] == 0
        found.append(any("was kept warm" in alarm["message"] for alarm in talk.of("alarm")))
        finish(job, talk, keep=False)
    assert sorted(found) == [False, True]


# --- when it is not


def not_used(job: Job, talk: Talk | None = None) -> None:
    before = kept(job.node)
    ran, _ = run(job, talk, keep=False)
    assert not warm(ran)
    assert ran.forked, ran.talk.of("alarm")
    assert imported(job) == 2
    wait_for(lambda: all(gone(pid) for pid in before), what="the end of what was kept")


@pytest.fixture
def job(node: Node) -> Job:
    """A job whose imports are kept already; what follows is another run of it."""
    made = job_of(node)
    run(made)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    return anew(made)


def test_a_module_that_has_changed_is_imported_anew(node: Node, job: Job) -> None:
    installed(node, "special", COUNTED + "CHANGED = True\n")
    not_used(job)


def test_a_module_that_was_installed_since_is_looked_for_anew(node: Node, job: Job) -> None:
    installed(node, "another", "")
    not_used(job)


def test_another_variable_means_other_imports(job: Job) -> None:
    job.env["OTHER"] = "1"
    not_used(job)


def test_another_variable_of_the_login_means_other_imports(node: Node, job: Job) -> None:
    not_used(job, node.talk(env={"LD_DEBUG_OUTPUT": "/dev/null"}))


def test_other_arguments_mean_other_imports_where_these_have_looked_at_them(node: Node) -> None:
    job = job_of(node, special=COUNTED + "import sys\nFAST = '--fast' in sys.argv\n")
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    anew(job).argv.append("--fast")
    not_used(job)


def test_another_script_means_other_imports(job: Job) -> None:
    job.write("other.py", SAYS)
    job.argv[1] = "other.py"
    not_used(job)


def test_another_folder_of_the_code_means_other_imports(node: Node, job: Job) -> None:
    other = node.home / "other"
    other.mkdir()
    (other / "train.py").write_text(SAYS)
    job.options["workdir"] = str(other)
    ran, _ = run(job, keep=False)
    assert not warm(ran)


def test_another_limit_is_another_standing(node: Node, job: Job) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, hard))
    try:
        talk = node.talk()
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    not_used(job, talk)


def test_other_processors_are_another_standing(node: Node, job: Job) -> None:
    usual = os.sched_getaffinity(0)
    if len(usual) < 2:
        pytest.skip("needs two processors")
    os.sched_setaffinity(0, {min(usual)})
    try:
        talk = node.talk()
    finally:
        os.sched_setaffinity(0, usual)
    not_used(job, talk)


def test_what_has_read_the_name_of_its_run_is_not_kept(node: Node) -> None:
    job = job_of(node, special=COUNTED + "WHO = os.environ.get('CLUSTERCTL_RUN_ID')\n")
    ran, answer = run(job)
    assert "kept" not in answer
    said = "what was imported is not kept: it has read CLUSTERCTL_RUN_ID, which differs in each run"
    assert ran.talk.wait_for("alarm", 2)[1]["message"] == said
    assert not kept(node)


def test_nothing_is_kept_that_nobody_asked_for(node: Node) -> None:
    job = job_of(node)
    assert "kept" not in run(job, keep=False)[1]
    job.forked["keep_warm"] = 0.0
    assert "kept" not in run(anew(job))[1]
    assert not kept(node)


# --- how it ends


def ended(node: Node) -> None:
    wait_for(lambda: not kept(node), what="the end of what was kept")


def test_it_ends_when_its_time_is_over(node: Node) -> None:
    job = job_of(node)
    job.forked["keep_warm"] = 1.0
    run(job)
    ended(node)


def test_the_next_run_ends_it_that_cannot_use_it(node: Node, job: Job) -> None:
    (pid,) = kept(node)
    job.forked["env"] = job.env = {**job.env, "OTHER": "1"}
    run(job)
    wait_for(lambda: gone(pid), what="the end of what was kept")
    assert len(wait_for(lambda: kept(node), what="another one")) == 1


def test_to_end_the_run_that_left_it_ends_it(node: Node) -> None:
    job = job_of(node)
    run(job)
    wait_for(lambda: kept(node), what="the zygote that is kept")
    node.talk().ask(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    ended(node)


def test_a_killed_keeper_takes_the_zygote_along_and_hinders_nobody(node: Node, job: Job) -> None:
    (pid,), (holder,) = kept(node), keepers(node)
    os.kill(holder, signal.SIGKILL)
    wait_for(lambda: gone(pid), what="the end of the zygote")
    not_used(job)


def test_a_keeper_whose_zygote_is_killed_ends(node: Node, job: Job) -> None:
    (pid,), (holder,) = kept(node), keepers(node)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(holder), what="the end of the keeper")
    not_used(job)


def test_a_keeper_that_does_not_answer_is_ended_and_the_run_starts(node: Node, job: Job) -> None:
    (holder,) = keepers(node)
    os.kill(holder, signal.SIGSTOP)
    not_used(job)
    wait_for(lambda: gone(holder), what="the end of the keeper")


def test_a_signal_ends_it(node: Node, job: Job) -> None:
    (pid,), (holder,) = kept(node), keepers(node)
    os.kill(holder, signal.SIGTERM)
    wait_for(lambda: gone(pid) and gone(holder), what="the end of both")
    not_used(job)


def test_it_ends_where_its_name_is_gone(node: Node, job: Job) -> None:
    (pid,) = kept(node)
    subprocess.run(["rm", "-rf", node.home / "state/clusterctl/warm"], check=True)
    wait_for(lambda: gone(pid), what="the end of the zygote", deadline=20.0)
    not_used(job)


@pytest.mark.parametrize(
    ("available", "size", "may_stay"),
    [(100, 10, True), (99, 10, False), (200, 100, True), (199, 100, False)],
    ids=["a tenth is free", "less is free", "twice its size is free", "less than that"],
)
def test_it_ends_where_memory_gets_short(available: int, size: int, may_stay: bool) -> None:
    assert keeper.enough(1000, available, size) is may_stay
