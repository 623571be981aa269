"""An argument that holds several, of which a program says that it does not know it."""

from __future__ import annotations

import pytest

from clusterctl.cli.verdicts import explain_argument_with_blanks
from clusterctl.config.spec import JobSpec

SAID = "ranks 0-3 failed alike: train.py: error: unrecognized arguments: "


@pytest.mark.parametrize(
    ("job", "said", "place"),
    [
        pytest.param(JobSpec(script="x.py", args=("-v", "--a 1 --b")), f"{SAID}--a 1 --b", "job.args[1]", id="args"),
        pytest.param(JobSpec(command=("x", "--a 1 --b")), f"{SAID}--a 1 --b", "job.command[1]", id="list"),
        pytest.param(
            JobSpec(script="x.py", args=("--a 1 " * 40,)),
            f"{SAID}{'--a 1 ' * 40}"[:160] + "…",
            "job.args[0]",
            id="long",
        ),
        pytest.param(JobSpec(script="x.py", args=("--a", "1", "--b")), f"{SAID}--a 1 --b", None, id="items"),
        pytest.param(JobSpec(script="x.py", args=("hello world", "--b")), f"{SAID}--b", None, id="another"),
        pytest.param(JobSpec(command="x --a 1 --b"), f"{SAID}--a 1 --b", None, id="text"),
    ],
)
def test_the_argument_with_blanks_is_named(job: JobSpec, said: str, place: str | None) -> None:
    told = explain_argument_with_blanks(job, said)
    assert told is None if place is None else str(told).startswith(f"`{place}` is one argument with blanks: write each")
