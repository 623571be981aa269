"""`diff` of two runs that were really made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import json_shapes as shapes
from tests.documented import typed
from tests.e2e import hostile

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local({"command": "exit $CODE", "grace": "1s"}, workers=(1, 1), env={"CODE": "0"})
    return head


@pytest.fixture(scope="module")
def runs(head: LocalHead) -> tuple[str, str]:
    """One that succeeded, and one that failed on one node and with other settings."""
    head.run("up")
    failing = head.run("up", "--nodes", "localhost.0", "--set", "env.CODE=3", "--set", "job.grace=2s")
    assert failing.returncode == 100, failing.stderr
    second, first = (entry["run"] for entry in head.json("ps", "-a"))
    return (str(first), str(second)) if head.json("status", first)["state"] == "succeeded" else (second, first)


@pytest.fixture(scope="module")
def found(head: LocalHead, runs: tuple[str, str]) -> dict[tuple[str, str], Any]:
    answer = head.json(*typed("clusterctl diff RUN1 RUN2", RUN1=runs[0], RUN2=runs[1]))
    shapes.check(shapes.DIFF, answer)
    assert answer["runs"] == [*runs]
    return {(row["section"], row["what"]): (row["nodes"], row["values"]) for row in answer["differences"]}


@pytest.mark.parametrize(
    ("place", "nodes", "values"),
    [
        (("spec", "job.grace"), [], ["1.0", "2.0"]),
        (("environment", "CODE"), [], ["0", "3"]),
        (("nodes", "takes part"), ["localhost.1"], ["worker", None]),
        (("outcome", "state"), [], ["succeeded", "failed"]),
        (("outcome", "why"), [], [None, "rank 0 on localhost.0: exit code 3"]),
    ],
    ids=str,
)
def test_what_was_different_is_told(
    found: dict[tuple[str, str], Any], place: tuple[str, str], nodes: list[str], values: list[str | None]
) -> None:
    assert found[place] == (nodes, values)


def test_what_each_run_has_of_its_own_is_no_difference(found: dict[tuple[str, str], Any]) -> None:
    assert not [what for _, what in found if what.startswith(("MASTER_", "CLUSTERCTL_")) or what.endswith("RANK")]


@pytest.mark.parametrize("rewrite", [hostile.texts, hostile.everything], ids=["texts", "everything"])
def test_a_run_with_hostile_text_is_compared_harmlessly(
    head: LocalHead, runs: tuple[str, str], rewrite: hostile.Rewrite, tmp_path: Path
) -> None:
    state = Path(head.env["XDG_STATE_HOME"])
    hostile.make(state, tmp_path, runs[1], rewrite, ended=True)
    shutil.copytree(state / "clusterctl/runs" / runs[1], tmp_path / "clusterctl/runs/plain-aaaa", dirs_exist_ok=True)
    other = type(head)(head.folder, {**head.env, "XDG_STATE_HOME": str(tmp_path)})

    for options in ((), ("--json",), ("-q",)):
        done = other.run("diff", runs[1], "plain-aaaa", *options)

        assert done.returncode == 0, done.stderr
        assert hostile.found_in(done.stdout) == []
        assert hostile.MARK in done.stdout or options == ("-q",)


def test_a_run_that_is_not_there_is_named(head: LocalHead, runs: tuple[str, str]) -> None:
    done = head.run("diff", runs[0], "nobody")

    assert done.returncode == 102
    assert "nobody" in done.stderr


def test_a_run_does_not_differ_from_itself(head: LocalHead, runs: tuple[str, str]) -> None:
    assert json.loads(head.run("diff", runs[0], runs[0], "--json").stdout)["differences"] == []
