"""Standard streams that somebody else closed: no command may end without a word, or give up what it was asked to do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.command_table import COMMANDS
from tests.documented import line, typed
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

UP = ("up", "--no-health")
STREAM = (*typed("clusterctl exec --stream"), "--")


@dataclass(frozen=True)
class Case:
    """What a command is called with, and the code it ends with, read or not."""

    arguments: tuple[str, ...]
    code: int = 0


CASES: dict[str, list[Case]] = {
    "up": [Case(("up", "--dry-run")), Case((*UP, "-d", "--set", "job.grace=soon"), code=3)],
    "down": [Case(("down", "--stalled", "--json")), Case(("down", "nobody"), code=102)],
    "ps": [Case(("ps", "-a"))],
    "status": [Case(("status", "--json"))],
    "logs": [
        Case(("logs",)),
        Case(("logs", "--format", "json")),
        Case(("logs", "--format", "raw")),
        Case(("logs", "-f")),
    ],
    "attach": [Case(("attach",))],
    "wait": [Case(("wait", "--timeout", "0.1s", "--json"), code=124)],
    "health": [
        Case(("health", "--only", "host.disk")),
        Case(("health", "--set", "health.expect={python: '2.7'}"), code=5),
        Case(("health", "--only", "host.disk", "--watch", "1h")),
        Case(("health", "--history")),
        Case(("health", "--only", "host.disk", "--format", "junit")),
    ],
    "why": [Case(("why",)), Case(("why", "--json"))],
    "plot": [Case(("plot", "local", "nothing"), code=102)],
    "diff": [Case(("diff", "local", "local"))],
    "report": [Case(("report", "-o", "-")), Case(("report", "--trace", "-o", "-"))],
    "stacks": [Case(("stacks",))],
    "profile": [Case(("profile", "--rank", "0", "--for", "1s"), code=4)],
    "stats": [Case(("stats",)), Case(("stats", "--watch", "1h")), Case(("stats", "--watch", "90d"))],
    "metrics": [Case(("metrics",))],
    "serve": [Case(("serve", "--listen", "gpu01:80"), code=2)],
    "top": [Case(("top",))],
    "who": [Case(("who",)), Case(("who", "--watch", "1h"))],
    "reserve": [Case(("reserve", "--release"))],
    "exec": [
        Case(("exec", "--", "sh", "-c", "echo there; exit 7"), code=7),
        Case((*STREAM, "sh", "-c", "echo there; sleep 600")),
    ],
    "shell": [Case(("shell",), code=6)],
    "port-forward": [Case(("port-forward", "0:nowhere"), code=2)],
    "cp": [Case(("cp", "localhost:cluster.yaml", "copied.yaml")), Case(("cp", "x"), code=2)],
    "cast": [Case(("cast", "cluster.yaml", "copies/")), Case(("cast", "x"), code=2)],
    "sync": [Case(("sync",))],
    "demo": [Case(("demo",), code=6)],
    "config": [Case(("config",)), Case(("config", "--env", "0")), Case(("config", "--schema"))],
    "init": [Case(("init", "--help")), Case(("init", "--list"))],
    "notify": [Case(("notify", "--test", "--set", "notify.command=[cat]")), Case(("notify", "--test"), code=6)],
    "export": [
        Case(("export", "slurm")),
        Case((*typed("clusterctl export k8s cluster.yaml"), "--set", "defaults.gpus=0")),
    ],
    "trust": [Case(("trust", "--yes"))],
    "clean": [Case(("clean",))],
    "doctor": [Case(("doctor",))],
    "completion": [Case(("completion", "bash"))],
    "version": [Case(("version",))],
}


def unread() -> int:
    """Return the end to write to of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def to_nobody(head: LocalHead, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout nobody reads."""
    with os.fdopen(unread(), "wb") as nobody:
        return subprocess.run(
            [sys.executable, "-m", "clusterctl", *arguments],
            cwd=head.folder,
            env=dict(head.env),
            stdin=subprocess.DEVNULL,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    """A head with one active run."""
    head = make_head()
    head.write_local({"command": "while echo and on; do sleep 1; done", "grace": "1s"})
    head.start()
    return head


def test_every_command_has_a_case() -> None:
    assert CASES.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=" ".join(case.arguments)) for cases in CASES.values() for case in cases]
)
def test_a_command_that_nobody_reads_ends_with_its_code_and_no_complaint(head: LocalHead, case: Case) -> None:
    done = to_nobody(head, *case.arguments)

    assert done.returncode == case.code, done.stderr
    assert "a bug of" not in done.stderr
    assert "pipe" not in done.stderr


def test_a_shell_sees_no_failure_in_a_pipe_that_ends_early(head: LocalHead) -> None:
    script = f"clusterctl() {{ '{sys.executable}' -m clusterctl \"$@\"; }}; set -o pipefail; {line('clusterctl ps | head -1')}"
    done = subprocess.run(["bash", "-c", script], cwd=head.folder, env=dict(head.env), capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"RUN")


@pytest.mark.parametrize("arguments", [("--help",), ("up", "--help"), ("--version",)], ids=" ".join)
def test_help_that_nobody_reads_is_no_failure(head: LocalHead, arguments: tuple[str, ...]) -> None:
    done = to_nobody(head, *arguments)

    assert (done.returncode, done.stderr) == (0, "")


def test_an_attached_up_that_nobody_reads_detaches_and_says_so(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": ["sleep", "600"], "grace": "1s"})
    attached, detached = to_nobody(head, *UP), to_nobody(head, *UP, "-d")

    assert (attached.returncode, detached.returncode) == (0, 0)
    assert "detached:" in attached.stderr
    wait_for(lambda: [run["state"] for run in head.json("ps")] == ["running"] * 2, what="both runs to go on")


@pytest.mark.parametrize(
    "arguments",
    [UP, ("attach",), ("logs", "-f"), (*STREAM, "sh", "-c", "echo READY; sleep 600")],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_follows_a_silent_run_leaves_soon_after_its_reader(
    make_head: MakeHead, arguments: tuple[str, ...]
) -> None:
    head = make_head()
    head.write_local({"command": "echo READY; exec sleep 600", "grace": "1s"})
    if arguments[0] in ("attach", "logs"):
        head.start()
    with Head.start(head, *arguments) as following:
        assert following.stdout is not None
        assert "READY" in following.stdout.readline()
        following.stdout.close()

        assert following.wait(20) == 0


@pytest.mark.parametrize(
    "closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], ids=["stdin", "stdout", "stderr", "all of them"]
)
def test_a_stream_that_was_never_open_is_like_dev_null(make_head: MakeHead, closed: str) -> None:
    head = make_head()
    head.write_local({"command": "true"})
    script = f'"$0" -m clusterctl up --no-health {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable],
        cwd=head.folder,
        env=dict(head.env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "a bug of" not in done.stderr
    assert head.json("ps", "-a")[0]["state"] == "succeeded"


def test_a_request_that_completion_does_not_know_is_told(head: LocalHead) -> None:
    done = head.__class__(head.folder, {**head.env, "_CLUSTERCTL_COMPLETE": "nonsense"}).run()

    assert done.returncode == 2
    assert "hint: run `unset _CLUSTERCTL_COMPLETE`" in done.stderr
