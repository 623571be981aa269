"""Commands that only look run nothing that a cluster file brings; `health` says what it runs."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import TYPE_CHECKING

import pytest

from clusterctl.cli.command_table import COMMANDS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    """A head with a cluster file whose every part that can run leaves a trace on this machine."""
    head = make_head()
    evil = head.folder / "python"
    evil.write_text(f'#!/bin/sh\ntouch {head.folder}/traces.python\nexec python3 "$@"\n')
    evil.chmod(0o755)
    (head.folder / "sitecustomize.py").write_text(f"open({str(head.folder / 'traces.env')!r}, 'w').close()\n")
    (head.folder / "cluster.yaml").write_text(
        f"version: 1\nhosts: [{{host: here, transport: local, python: {evil}}}]\n"
        f"env: {{PYTHONPATH: {head.folder}}}\n"
        f"job: {{command: 'true', prologue: 'touch {head.folder}/traces.prologue'}}\n"
    )
    return head


def traces(folder: Path) -> set[str]:
    found = list(folder.glob("traces.*"))
    for path in found:
        path.unlink()
    return {path.suffix[1:] for path in found}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("config", "cluster.yaml"), id="config"),
        pytest.param(("up", "cluster.yaml", "--dry-run"), id="dry-run"),
        pytest.param(("trust", "cluster.yaml"), id="trust"),
        pytest.param(("exec", "--", "true"), id="exec"),
        pytest.param(("stats", "cluster.yaml", "--json"), id="stats"),
        pytest.param(("who", "cluster.yaml", "--json"), id="who"),
        pytest.param(("top", "cluster.yaml"), id="top"),
        pytest.param(("ps",), id="ps"),
    ],
)
def test_a_command_that_only_looks_runs_nothing_of_the_file(head: LocalHead, command: tuple[str, ...]) -> None:
    done = head.run(*command)
    assert done.returncode in (0, 2), done.stderr
    assert traces(head.folder) == set()


def test_health_says_what_of_the_file_it_runs_here_before_it_does(head: LocalHead) -> None:
    done = head.run("health", "cluster.yaml")
    assert "warning: `job.prologue` and `python` of " in done.stderr
    assert "will run on this machine" in done.stderr
    assert {"prologue", "python"} <= traces(head.folder)


def on_a_terminal(head: LocalHead, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that refuses to work without a terminal."""
    with head.terminal(command) as screen:
        return subprocess.CompletedProcess(command, screen.wait(), "", screen.shown)


READS_NO_FILE = (
    "ps", "status", "logs", "attach", "wait", "why", "plot", "diff", "report", "stacks", "profile", "metrics", "serve", "init", "clean", "completion",
    "doctor", "demo",
)  # fmt: skip
"""Commands that know runs, which carry a spec of their own, or nothing."""

READS_A_FILE: dict[str, tuple[str, ...]] = {
    "up": ("--dry-run",),
    "down": ("cluster.yaml", "--orphans"),
    "health": (),
    "stats": ("cluster.yaml",),
    "who": (),
    "reserve": ("--release",),
    "top": ("cluster.yaml",),
    "exec": ("--", "true"),
    "shell": (),
    "port-forward": ("8080",),
    "cp": ("box:/etc/hostname", "."),
    "cast": ("/etc/hostname", "box:copies/"),
    "sync": (),
    "config": (),
    "notify": ("--test",),
    "export": ("slurm",),
    "trust": (),
    "version": ("cluster.yaml",),
}
"""The other commands, as they take part in `cluster.yaml`."""

CONNECTS_TO_NOTHING = {"up", "config", "export"}


def test_every_command_is_walked() -> None:
    assert {*READS_NO_FILE, *READS_A_FILE} == set(COMMANDS)


@pytest.fixture(scope="module")
def boxed(make_head: MakeHead) -> LocalHead:
    """A head whose cluster file reaches its node by a command that leaves a trace on this machine."""
    head = make_head()
    enter = f"touch {head.folder}/traces.command; exec /bin/sh"
    (head.folder / "cluster.yaml").write_text(
        "version: 1\nhosts: {box: 1}\nsync: none\n"
        f"defaults: {{transport: {{command: [/bin/sh, -c, '{enter}', '{{host}}']}}}}\n"
        "job: {command: 'true'}\n"
    )
    return head


