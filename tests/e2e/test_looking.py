"""Commands that only look run nothing that a cluster file brings; `health` says what it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    assert "will be run on this machine" in done.stderr
    assert {"prologue", "python"} <= traces(head.folder)


@pytest.fixture(scope="module")
def boxed(make_head: MakeHead) -> LocalHead:
    """A head whose cluster file reaches its node by a command that leaves a trace on this machine."""
    head = make_head()
    enter = f"touch {head.folder}/traces.command; exec /bin/sh"
    (head.folder / "cluster.yaml").write_text(
        "version: 1\nhosts: box\nsync: none\n"
        f"defaults: {{transport: {{command: [/bin/sh, -c, '{enter}', '{{host}}']}}}}\n"
        "job: {command: 'true'}\n"
    )
    return head


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("exec", "--", "true"), id="exec"),
        pytest.param(("stats", "cluster.yaml", "--json"), id="stats"),
        pytest.param(("top", "cluster.yaml"), id="top"),
        pytest.param(("health", "cluster.yaml"), id="health"),
        pytest.param(("down", "cluster.yaml", "--orphans"), id="orphans"),
        pytest.param(("trust", "cluster.yaml"), id="trust-without-a-terminal"),
    ],
)
def test_a_command_of_a_file_is_not_run_before_its_user_has_accepted_it(
    boxed: LocalHead, command: tuple[str, ...]
) -> None:
    done = boxed.run(*command)
    assert done.returncode == 6
    assert traces(boxed.folder) == set()


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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("config", "cluster.yaml"), id="config"),
        pytest.param(("up", "cluster.yaml", "--dry-run"), id="dry-run"),
        pytest.param(("trust", "cluster.yaml"), id="trust"),
        pytest.param(("exec", "--", "true"), id="exec"),
    ],
)
def test_a_command_that_lists_hosts_is_not_run_before_its_user_has_accepted_it(
    make_head: MakeHead, command: tuple[str, ...]
) -> None:
    head = make_head()
    inventory = head.folder / "inventory"
    inventory.write_text(f"#!/bin/sh\ntouch {head.folder}/traces.list\necho here\n")
    inventory.chmod(0o755)
    text = f"version: 1\nhosts: {{from: {{command: [{inventory}]}}}}\ndefaults: {{transport: local, gpus: 0}}\n"
    (head.folder / "cluster.yaml").write_text(text + "job: {command: 'true'}\n")
    assert head.run(*command).returncode == 6
    assert traces(head.folder) == set()
    trusted = head.run("trust", "--yes", "cluster.yaml")
    assert str(inventory) in trusted.stdout, trusted.stderr
    done = head.run(*command)
    assert done.returncode == 0, done.stderr
    assert traces(head.folder) == {"list"}


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
