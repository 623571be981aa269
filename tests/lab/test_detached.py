"""A person logs in to the head by ssh and starts a run there; then the connection is cut."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.lab import REPOSITORY
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

CLUSTER = """\
version: 1
name: away
hosts:
  {here}: {{transport: local, gpus: 0, workers: 1}}
  {there}: {{gpus: 0, workers: 1}}
job:
  command: 'echo "rank $RANK is here"; exec sleep 600'
  grace: 1s
"""


@dataclass
class FarHead:
    """A lab node that is the head of a run, used over ssh."""

    lab: Lab
    node: Node
    logins: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def line(self, *arguments: str) -> str:
        program = f"PYTHONPATH={shlex.quote(str(REPOSITORY))} {sys.executable} -m clusterctl"
        return f"cd job && {program} {shlex.join(arguments)}"

    def login(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Type a command in a login with a terminal; the ssh client runs until the command ends or it is cut."""
        argv = ["ssh", "-tt", "-F", str(self.lab.ssh_config), self.node.name, self.line(*arguments)]
        env = self.lab.head_env(TERM="xterm")
        process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.logins.append(process)
        return process

    def close(self) -> None:
        """End every login that still lasts, and let go of its streams."""
        for process in self.logins:
            process.kill()
            with process:
                pass

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command over a connection of its own, without a terminal."""
        return self.lab.ssh(self.node, self.line(*arguments), timeout=60)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)


@pytest.fixture
def far(lab: Lab, nodes: NodeFactory) -> Iterator[FarHead]:
    head, other = nodes([NodeSpec(expose=(str(REPOSITORY),)), NodeSpec()])
    key = head.path(".ssh/id_ed25519")
    key.write_bytes(lab.head.key.read_bytes())
    key.chmod(0o600)
    head.path(".ssh/known_hosts").write_bytes(lab.head.known_hosts.read_bytes())
    head.path(".ssh/config").write_text(f"Host {other.name}\n    HostName {other.address}\n")
    head.path("job").mkdir()
    head.path("job/cluster.yaml").write_text(CLUSTER.format(here=head.name, there=other.name))
    made = FarHead(lab, head)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        pytest.param(("up", "-d", "--no-health"), b"away-", id="detached"),
        pytest.param(("up", "--no-health"), b"rank 0 is here", id="attached"),
    ],
)
def test_a_run_goes_on_when_the_connection_of_its_person_is_gone(
    far: FarHead, arguments: tuple[str, ...], seen: bytes
) -> None:
    typed = far.login(*arguments)
    assert typed.stdout is not None
    while seen not in (line := typed.stdout.readline()):
        assert line, "the command ended early"

    far.node.kill_sshd()
    typed.communicate(timeout=30)
    far.node.restart_sshd()
    wait_for(lambda: not far.node.pids_of("clusterctl up"), what="the command to be gone")
    assert len(far.node.pids_of("^clusterctl-controller away-")) == 1
    status = far.json("status")
    run = status["run"]
    watching = {name: far.login(*words) for name, words in WATCHING.items()}
    shown = {name: Shown(process) for name, process in watching.items()}
    shown["logs -f"].expect(b"rank 0 is here")
    shown["attach"].expect(b"rank 0 is here")
    shown["wait"].expect(b"waiting for")
    ended = far.run("down", run)

    assert (status["state"], status["attended"]) == ("running", True)
    assert {worker["state"] for worker in status["workers"]} == {"running"}
    assert ended.returncode == 0, ended.stderr
    assert {name: process.wait(30) for name, process in watching.items()} == {"logs -f": 0, "attach": 103, "wait": 103}


WATCHING = {"logs -f": ("logs", "-f"), "attach": ("attach",), "wait": ("wait",)}


class Shown:
    """What a login shows, read as it comes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._text = b""
        threading.Thread(target=self._read, daemon=True).start()

    def expect(self, text: bytes) -> None:
        wait_for(lambda: text in self._text, 30.0, what=repr(text))

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := self._process.stdout.read1(65536):
            self._text += data
