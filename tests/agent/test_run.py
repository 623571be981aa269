"""A run on one node: starting, ending, following."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent import inject
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import BIN, gone
from tests.agent.talk import Refused
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.agent.conftest import Node

SLEEP = ["sleep", "1000"]
WEIRD = [
    "a'; echo foo",
    "$(id)",
    "`id`",
    "two\nlines",
    "ünï-日本",
    "-rf",
    "--",
    "",
    " ",
    '"',
    "\\",
    "*",
    "\udcff\udc80",
]


def sh(text: str) -> list[str]:
    return ["/bin/sh", "-c", text]


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [
        pytest.param("exit 0", 0, None, id="success"),
        pytest.param("exit 3", 3, None, id="exit-code"),
        pytest.param("kill -9 $$", None, signal.SIGKILL, id="sigkill"),
        pytest.param("kill -11 $$", None, signal.SIGSEGV, id="sigsegv"),
    ],
)
def test_how_a_worker_ended_is_told_exactly(node: Node, script: str, code: int | None, number: int | None) -> None:
    talk = node.launch(sh(script))
    talk.wait_for("swept")
    assert (talk.exits()[0]["exit_code"], talk.exits()[0]["signal"]) == (code, number)
    assert not talk.exits()[0]["stopped"]


def test_a_worker_of_a_node_named_by_an_ipv6_address_is_watched_and_finds_nothing_new_on_its_path(node: Node) -> None:
    node.node = "fd00::12"
    (node.home / "work").mkdir()
    (node.home / "work/types.py").write_text("raise SystemExit('the workdir shadows the standard library')\n")
    talk = node.talk()
    node.prepare(talk)
    node.follow(talk)
    show = (
        "import sys; print('_clusterctl_shim' in sys.modules, [p for p in sys.path[1:] if p.startswith(sys.argv[1])])"
    )
    argv = [sys.executable, "-c", show, str(node.home)]
    worker = {"rank": 0, "local_rank": 0, "argv": argv, "env": {"RANK": "0"}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker])
    talk.wait_for("swept")
    ours = Path(inject.get_shim_folder(str(node.home / "state/clusterctl")))
    expected = f"True {[str(ours), str(ours / '_clusterctl_lib')]}\n".encode()
    talk.until(lambda: len(talk.files.get("attempt-0/rank-0.log", b"")) >= len(expected))
    assert talk.files["attempt-0/rank-0.log"] == expected


def test_events_come_in_the_promised_order(node: Node) -> None:
    talk = node.launch(sh("exit 0"), sh("exit 0"))
    talk.wait_for("swept")
    talk.ask(Command.FINISH, **node.where, state="succeeded", exit_code=0)
    talk.wait_for("finished")
    kinds = talk.kinds()
    assert kinds[0] == "prepared"
    assert sorted(kinds[1:5]) == ["exited", "exited", "started", "started"]
    assert kinds[5:] == ["swept", "finished"]
    assert [event["seq"] for event in talk.events] == list(range(1, len(talk.events) + 1))


def test_the_end_of_a_failed_workers_output_comes_with_its_exit(node: Node) -> None:
    talk = node.launch(sh("echo dying; exit 1"))
    talk.wait_for("exited")
    assert talk.exits()[0]["tail"] == "dying\n"


@pytest.mark.parametrize(
    ("script", "last"),
    [
        pytest.param(
            "try: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()",
            "ZeroDivisionError: division by zero",
            id="traceback",
        ),
        pytest.param("print('x' * 5000, 'no checkpoint')", "no checkpoint", id="last_line"),
    ],
)
def test_of_a_worker_that_ended_with_0_the_end_of_its_output_is_told(node: Node, script: str, last: str) -> None:
    talk = node.launch([sys.executable, "-c", f"import traceback\n{script}"])
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 0
    assert talk.exits()[0]["tail"].strip().endswith(last)
    assert len(talk.exits()[0]["tail"]) <= 1024


def test_of_a_worker_that_was_stopped_a_traceback_is_told_that_it_had_printed_before(node: Node) -> None:
    script = (
        "import signal, sys, time, traceback\n"
        "def end(*_): print('told to end', flush=True); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "try: {}['step']\nexcept KeyError: traceback.print_exc()\n"
        "open('ready', 'w').close()\n"
        "time.sleep(1000)\n"
    )
    fails = "import os, sys, time\nwhile not os.path.exists('ready'): time.sleep(0.01)\nsys.exit(1)\n"
    talk = node.launch([sys.executable, "-c", script], [sys.executable, "-c", fails])
    talk.wait_for("swept")
    assert talk.exits()[0]["stopped"]
    assert talk.exits()[0]["tail"].endswith("KeyError: 'step'\n")


def test_what_torch_elastic_wrote_about_an_error_comes_with_the_exit(node: Node) -> None:
    inner = {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1"}}
    script = f"printf '%s' '{json.dumps({'message': inner})}' > $TORCHELASTIC_ERROR_FILE; exit 1"
    talk = node.launch(sh(script))
    talk.wait_for("exited")
    assert talk.exits()[0]["error"] == {"message": "ValueError: no", "traceback": "Traceback ..."}


def test_a_failing_worker_makes_the_node_stop_the_others_by_itself(node: Node) -> None:
    talk = node.launch(SLEEP, sh("exit 7"), SLEEP)
    talk.wait_for("swept")
    assert [event["reason"] for event in talk.of("stopping")] == ["peer_failed"]
    assert {rank: event["stopped"] for rank, event in talk.exits().items()} == {0: True, 1: False, 2: True}


def test_a_worker_that_ends_well_leaves_the_others_alone(node: Node) -> None:
    talk = node.launch(sh("exit 0"), SLEEP)
    talk.wait_for("exited")
    talk.ask(Command.STATUS, **node.where)
    assert not talk.of("stopping")


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(node: Node) -> None:
    talk = node.launch(sh("trap '' TERM; echo ready; while :; do sleep 0.05; done"))
    talk.until(lambda: b"ready" in talk.files.get("attempt-0/rank-0.log", b""))
    node.stop(talk, grace=0.5)
    talk.wait_for("swept")
    stopping, end = talk.of("stopping")[0], talk.exits()[0]
    assert end["signal"] == signal.SIGKILL
    assert end["stopped"]
    assert end["latest"] - stopping["mono"] >= 0.5


def test_a_stopped_process_ends_within_the_grace(node: Node) -> None:
    talk = node.launch(sh("echo ready; kill -STOP $$; sleep 1000"))
    talk.until(lambda: b"ready" in talk.files.get("attempt-0/rank-0.log", b""))
    node.stop(talk, grace=30)
    talk.wait_for("swept", seconds=15)
    assert talk.exits()[0]["signal"] == signal.SIGTERM


def test_a_second_stop_shortens_the_grace(node: Node) -> None:
    talk = node.launch(sh("trap '' TERM; echo ready; while :; do sleep 0.05; done"))
    talk.until(lambda: b"ready" in talk.files.get("attempt-0/rank-0.log", b""))
    node.stop(talk, grace=1000)
    node.stop(talk, grace=0)
    talk.wait_for("swept")
    assert len(talk.of("stopping")) == 1


def test_prepare_and_stop_may_be_repeated(node: Node) -> None:
    talk = node.talk()
    first = node.prepare(talk, ports=[0])
    assert node.prepare(talk, ports=[0]) == first
    node.follow(talk)
    node.stop(talk)
    talk.wait_for("swept")
    node.stop(talk)
    assert talk.kinds() == ["prepared", "stopping", "swept"]


def test_starting_twice_starts_once(node: Node) -> None:
    talk = node.launch(SLEEP)
    node.start(talk, SLEEP)
    node.stop(talk)
    talk.wait_for("swept")
    assert len(talk.of("started")) == 1


def test_attempts_follow_each_other_with_fresh_ports(node: Node) -> None:
    talk = node.launch(sh("exit 1"), ports=[0])
    talk.wait_for("swept")
    node.prepare(talk, attempt=1, ports=[0])
    node.start(talk, sh("echo again"), attempt=1)
    talk.wait_for("swept", 2)
    talk.until(lambda: talk.files.get("attempt-1/rank-0.log") == b"again\n")
    assert [event["attempt"] for event in talk.of("prepared")] == [0, 1]


def test_a_new_attempt_is_refused_while_the_old_one_lives(node: Node) -> None:
    talk = node.launch(SLEEP)
    with pytest.raises(Refused, match="attempt 0 .* has not ended"):
        node.prepare(talk, attempt=1)


def test_argv_and_environment_reach_the_worker_unchanged(node: Node) -> None:
    dump = node.home / "dump.json"
    env = {"DUMP": str(dump), "WEIRD": "\n".join(WEIRD), "PYTHONUTF8": "1"}
    talk = node.launch([sys.executable, str(BIN / "dump.py"), *WEIRD], env=env)
    talk.wait_for("swept")
    seen = json.loads(dump.read_text())
    assert seen["argv"] == WEIRD
    assert seen["env"]["WEIRD"].encode("latin-1") == "\n".join(WEIRD).encode("utf-8", "surrogateescape")


def test_a_worker_starts_in_a_clean_process(node: Node) -> None:
    dump = node.home / "dump.json"
    talk = node.launch(["{python}", str(BIN / "dump.py")], env={"DUMP": str(dump)}, ports=[0], python=sys.executable)
    talk.wait_for("swept")
    seen = json.loads(dump.read_text())
    assert seen["sid"] == seen["pid"]
    assert seen["stdin"] == "/dev/null"
    assert seen["cwd"] == str(node.home / "work")
    assert len(seen["fds"]) <= 5  # 0, 1, 2, the listing itself, the file being written
    assert "SigBlk:\t0000000000000000\n" in seen["blocked"]
    assert seen["env"]["CLUSTERCTL_RUN_ID"] == node.run
    assert seen["env"]["CLUSTERCTL_NODE"] == node.node


def test_a_prologue_runs_before_the_worker_in_the_same_process(node: Node) -> None:
    dump = node.home / "dump.json"
    argv = ["{python}", str(BIN / "dump.py"), *WEIRD]
    prologue = "export FROM_PROLOGUE='it ran'\ncd /  # a comment at the end"
    talk = node.launch(argv, env={"DUMP": str(dump), "PYTHONUTF8": "1"}, prologue=prologue, python=sys.executable)
    talk.wait_for("swept")
    seen = json.loads(dump.read_text())
    assert (seen["env"]["FROM_PROLOGUE"], seen["cwd"], seen["argv"]) == ("it ran", "/", WEIRD)
    assert seen["pid"] == talk.of("started")[0]["pid"]


@pytest.mark.parametrize(
    ("prologue", "code", "said"),
    [
        pytest.param("export A=1\nload-that-is-not cuda\nexport B=2", 127, "line 2: load-that-is-not", id="fails"),
        pytest.param("(exit 7)", 7, "the prologue failed with status 7", id="with its status"),
        pytest.param("exit 9", 9, "the prologue failed with status 9", id="leaves"),
        pytest.param("false || true\nif false; then :; fi\n! true", 0, "ran", id="asks"),
        pytest.param("set +e\nfalse", 0, "ran", id="is told to go on"),
    ],
)
def test_a_worker_runs_only_after_a_prologue_that_went_well(node: Node, prologue: str, code: int, said: str) -> None:
    talk = node.launch(["echo", "ran"], prologue=prologue)
    talk.wait_for("swept")
    assert talk.of("exited")[0]["exit_code"] == code
    talk.until(lambda: said.encode() in talk.files.get("attempt-0/rank-0.log", b""))
    assert (b"ran" in talk.files["attempt-0/rank-0.log"].split()) is (code == 0)


def fake_python(folder: Path) -> str:
    """Make an interpreter that says where it lies, by the names that a venv has."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\necho run by {folder.name}\n")
        (folder / "bin" / name).chmod(0o755)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(
    ("argv", "prologue", "named", "by"),
    [
        pytest.param(["{python}", "x.py"], "PATH=$HERE/other/bin:$PATH", None, "other", id="script of a prologue"),
        pytest.param(["{python}", "x.py"], "export A=1", None, "own", id="script of a prologue that chooses none"),
        pytest.param(
            ["{python}", "x.py"], "PATH=$HERE/other/bin:$PATH", "own/bin/python", "own", id="script of a path"
        ),
        pytest.param(["python3"], None, "own/bin/python", "own", id="command"),
        pytest.param(["bash", "-c", "python x.py"], None, None, "own", id="text of a command"),
        pytest.param(["python"], "PATH=$HERE/other/bin:$PATH", "own/bin/python", "other", id="command of a prologue"),
    ],
)
def test_the_python_of_a_worker_is_that_of_its_job(
    node: Node, argv: list[str], prologue: str | None, named: str | None, by: str
) -> None:
    own = fake_python(node.home / "work" / "own")
    fake_python(node.home / "work" / "other")
    env = {"HERE": str(node.home / "work")}
    talk = node.launch(argv, prologue=prologue, python=named, python_hint=own, env=env)
    talk.wait_for("swept")
    talk.until(lambda: talk.files.get("attempt-0/rank-0.log") == f"run by {by}\n".encode())


