"""The process from which ranks are forked: when it is not used, how long it lives, and what holds without it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import gone
from tests.agent.started import Job, Ran
from tests.agent.test_start_methods import installed, path_of
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.agent.conftest import Node
    from tests.agent.talk import Talk

UNTIL_TERM = "import signal\nsignal.pause()\n"


def job_of(node: Node, text: str, *arguments: str, **options: Any) -> Job:
    made = Job(node, "fork", "train.py", *arguments, **options)
    made.write("train.py", text)
    return made


def forkservers(node: Node) -> list[int]:
    """The forkservers of a run, by their name and the marks of the run."""
    found = []
    for pid in proc.list_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            if file.read() == "clusterctl-fork\n":
                environ = proc.read_environment(pid) or {}
                if environ.get(b"CLUSTERCTL_RUN_ID") == node.run.encode():
                    found.append(pid)
    return found


# --- when it is not used


def refused(job: Job, **more: Any) -> str:
    """Why the workers of a job start anew."""
    talk = job.node.talk()
    job.prepare(talk)
    job.node.follow(talk)
    job.begin(talk, **more)
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 0
    assert not Ran(talk, job.node.folder).forked
    (alarm,) = talk.of("alarm")
    assert (alarm["code"], alarm["severity"]) == ("not_forked", "warn")
    return str(alarm["message"])


REASONS = {
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n": "1 threads",
    "import subprocess\nkept = subprocess.Popen(['sleep', '60'])\n": "has started a process",
    "import socket\nkept = socket.socket()\n": "has opened a connection",
    "import mmap\nshared = mmap.mmap(-1, 4096)\n": "shares memory",
    "import os\nwho = os.environ.get('RANK', '0')\n": "has read RANK",
    "import sys\nsys.settrace(lambda *_: None)\n": "a tracer or a profiler is active",
    "raise RuntimeError('no licence')\n": "`import special` failed: RuntimeError: no licence",
    "import sys\nsys.exit(3)\n": "`import special` failed: SystemExit: 3",
    "import friend\n": "`import special` failed: ModuleNotFoundError: No module named 'friend'",
    "import os\nos._exit(5)\n": "has ended",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n": "has ended",
}


@pytest.mark.parametrize("text", REASONS)
def test_what_a_fork_would_lose_or_share_lets_every_worker_start_anew(node: Node, text: str) -> None:
    installed(node, "special", text)
    job = job_of(node, "print('ran')\n", env=path_of(node), preload=["special"])
    job.write("friend.py", "")
    assert REASONS[text] in refused(job)


def test_code_of_the_users_is_not_preloaded(node: Node) -> None:
    job = job_of(node, "", preload=["friend"])
    job.write("friend.py", "")
    assert "`friend` is not installed" in refused(job)


def test_a_module_that_is_not_there_is_named(node: Node) -> None:
    assert "there is no module `nowhere`" in refused(job_of(node, "", preload=["nowhere"]))


def test_a_script_that_is_not_there_fails_as_ever(node: Node) -> None:
    job = job_of(node, "")
    job.argv[1] = "other.py"
    ran = job.run()
    assert (ran.code(), ran.said()) == job.bare()


def test_a_rank_whose_environment_differs_is_started_anew(node: Node) -> None:
    job = job_of(node, "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    assert "CUDA_VISIBLE_DEVICES of the rank had another value" in refused(job, late={"CUDA_VISIBLE_DEVICES": "0"})


def test_what_measures_coverage_starts_anew(node: Node) -> None:
    job = job_of(node, "", env={"COVERAGE_PROCESS_START": "/nowhere/.coveragerc"})
    assert "COVERAGE_PROCESS_START is set" in refused(job)


def test_a_secret_that_imports_read_starts_anew(node: Node) -> None:
    installed(node, "hub", "import os\ntoken = os.environ.get('HF_TOKEN')\n")
    job = job_of(node, "", env=path_of(node), preload=["hub"])
    job.forked["secrets"] = ["HF_TOKEN"]
    assert "has read HF_TOKEN" in refused(job)


def test_without_a_demand_it_is_said_by_the_way(node: Node) -> None:
    job = job_of(node, "", preload=["nowhere"])
    job.forked["demanded"] = False
    talk = node.talk()
    job.prepare(talk)
    node.follow(talk)
    job.begin(talk)
    talk.wait_for("swept")
    assert [alarm["severity"] for alarm in talk.of("alarm")] == ["info"]


@pytest.mark.parametrize("place", ["beside the script", "on PYTHONPATH"])
@pytest.mark.parametrize(
    "module", ["resource", "select", "array", "zipfile", "decimal", "struct", "json", "time", "re"]
)
def test_a_module_of_the_users_is_the_users_whatever_it_is_called(node: Node, module: str, place: str) -> None:
    folder = node.home / "own"
    job = job_of(node, f"import {module}\nprint(vars({module}).get('WHO'))\n", env={"PYTHONPATH": f"{folder}:/nowhere"})
    job.write(f"{folder}/{module}.py" if place == "on PYTHONPATH" else f"{module}.py", "WHO = 'own'\n")
    talk = node.talk()
    job.prepare(talk)
    node.follow(talk)
    job.begin(talk)
    talk.wait_for("swept")
    ran = Ran(talk, node.folder)
    assert (ran.code(), ran.said()) == job.bare()
    assert ran.forked or f"`{module}`" in talk.of("alarm")[0]["message"]


OPTIONAL = "try:\n    import helper\nexcept ImportError:\n    helper = None\n"


@pytest.mark.parametrize("before", [True, False], ids=["in its place", "not there before"])
def test_a_module_of_the_users_that_an_installed_one_would_take_is_taken(node: Node, before: bool) -> None:
    if before:
        installed(node, "helper", "WHO = 'installed'\n")
    installed(node, "special", OPTIONAL)
    job = job_of(node, "import special\nprint(special.helper.WHO)\n", env=path_of(node), preload=["special"])
    job.write("helper.py", "WHO = 'own'\n")
    talk = node.talk()
    job.prepare(talk)
    node.follow(talk)
    job.begin(talk)
    talk.wait_for("swept")
    assert Ran(talk, node.folder).said() == "own\n"
    assert f"a fresh start would import `helper` from {job.work}/helper.py" in talk.of("alarm")[0]["message"]


def test_a_python_that_does_not_look_at_our_path_runs_no_script_by_mistake(node: Node) -> None:
    wrapper = node.home / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    wrapper.chmod(0o755)
    job = job_of(node, "import os\nprint('ran', file=open(f'ran-{os.getpid()}', 'w'))\n")
    job.python = str(wrapper)
    assert "ignores PYTHONPATH" in refused(job)
    assert len(list(job.work.glob("ran-*"))) == 1


# --- how long it lives


def attempt(job: Job, talk: Talk, number: int, *, keep: bool = True) -> None:
    job.prepare(talk, attempt=number, keep=keep)
    if number == 0:
        job.node.follow(talk)
    job.begin(talk, attempt=number, inject=job.forked["inject"])
    talk.wait_for("swept", number + 1)


def test_it_is_kept_for_the_next_attempt_and_goes_with_the_run(node: Node) -> None:
    job, talk = job_of(node, "import os\nprint(os.getpid())\n"), node.talk()
    job.forked["inject"] = True
    attempt(job, talk, 0)
    before = forkservers(node)
    attempt(job, talk, 1)
    assert len(before) == 1
    assert forkservers(node) == before, talk.events
    talk.ask(Command.FINISH, **node.where, state="finished", exit_code=0)
    wait_for(lambda: not forkservers(node), what="the end of the forkserver")


def test_the_last_attempt_that_may_be_imports_nothing_anew(node: Node) -> None:
    installed(node, "special", "with open('imported', 'a') as file:\n    file.write('once ')\n")
    job, talk = job_of(node, "print('ran')\n", env=path_of(node), preload=["special"]), node.talk()
    attempt(job, talk, 0)
    attempt(job, talk, 1, keep=False)
    assert [alarm["code"] for alarm in talk.of("alarm")] == ["forked", "forked"]
    assert (node.home / "work/imported").read_text() == "once "
    wait_for(lambda: not forkservers(node), what="the end of the forkserver")


def test_where_no_other_attempt_may_follow_it_goes_at_once(node: Node) -> None:
    talk = node.talk()
    job = job_of(node, UNTIL_TERM)
    job.prepare(talk, 2)
    node.follow(talk)
    job.begin(talk, 2)
    talk.wait_for("started", 2)
    wait_for(lambda: not forkservers(node), what="the end of the forkserver")
    node.stop(talk)
    talk.wait_for("swept")
    assert {event["signal"] for event in talk.of("exited")} == {signal.SIGTERM}


def test_what_has_changed_on_the_disk_is_imported_again(node: Node) -> None:
    file = installed(node, "special", "VALUE = 'first'\n")
    job = job_of(node, "import special\nprint(special.VALUE)\n", env=path_of(node), preload=["special"])
    talk = node.talk()
    attempt(job, talk, 0)
    before = forkservers(node)
    file.write_text("VALUE = 'another one'\n")
    attempt(job, talk, 1)
    ran = Ran(talk, node.folder)
    assert (ran.said(attempt=0), ran.said(attempt=1)) == ("first\n", "another one\n")
    assert forkservers(node) not in ([], before)


def test_what_was_installed_since_is_seen(node: Node) -> None:
    installed(node, "special", OPTIONAL)
    job = job_of(node, "import special\nprint(special.helper)\n", env=path_of(node), preload=["special"])
    talk = node.talk()
    attempt(job, talk, 0)
    before = forkservers(node)
    installed(node, "helper", "")
    attempt(job, talk, 1)
    ran = Ran(talk, node.folder)
    assert ran.said(attempt=0) == "None\n"
    assert "module 'helper'" in ran.said(attempt=1)
    assert forkservers(node) not in ([], before)


def test_one_that_was_killed_between_two_attempts_is_replaced(node: Node) -> None:
    job, talk = job_of(node, "print('ran')\n"), node.talk()
    attempt(job, talk, 0)
    (pid,) = forkservers(node)
    os.kill(pid, signal.SIGKILL)
    attempt(job, talk, 1)
    assert [alarm["code"] for alarm in talk.of("alarm")].count("forked") == 2


def test_one_that_is_killed_while_it_imports_lets_every_worker_start_anew(node: Node) -> None:
    installed(node, "slow", "import signal\nsignal.pause()\n")
    job, talk = job_of(node, "print('ran')\n", env=path_of(node), preload=["slow"]), node.talk()
    job.prepare(talk)
    node.follow(talk)
    number = talk.post(
        Command.START,
        **node.where,
        attempt=0,
        workers=[{"rank": 0, "local_rank": 0, "argv": job.argv, "env": {**job.env, "RANK": "0"}}],
        inject=False,
    )
    (pid,) = wait_for(lambda: forkservers(node), what="the forkserver")
    assert number not in talk.replies
    os.kill(pid, signal.SIGKILL)
    talk.answer(number)
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 0


def test_a_stop_does_not_wait_for_imports(node: Node) -> None:
    installed(node, "slow", "import signal\nsignal.pause()\n")
    job, talk = job_of(node, "print('ran')\n", env=path_of(node), preload=["slow"]), node.talk()
    job.prepare(talk)
    node.follow(talk)
    number = talk.post(Command.START, **node.where, attempt=0, workers=[], inject=False)
    wait_for(lambda: forkservers(node), what="the forkserver")
    node.stop(talk)
    talk.wait_for("swept")
    with pytest.raises(Exception, match="already stopped on this node"):
        talk.answer(number)
    talk.ask(Command.FINISH, **node.where, state="cancelled", exit_code=103)
    wait_for(lambda: not forkservers(node), what="the end of the forkserver")
    assert "started" not in talk.kinds()


# --- what holds without the supervisor, and for a sweep


def running(node: Node, text: str = UNTIL_TERM, ranks: int = 2, **options: Any) -> Talk:
    talk = node.talk()
    job = job_of(node, text, **options)
    job.prepare(talk, ranks, keep=True)
    node.follow(talk)
    job.begin(talk, ranks)
    talk.wait_for("started", ranks)
    assert talk.wait_for("alarm")[0]["code"] == "forked"
    return talk


def test_it_ends_with_its_supervisor_and_the_workers_do_not(node: Node) -> None:
    talk = running(node)
    pids = [event["pid"] for event in talk.of("started")]
    assert len(forkservers(node)) == 1
    os.kill(node.supervisor(), signal.SIGKILL)
    wait_for(lambda: not forkservers(node), what="the end of the forkserver")
    assert not any(gone(pid) for pid in pids)
    talk.wait_for("adopted")
    node.stop(talk)
    talk.wait_for("swept")
    assert {event["signal"] for event in talk.of("exited")} == {signal.SIGTERM}


def test_an_exit_is_known_although_nobody_was_there(node: Node) -> None:
    talk = running(
        node, "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\nraise SystemExit(7)\n", 1
    )
    supervisor, worker = node.supervisor(), talk.of("started")[0]["pid"]
    talk.kill()
    os.kill(supervisor, signal.SIGKILL)
    (node.home / "work/go").touch()
    wait_for(lambda: gone(worker), what="the end of the worker")
    again = node.talk()
    node.follow(again)
    again.ask(Command.STOP, **node.where, grace=1.0, reason="cancelled")
    again.wait_for("swept")
    assert again.exits()[0]["exit_code"] == 7


def test_the_supervisor_sees_the_exit_of_a_worker_whose_waiter_is_gone(node: Node) -> None:
    talk = running(
        node,
        "import os, time\nopen('up', 'w')\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\nraise SystemExit(8)\n",
        1,
    )
    # Killed before it opens the gate, it would take the worker along.
    wait_for((node.home / "work/up").exists, what="the worker")
    os.kill(node.waiter(), signal.SIGKILL)
    (node.home / "work/go").touch()
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 8


def test_a_waiter_is_a_small_process_of_the_agent_and_at_last_a_child_of_the_supervisor(node: Node) -> None:
    running(node)
    (pid,) = forkservers(node)
    assert {proc.read_stat(node.waiter(rank)).ppid for rank in (0, 1)} == {pid}  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    # The kernel gives the children of a process away at the very end of its exit: after its memory and environment.
    wait_for(
        lambda: {proc.read_stat(node.waiter(rank)).ppid for rank in (0, 1)} == {node.supervisor()},  # type: ignore[union-attr]
        what="the waiters as children of the supervisor",
    )
    assert not forkservers(node)
    for rank in (0, 1):
        found = proc.read_stat(node.waiter(rank))
        assert found is not None
        assert (found.comm, found.sid) == ("clusterctl-wait", found.pid)
        environ = proc.read_environment(found.pid) or {}
        # Its Python may need variables of the login to start, such as LD_LIBRARY_PATH.
        assert b"PATH" in environ
        assert b"CLUSTERCTL_RUN_ID" not in environ


def test_a_fence_ends_workers_that_were_forked_although_the_supervisor_is_gone(node: Node) -> None:
    talk = running(node, stop_after=3.0)
    pids = [event["pid"] for event in talk.of("started")]
    supervisor = node.supervisor()
    os.kill(supervisor, signal.SIGSTOP)
    talk.kill()
    wait_for(lambda: all(gone(pid) for pid in pids), 60, what="the end of the workers")
    os.kill(supervisor, signal.SIGKILL)
    again = node.talk()
    node.follow(again)
    again.ask(Command.STOP, **node.where, grace=1.0, reason="cancelled")
    again.wait_for("swept")
    assert {event["signal"] for event in again.of("exited")} == {signal.SIGTERM}
    wait_for(lambda: not forkservers(node), what="the end of the forkserver")


def test_what_a_forked_worker_leaves_behind_is_found(node: Node) -> None:
    text = """
