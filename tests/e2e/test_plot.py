"""Curves of a run in the terminal: what a rank has printed, and what its node has measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.documented import typed
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    """A head with a run that has printed losses, and goes on."""
    head = make_head()
    loop = (
        "for i in 1 2 3 4 5 6 7 8; do echo step $i loss 0.$((9 - i)) reward=$i; sleep 0.05; done; echo over; sleep 600"
    )
    head.write_local({"command": loop, "grace": "1s"})
    head.start()
    wait_for(lambda: "over" in head.run("logs").stdout)
    return head


def test_losses_and_steps_are_drawn_and_the_patterns_are_shown(head: LocalHead) -> None:
    done = head.run(*typed("clusterctl plot"))

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"loss", "step"} <= {*lines}
    assert "     0.8 " in done.stdout
    assert [line.partition(",")[0] for line in lines[-2:]] == ["loss: printed by rank 0", "step: printed by rank 0"]


def test_utilisation_of_a_machine_without_gpus_is_that_of_its_cpus(head: LocalHead) -> None:
    arguments = typed("clusterctl plot RUN loss,step,util", RUN="local")
    done = wait_for(lambda: shown if (shown := head.run(*arguments)).returncode == 0 else None)

    assert "CPU utilisation, %" in done.stdout.splitlines()


def test_a_pattern_names_other_values(head: LocalHead) -> None:
    done = head.run("plot", "local", "reward", "--pattern", r"reward=(?P<reward>\d+)")

    assert done.stdout.splitlines()[0] == "reward"
    assert done.stdout.splitlines()[-1] == r"pattern: printed by rank 0, found by reward=(?P<reward>\d+)"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(
            ("local", "accuracy"), 102, "has no values `accuracy`\nhint: this run has step, loss", id="no-value"
        ),
        pytest.param(("local", "loss", "--rank", "7"), 102, "has no rank 7; its ranks are 0-0", id="no-rank"),
        pytest.param(("local", "--pattern", "loss"), 2, "it needs a name for each value", id="no-group"),
        pytest.param(("local", "--pattern", "("), 2, "missing ), unterminated subpattern", id="no-pattern"),
    ],
)
def test_what_cannot_be_drawn_is_refused(head: LocalHead, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = head.run("plot", *arguments)

    assert done.returncode == code
    assert message in done.stderr


def test_status_has_a_line_of_the_losses(head: LocalHead) -> None:
    assert "  loss 0.8 → 0.1 █▇▆▅▄▃▂▁  `clusterctl plot local-" in head.run("status").stdout
