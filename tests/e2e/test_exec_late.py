"""A person reads what nodes have said while another is still waited for; a program gets all of it, folded, at the end."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.terminal import CTRL_C
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

CONNECTS_LATE = "if [ $NODE = late ]; then while [ ! -e {go} ]; do sleep 0.1; done; fi; exec /bin/sh"
RUNS_LATE = "if [ $NODE = late ]; then while [ ! -e {go} ]; do sleep 0.1; done; fi; echo here; echo $NODE >> {ran}"


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    """A head with three nodes, which tell their names to what they run."""
    head = make_head()
    for name, enter in (("runs", "exec /bin/sh"), ("connects", CONNECTS_LATE.format(go=head.folder / "go"))):
        (head.folder / f"{name}.yaml").write_text(
            "version: 1\nhosts: [gpu01, gpu02, late]\n"
            f"defaults: {{transport: {{command: [env, 'NODE={{host}}', /bin/sh, -c, '{enter}']}}}}\n"
        )
        assert head.run("trust", "--yes", f"{name}.yaml").returncode == 0
    return head


def command(head: LocalHead, late: str) -> list[str]:
    go = head.folder / ("go" if late == "runs" else "/dev/null")
    return ["exec", f"{late}.yaml", "--", "sh", "-c", RUNS_LATE.format(go=go, ran=head.folder / "ran")]


@pytest.fixture(autouse=True)
def nobody_has_run(head: LocalHead) -> None:
    for name in ("go", "ran"):
        (head.folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize("late", ["connects", "runs"])
def test_on_a_terminal_answers_are_shown_while_another_node_is_waited_for(head: LocalHead, late: str) -> None:
    with head.terminal(*command(head, late)) as screen:
        screen.expect("  here")
        screen.expect("waiting for late")
        (head.folder / "go").touch()

        assert screen.wait() == 0
        assert screen.shown.endswith("late  here\n")


def test_who_does_not_wait_for_the_last_gets_what_the_others_said_and_how_it_ended_there(head: LocalHead) -> None:
    words = [*command(head, "runs")[:-1], f"{command(head, 'runs')[-1]}; exit 3"]
    with head.terminal(*words) as screen:
        screen.expect("waiting for late: running")
        screen.press(CTRL_C)

        assert screen.wait() == 130
        assert screen.shown.count("  here") in (1, 2)
        assert "gpu[01-02] (2 nodes): exit code 3" in screen.shown


def test_for_a_program_equal_answers_are_one_however_late_some_are(head: LocalHead) -> None:
    words = [sys.executable, "-m", "clusterctl", *command(head, "runs")]
    with subprocess.Popen(words, cwd=head.folder, env=dict(head.env), stdout=subprocess.PIPE, text=True) as running:
        wait_for(lambda: (head.folder / "ran").exists() and len((head.folder / "ran").read_text().split()) == 2)
        (head.folder / "go").touch()

        assert running.communicate(timeout=60.0)[0].splitlines() == ["gpu[01-02],late (3)  here"]