import os, signal, subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execve("/bin/sleep", ["stray", "86400"], {})
    os._exit(0)
signal.pause()
"""
    talk = running(node, text, 1)
    node.stop(talk)
    assert talk.wait_for("swept")[0]["killed"] >= 1
    assert len(forkservers(node)) == 1


def test_the_value_of_a_secret_does_not_stay_in_the_memory_of_a_forkserver(node: Node) -> None:
    talk, value = node.talk(), "".join(["tok", "en-", "7f3a9c"])
    job = job_of(node, "import os\nprint(os.environ['TOKEN'], flush=True)\n" + UNTIL_TERM)
    job.forked["secrets"] = ["TOKEN"]
    job.prepare(talk, keep=True)
    node.follow(talk)
    workers = [{"rank": 0, "local_rank": 0, "argv": job.argv, "env": {**job.env, "RANK": "0"}}]
    secrets = {"secrets": {"TOKEN": value}, "keep_secrets": True}
    talk.ask(Command.START, **node.where, attempt=0, workers=workers, inject=False, **secrets)
    talk.wait_for("started")
    ran = Ran(talk, node.folder)
    wait_for(lambda: ran.said() == f"{value}\n", what="the rank's output")
    (pid,) = forkservers(node)
    assert value.encode() in memory(talk.of("started")[0]["pid"])
    assert value.encode() not in memory(pid)


def memory(pid: int) -> bytes:
    """What a process has in its memory, as far as it can be written."""
    found = bytearray()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for line in maps:
            place, rights, *_ = line.split()
            start, end = (int(number, 16) for number in place.split("-"))
            if rights.startswith("rw"):
                file.seek(start)
                found += file.read(end - start)
    return bytes(found)