def test_a_folder_is_no_python(node: Node) -> None:
    fake_python(node.home / "work" / "own")
    with pytest.raises(Refused, match="`own` on this node is a folder, not an interpreter"):
        node.prepare(node.talk(), python="own")


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        pytest.param(
            ["/no/such/python", "x"], 127, b"cannot run `/no/such/python`: No such file", id="no-such-program"
        ),
        pytest.param(
            ["no-such-command"], 127, b"cannot run `no-such-command`: no such program on PATH", id="not-on-path"
        ),
        pytest.param(["/etc/passwd"], 126, b"cannot run `/etc/passwd`: Permission denied", id="not-executable"),
    ],
)
def test_a_program_that_cannot_run_says_so_in_its_output(node: Node, argv: list[str], code: int, text: bytes) -> None:
    talk = node.launch(argv)
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == code
    talk.until(lambda: text in talk.files.get("attempt-0/rank-0.log", b""))


def test_an_interpreter_that_is_not_there_is_refused_at_prepare(node: Node) -> None:
    with pytest.raises(Refused, match="no interpreter `/no/python3`"):
        node.prepare(node.talk(), python="/no/python3")


def test_a_script_that_is_not_there_is_refused_at_prepare(node: Node) -> None:
    with pytest.raises(Refused, match="there is no file `/no/train.py` on this node"):
        node.prepare(node.talk(), script="/no/train.py")


