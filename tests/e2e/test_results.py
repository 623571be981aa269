"""What the file calls results is here at the end of a run; what does not come changes no exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from clusterctl.run.nodes.code_selection import select_files

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import LocalHead, MakeHead

WRITE = "mkdir -p out; echo $RANK > out/of-$RANK; exit "


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    return make_head()


def write(head: LocalHead, command: str, results: Any) -> None:
    hosts = [
        {"host": "localhost", "transport": "local", "gpus": 0, "workdir": str(head.folder.parent / name)}
        for name in ("one", "two")
    ]
    job = {"command": command, "grace": "1s"}
    document = {"version": 1, "name": "r", "hosts": hosts, "job": job, "results": results}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))


def run(head: LocalHead, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the job to its end; return its exit code, what was said, and its status."""
    done = head.run("up", "--no-health", *arguments)
    if "-d" in arguments:
        assert done.returncode == 0, done.stderr
        done = head.run("wait")
    return done.returncode, done.stderr, head.json("status")


def came(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arguments", [(), ("-d",)], ids=["attached", "detached"])
def test_results_of_every_node_are_here_when_the_run_has_succeeded(head: LocalHead, arguments: tuple[str, ...]) -> None:
    write(head, WRITE + "0", ["out/*"])

    code, said, status = run(head, *arguments)

    folder = head.folder / "results" / status["run"]
    assert code == 0
    assert came(folder) == {".gitignore", "localhost.0/out/of-0", "localhost.1/out/of-1"}
    assert status["results"] == {"to": str(folder), "files": 2, "bytes": 4, "lacking": []}
    assert arguments or f"results: 2 files, 4 B in {folder}" in said
    assert f"results: 2 files, 4 B in {folder}" in head.run("status").stdout
    assert {found.path for found in select_files(head.folder, (), on_excluded=lambda _one: None)} == {"cluster.yaml"}


@pytest.mark.parametrize(
    ("when", "files"), [pytest.param("success", None, id="unless it says so"), pytest.param("always", 2, id="always")]
)
def test_of_a_run_that_failed_nothing_is_fetched(head: LocalHead, when: str, files: int | None) -> None:
    write(head, WRITE + "3", {"patterns": "out", "to": "kept", "when": when})

    code, _, status = run(head)

    assert code == 100
    assert (status["results"] or {}).get("files") == files
    assert (head.folder / "kept").exists() == (files is not None)


def test_what_an_earlier_run_left_is_no_result_of_this_one(head: LocalHead) -> None:
    write(head, WRITE + "0", ["out/*", "best"])
    old = head.folder.parent / "one/best"
    old.parent.mkdir()
    old.write_text("of another run")

    code, said, status = run(head)

    assert (code, status["results"]["files"]) == (0, 2)
    assert "warn: results: no node has a file of this run that matches `best`" in said


@pytest.mark.parametrize(
    ("results", "said"),
    [
        pytest.param(
            {"patterns": ["out"], "to": "cluster.yaml"}, "cannot be written: Not a directory", id="a file there"
        ),
        pytest.param({"patterns": ["out"], "max_size": "1B"}, "has over 1 bytes", id="too much"),
    ],
)
def test_results_that_do_not_come_are_told_and_change_no_exit_code(
    head: LocalHead, results: dict[str, Any], said: str
) -> None:
    write(head, WRITE + "0", results)

    code, told, status = run(head)

    assert (code, status["state"]) == (0, "succeeded")
    assert "warn: results: localhost.[0-1]: " in told
    assert said in told
    assert said in status["results"]["lacking"][0]


def test_a_person_who_ends_the_run_waits_for_no_results(head: LocalHead) -> None:
    write(head, "echo begun; exec sleep 600", {"patterns": "out", "when": "always"})
    assert head.run("up", "--no-health", "-d").returncode == 0

    assert head.run("down", "--kill").returncode == 0
    assert head.json("status")["state"] == "cancelled"
