"""The commands of README and docs on real nodes, and what `exec` leaves behind when it is interrupted."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.host_ranges import fold_hosts
from tests import documented
from tests.documented import typed
from tests.e2e.terminal import Terminal
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.documented import Row
    from tests.lab.conftest import NodeFactory

TRAIN = """\
import os, sys, time
os.makedirs("ckpt", exist_ok=True)
open(f"ckpt/{os.environ['RANK']}", "w").close()
print("training", *sys.argv[1:], flush=True)
time.sleep(600 if os.environ["FOREVER"] else 0)
"""
NVIDIA_SMI = "#!/bin/sh\necho 'GPU 0: a stand-in'\n"
SERVER = """\
import http.server, os, socket
class Name(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(socket.gethostname().encode())
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Name)
with open("/tmp/port.new", "w") as file:
    file.write(str(server.server_port))
os.rename("/tmp/port.new", "/tmp/port")
server.serve_forever()
"""
PIP = "#!/bin/sh\necho keras==3.15.0\n"


@pytest.fixture
def head(tmp_path: Path, head_env: dict[str, str]) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    return Head(folder, head_env)


class Reader:
    """Types the commands of the pages, as somebody does who reads them."""

    def __init__(self, base: Path, env: dict[str, str], nodes: list[str]) -> None:
        self.folders = {name: Head(base / name, env) for name in ("short", "long", "empty", "fresh")}
        self.first = nodes[0]
        for name, head in self.folders.items():
            head.folder.mkdir()
            if name != "fresh":
                (head.folder / "train.py").write_text(TRAIN)
            if name in ("short", "long"):
                job = {"script": "train.py", "grace": "1s"}
                head.write(dict.fromkeys(nodes, 3), job, env={"FOREVER": "1" if name == "long" else ""})
        self.left: list[tuple[Row, subprocess.Popen[str]]] = []

    def type(self, row: Row) -> str:
        """Run a command; return what is wrong with how it went, or nothing."""
        head = self.folders[row.folder]
        words = row.argv(NODE=self.first, **({"RUN": self.newest()} if "RUN" in row.run + row.text else {}))
        if row.how == "end":
            done = subprocess.run(
                words, cwd=head.folder, env=dict(head.env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=60, check=False,
            )  # fmt: skip
            return self.judge(row, done.returncode, done.stderr)
        # A terminal's Ctrl-C goes to the group, so the command needs one of its own.
        process = subprocess.Popen(
            words,
            cwd=head.folder,
            env=dict(head.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if row.how == "background":
            self.left.append((row, process))
            return ""
        assert process.stdout is not None
        shown = any("training" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        return self.judge(row, process.returncode, said) or ("" if shown else f"{row.text}: no output of the job")

    def finish(self) -> list[str]:
        wrong = []
        for row, process in self.left:
            _, said = process.communicate(timeout=30)
            wrong.append(self.judge(row, process.returncode, said))
        return wrong

    def newest(self) -> str:
        return self.folders["short"].newest()

    @staticmethod
    def judge(row: Row, code: int, said: str) -> str:
        wrong = "" if code == row.code else f"{row.text}: {code} instead of {row.code}: {said}"
        print(wrong or row.text)
        return wrong


@pytest.mark.timeout(500)
def test_every_command_of_readme_and_docs_runs(nodes: NodeFactory, tmp_path: Path, head_env: dict[str, str]) -> None:
    made = nodes(2, programs={"nvidia-smi": NVIDIA_SMI, "pip": PIP})
    reader = Reader(tmp_path, head_env, [n.name for n in made])

    wrong = [reader.type(row) for row in documented.STORY] + reader.finish()

    assert not [said for said in wrong if said]
    assert (tmp_path / "empty" / "DIR" / "cluster.yaml").exists()
    assert sorted(p.name for p in (tmp_path / "short" / "pulled" / made[1].name / "ckpt").iterdir()) == ["3", "4", "5"]


def test_nodes_to_which_the_same_was_sent_are_one_line(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    head.write({n.name: 1 for n in made}, {"script": "train.py"})
    (head.folder / "train.py").write_text("pass")

    done = head.run("sync")

    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{fold_hosts(n.name for n in made)}: 2 of 2 files sent, ")


def test_ctrl_c_ends_the_commands_of_exec_on_every_node(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    head.write({n.name: 1 for n in made}, {"command": ["true"]})
    command = "exec 2>&1; trap '' HUP INT; echo begun; sh -c 'trap \"\" TERM HUP INT; sleep 654; sleep 654' & sleep 654"
    words = [sys.executable, "-m", "clusterctl", "exec", "--stream", "--shell", "--", command]
    with subprocess.Popen(
        words, cwd=head.folder, env=dict(head.env), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in made} == {f"{n.name}: begun\n" for n in made}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    wait_for(lambda: not any(n.pids_of("sleep 654") for n in made), what="the commands to be gone")


def test_exec_runs_on_the_nodes_that_are_there_while_another_is_still_waited_for(
    nodes: NodeFactory, head: Head
) -> None:
    there, late = nodes(2)
    head.write({there.name: 1, late.name: 1}, {"command": ["true"]})
    late.stop_sshd()
    waiting = head.start("exec", "--shell", "--", "touch ~/ran; hostname")

    there.wait_for(there.path("ran").exists, what="the command")
    assert waiting.poll() is None
    late.cont_sshd()

    said, wrong = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, wrong
    assert {there.name, late.name} <= set(said.split())


def test_exec_reaches_hosts_that_are_named_without_a_file(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    words = typed("clusterctl exec -w NODES -- hostname", NODES=fold_hosts(n.name for n in made))

    done = head.run(*words)

    assert done.returncode == 0, done.stderr
    assert {n.name for n in made} <= set(done.stdout.split())


def test_exec_tells_nodes_apart_by_output_code_and_reach(nodes: NodeFactory, head: Head) -> None:
    one, two, three = nodes(3)
    head.write(
        dict.fromkeys((one.name, two.name, three.name), 1),
        {"command": ["true"]},
        ssh={"connect_timeout": "2s", "parallel": 2},
    )
    script = f'echo same; [ "$(hostname)" = {two.name} ] && echo other && exit 3'

    folded = head.run("exec", "--shell", "--", f"{script} || exit 0")
    differing = head.run("exec", "--diff", "--shell", "--", script)
    times = head.run("exec", "--parallel", "1", "--json", "--shell", "--", "date +%s.%N; sleep 0.2; date +%s.%N")
    three.cut()
    told = head.run("exec", "--json", "--timeout", "1s", "--shell", "--", f"({script}) && exit 3; sleep 60")

    assert folded.stdout.splitlines()[1] == f"n[{one.name[1:]},{three.name[1:]}] (2)"
    assert f"{two.name} (1 node): exit code 3" in differing.stderr
    assert "+other" in differing.stdout.splitlines()
    spans = sorted(tuple(map(float, e["stdout"].split())) for e in json.loads(times.stdout))
    assert all(ended <= begun for (_, ended), (begun, _) in itertools.pairwise(spans))
    found = json.loads(told.stdout)
    assert told.returncode == 4
    assert [(e["exit_code"], e["stdout"]) for e in found[1:]] == [(None, "same\nother\n"), (None, "")]
    assert found[0]["error"] == "not done within 1 s"
    assert "no answer on port" in found[2]["error"]


def test_a_port_of_a_node_is_reached_at_this_machine(nodes: NodeFactory, head: Head) -> None:
    made = nodes(2)
    head.write({n.name: 1 for n in made}, {"command": ["true"]})
    server = made[1].start(["python3", "-c", SERVER])
    made[1].wait_for(made[1].path("/tmp/port").exists, what="the server")
    port = made[1].path("/tmp/port").read_text()
    words = typed("clusterctl port-forward 8080:80 --node NODE", NODE=made[1].name, **{"8080:80": f"0:{port}"})

    with head.start(*words) as forward:
        assert forward.stdout is not None
        place = forward.stdout.readline().split()[0]
        made[1].wait_for(lambda: _answers(place) == made[1].name.encode(), what="the forwarded port")
        forward.send_signal(signal.SIGINT)
        assert forward.wait(60) in (-signal.SIGINT, 255)
    server.kill()
    server.wait()


def _answers(place: str) -> bytes | None:
    try:
        with urllib.request.urlopen(place, timeout=60) as answer:
            return bytes(answer.read())
    except OSError:
        return None


def test_a_shell_on_a_node_has_the_environment_of_the_job(nodes: NodeFactory, head: Head) -> None:
    (node,) = nodes(1)
    head.write({node.name: 1}, {"command": ["true"]}, env={"OF_JOB": "yes"})
    assert head.run("sync").returncode == 0

    words = ("sh", "-c", 'echo "<$OF_JOB> $(tty)"; exit 7')
    with Terminal("shell", "--", *words, folder=head.folder, env=head.env) as screen:
        screen.expect("<yes> /dev/pts/")
        assert screen.wait() == 7