def test_what_nobody_asked_for_is_not_done_without_an_epoch(node: Node) -> None:
    talk = node.launch(SLEEP)
    reader = node.talk(epoch=None)
    with pytest.raises(Refused, match="needs an epoch"):
        node.stop(reader)
    assert reader.ask(Command.STATUS, **node.where)["workers"][0]["alive"]
    assert talk.ask(Command.STATUS, **node.where)["state"] == "started"


def test_an_old_epoch_is_refused_and_its_session_stops_following(node: Node) -> None:
    old = node.launch(SLEEP)
    new = node.talk(epoch=2)
    node.follow(new)
    with pytest.raises(Refused, match="stale_epoch"):
        node.stop(old)
    node.stop(new)
    new.wait_for("swept")
    assert "stopping" not in old.kinds()


@pytest.mark.parametrize("command", [Command.STOP, Command.FINISH])
def test_a_prepare_that_arrives_after_the_end_of_its_run_starts_nothing(node: Node, command: Command) -> None:
    old, new = node.talk(), node.talk(epoch=2)

    assert new.ask(command, **node.where, grace=0.0, reason="cancelled") == {}

    with pytest.raises(Refused, match="stale_epoch"):
        node.prepare(old)
    assert not node.supervised()
    assert new.ask(Command.STATUS, **node.where)["state"] == "new"