@pytest.mark.parametrize("command", READS_A_FILE)
def test_a_command_that_leads_to_hosts_is_not_run_before_its_user_has_accepted_it(
    boxed: LocalHead, command: str
) -> None:
    done = on_a_terminal(boxed, command) if command == "shell" else boxed.run(command, *READS_A_FILE[command])

    assert traces(boxed.folder) == set()
    assert done.returncode == (0 if command in CONNECTS_TO_NOTHING else 6), done.stderr


@pytest.fixture(scope="module")
def listed(make_head: MakeHead) -> LocalHead:
    """A head whose cluster file lists its hosts by a command that leaves a trace on this machine."""
    head = make_head()
    inventory = head.folder / "inventory"
    inventory.write_text(f"#!/bin/sh\ntouch {head.folder}/traces.list\necho box\n")
    inventory.chmod(0o755)
    text = f"version: 1\nhosts: {{from: {{command: [{inventory}]}}}}\ndefaults: {{transport: local, gpus: 0}}\n"
    (head.folder / "cluster.yaml").write_text(text + "job: {command: 'true'}\n")
    return head


@pytest.mark.parametrize("command", READS_A_FILE)
def test_a_command_that_lists_hosts_is_not_run_before_its_user_has_accepted_it(listed: LocalHead, command: str) -> None:
    done = on_a_terminal(listed, command) if command == "shell" else listed.run(command, *READS_A_FILE[command])

    assert traces(listed.folder) == set()
    assert done.returncode == 6, done.stderr


def test_completion_runs_no_command_of_a_file(listed: LocalHead) -> None:
    words = {"_CLUSTERCTL_COMPLETE": "bash_complete", "COMP_WORDS": "clusterctl exec --nodes ", "COMP_CWORD": "3"}
    done = dataclasses.replace(listed, env={**listed.env, **words}).run()

    assert (done.returncode, traces(listed.folder)) == (0, set()), done.stderr


def test_a_command_that_lists_hosts_is_run_once_it_was_accepted(listed: LocalHead) -> None:
    trusted = listed.run("trust", "--yes", "cluster.yaml")
    assert f"{listed.folder / 'inventory'}" in trusted.stdout, trusted.stderr
    done = listed.run("config", "cluster.yaml")
    assert done.returncode == 0, done.stderr
    assert traces(listed.folder) == {"list"}


def test_a_command_that_was_accepted_reaches_the_node_and_another_does_not(make_head: MakeHead) -> None:
    head = make_head()
    file = head.folder / "cluster.yaml"
    text = "version: 1\nhosts: box\ndefaults: {transport: {command: [env, 'BOX={host}', /bin/sh]}}\n"
    file.write_text(text)
    trusted = head.run("trust", "--yes", "cluster.yaml")
    assert "env 'BOX={host}' /bin/sh" in trusted.stdout, trusted.stderr
    done = head.run("exec", "--", "printenv", "BOX")
    assert done.stdout.splitlines()[-1].endswith("box"), done.stderr
    file.write_text(text.replace("BOX", "BOX2"))
    refused = head.run("exec", "--", "true")
    assert refused.returncode == 6
    assert "accept it with `clusterctl trust`" in refused.stderr


def test_a_run_goes_through_a_command(boxed: LocalHead) -> None:
    done = boxed.run("up", "--no-health")
    assert done.returncode == 0, done.stderr
    assert traces(boxed.folder) == {"command"}


def test_a_dry_run_tells_what_would_be_copied_and_where(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "code" / "data").mkdir(parents=True)
    for name, content in (("train.py", "x" * 1000), ("data/words", "y" * 1000), ("old.log", "z")):
        (head.folder / "code" / name).write_text(content)
    sync = {"source": "code", "exclude": ["*.log"]}
    head.write_local({"command": "true"}, sync=sync)
    alone = head.run("up", "--dry-run")
    there = head.run("up", "--dry-run", "--set", "hosts=gpu[01-03]")

    assert "copied" not in alone.stdout
    assert f"2 files of {head.folder}/code, 2 KiB, to gpu[01-03]" in there.stdout, there.stderr