def test_a_supervisor_that_was_asked_for_nothing_ends_with_who_started_it(node: Node) -> None:
    talk = node.talk()
    with pytest.raises(Refused, match="no interpreter"):
        node.prepare(talk, python="/no/python3")
    assert node.supervised()

    talk.kill()

    node.talk(epoch=None).eventually(lambda: not node.supervised())


def test_a_finished_run_leaves_no_process_and_can_still_be_read(node: Node) -> None:
    talk = node.launch(sh("echo done"))
    talk.wait_for("swept")
    supervisor = node.supervisor()
    talk.ask(Command.FINISH, **node.where, state="succeeded", exit_code=0)
    talk.eventually(lambda: gone(supervisor))
    again = node.talk(epoch=None)
    node.follow(again)
    again.wait_for("finished")
    again.until(lambda: again.files.get("attempt-0/rank-0.log") == b"done\n")


def test_following_goes_on_from_the_cursors(node: Node) -> None:
    talk = node.launch(sh("echo one two three"))
    talk.wait_for("swept")
    again = node.talk(epoch=None)
    node.follow(again, seq=2, cursors={"attempt-0/rank-0.log": 4})
    again.wait_for("swept")
    again.until(lambda: again.files.get("attempt-0/rank-0.log") == b"two three\n")
    assert [event["seq"] for event in again.events] == [3, 4]
    assert again.starts["attempt-0/rank-0.log"] == 4


def test_a_command_for_an_unknown_run_is_not_found(node: Node) -> None:
    talk = node.talk()
    for command, more in (
        (Command.START, {"attempt": 0, "workers": []}),
        (Command.STATUS, {}),
        (Command.FOLLOW, {"seq": 0}),
    ):
        with pytest.raises(Refused, match="not_found"):
            talk.ask(command, **node.where, **more)


def test_secrets_reach_workers_and_go_with_the_run(node: Node) -> None:
    talk = node.talk()
    node.prepare(talk)
    node.follow(talk)
    secret = uuid.uuid4().hex
    worker = {"rank": 0, "local_rank": 0, "argv": sh("echo $TOKEN"), "env": {}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], secrets={"TOKEN": secret}, keep_secrets=True)
    talk.wait_for("swept")
    node.prepare(talk, attempt=1)
    talk.ask(Command.START, **node.where, attempt=1, workers=[worker], keep_secrets=True)
    talk.wait_for("swept", 2)
    talk.until(lambda: talk.files.get("attempt-1/rank-0.log") == f"{secret}\n".encode())
    assert kept_secrets(node, secret)
    talk.ask(Command.FINISH, **node.where, state="succeeded", exit_code=0)
    assert kept_secrets(node, secret) == []


def test_an_attempt_whose_secrets_are_gone_is_refused_by_their_names(node: Node) -> None:
    talk = node.talk()
    node.prepare(talk)
    node.follow(talk)
    worker = {"rank": 0, "local_rank": 0, "argv": ["true"], "env": {}}
    secret = uuid.uuid4().hex
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], secrets={"TOKEN": secret}, keep_secrets=True)
    talk.wait_for("swept")
    for path in kept_secrets(node, secret):
        path.unlink()
    node.prepare(talk, attempt=1)
    with pytest.raises(Refused, match=f"the secrets of run {node.run} are not stored on this node: TOKEN"):
        talk.ask(Command.START, **node.where, attempt=1, workers=[worker], keep_secrets=True)


@pytest.mark.parametrize("dead", ["nobody", "the supervisor"])
def test_secrets_go_when_the_fence_expires(node: Node, dead: str) -> None:
    talk = node.talk()
    node.prepare(talk, stop_after=3.0, grace=0.2)
    secret = uuid.uuid4().hex
    worker = {"rank": 0, "local_rank": 0, "argv": SLEEP, "env": {}}
    talk.ask(Command.START, **node.where, attempt=0, workers=[worker], secrets={"TOKEN": secret}, keep_secrets=True)
    assert kept_secrets(node, secret)
    talk.kill()
    if dead == "the supervisor":
        os.kill(node.supervisor(), signal.SIGKILL)
    wait_for(lambda: not kept_secrets(node, secret), what="the secrets to be gone", every=0.1)


def kept_secrets(node: Node, text: str) -> list[Path]:
    """Files of secrets with this text, in memory or with the run; those of other runs come and go meanwhile."""
    held = []
    for top in ("/dev/shm", node.home):
        for folder, _, names in os.walk(top):
            for path in (Path(folder, name) for name in names if name.endswith(".secrets")):
                with contextlib.suppress(OSError):
                    held += [path] * (text.encode() in path.read_bytes())
    return held


def test_processes_of_ours_are_told_apart_by_their_command_line(node: Node) -> None:
    node.launch(SLEEP)
    supervisor, waiter = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (node.supervisor(), node.waiter()))
    assert supervisor.startswith(b"clusterctl-agent supervise")
    assert waiter.startswith(b"clusterctl-agent wait")


def test_nobody_learns_the_names_of_a_run_from_command_lines(node: Node) -> None:
    node.launch(SLEEP)
    for pid in (node.supervisor(), node.waiter()):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert node.run.encode() not in line
        assert node.node.encode() not in line


def test_supervisor_and_waiter_leave_no_core_dump_and_a_worker_may(node: Node) -> None:
    usual = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (usual[1], usual[1]))
    try:
        talk = node.launch(SLEEP)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, usual)
    worker = talk.wait_for("started")[0]["pid"]
    # It has its limits back once it has become its program.
    talk.eventually(lambda: resource.prlimit(worker, resource.RLIMIT_CORE)[0] == usual[1])
    assert [resource.prlimit(pid, resource.RLIMIT_CORE)[0] for pid in (node.supervisor(), node.waiter())] == [0, 0]


def test_samples_of_activity_and_health_are_followed(node: Node) -> None:
    talk = node.launch(SLEEP, sample_seconds=0.3, health_seconds=0.5)
    kinds = set()

    def both() -> bool:
        lines = bytes(talk.files.get("samples.jsonl", b"")).split(b"\n")[:-1]
        kinds.update(json.loads(line)["kind"] for line in lines)
        return kinds == {"activity", "health"}

    talk.until(both)
    sample = json.loads(bytes(talk.files["samples.jsonl"]).split(b"\n")[0])
    assert sample["ranks"]["0"]["alive"]
