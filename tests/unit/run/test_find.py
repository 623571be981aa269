"""Which run a person means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.run.record.state_reader import find_run, find_run_of_folder, find_run_to_read
from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from pathlib import Path


def begun(root: Path, *ids: str, path: str = "") -> None:
    for run in ids:
        folder = root / run
        folder.mkdir(parents=True)
        created = controller_events.RunCreated(run=run, name=run.rpartition("-")[0], path=path)
        (folder / "events.jsonl").write_text(controller_events.encode(1, 1.0, created) + "\n")


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        pytest.param("digits-k3x9", "digits-k3x9", id="an id"),
        pytest.param("digits", "digits-k3x9", id="a name before a beginning"),
        pytest.param("digits-l", "digits-long-aaaa", id="a beginning"),
        pytest.param("c", "crash-gq4d", id="one letter"),
    ],
)
def test_a_run_is_meant_by_its_id_its_name_or_the_beginning_of_its_id(
    reference: str, meant: str, tmp_path: Path
) -> None:
    begun(tmp_path, "digits-k3x9", "digits-long-aaaa", "crash-gq4d")

    assert find_run(reference, tmp_path).run == meant


def test_a_beginning_that_several_runs_share_is_refused_with_their_ids(tmp_path: Path) -> None:
    begun(tmp_path, "digits-k3x9", "digits-k3y0")

    with pytest.raises(RefusedError, match="digits-k3x9, digits-k3y0"):
        find_run("digits-k3", tmp_path)


def test_of_runs_that_share_a_beginning_the_one_that_goes_on_is_meant(tmp_path: Path) -> None:
    begun(tmp_path, "digits-k3x9", "digits-k3y0", "digits-k3z1")
    for run in ("digits-k3x9", "digits-k3z1"):
        with (tmp_path / run / "events.jsonl").open("a") as journal:
            journal.write(
                controller_events.encode(2, 2.0, controller_events.RunEnded(state="succeeded", exit_code=0)) + "\n"
            )

    assert find_run("digits-k3", tmp_path).run == "digits-k3y0"


def test_of_many_that_could_be_meant_the_newest_are_named_and_the_others_counted(tmp_path: Path) -> None:
    begun(tmp_path, *(f"digits-k{number:03}" for number in range(20)))

    with pytest.raises(RefusedError, match="k019 and 12 more$"):
        find_run("digits-k", tmp_path)


@pytest.mark.parametrize("reference", [pytest.param("", id="nothing"), pytest.param("x9", id="the end of an id")])
def test_what_begins_no_id_means_no_run(reference: str, tmp_path: Path) -> None:
    begun(tmp_path, "digits-k3x9")

    with pytest.raises(NotFoundError):
        find_run(reference, tmp_path)


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        pytest.param("crahs-gq4d", "did you mean `crash-gq4d`?", id="an id"),
        pytest.param("digitz", "did you mean `digits`?", id="a name"),
        pytest.param("nothing-like-it", "`clusterctl ps -a` lists all runs of this head", id="nothing like it"),
    ],
)
def test_who_names_no_run_is_told_which_one_comes_near(reference: str, hint: str, tmp_path: Path) -> None:
    begun(tmp_path, "digits-k3x9", "crash-gq4d")

    with pytest.raises(NotFoundError) as caught:
        find_run(reference, tmp_path)

    assert caught.value.hint == hint


def test_the_newest_run_of_a_folder_is_meant_there_and_none_in_another_folder(tmp_path: Path) -> None:
    root, work = tmp_path / "runs", tmp_path / "work"
    begun(root, "digits-k3x9", path=str(work / "cluster.yaml"))
    assert find_run_of_folder(work, root) is None
    begun(root, "crash-gq4d", path=str(tmp_path / "other" / "cluster.yaml"))
    found = find_run_of_folder(work, root)
    assert found is not None
    assert found.run == "digits-k3x9"
    assert find_run_of_folder(tmp_path, root) is None


def test_a_command_that_shows_a_run_takes_that_of_the_folder_although_another_one_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, work = tmp_path / "runs", tmp_path / "work"
    work.mkdir()
    begun(root, "digits-k3x9", path=str(work / "cluster.yaml"))
    begun(root, "crash-gq4d", path=str(tmp_path / "other" / "cluster.yaml"))
    with (root / "digits-k3x9" / "events.jsonl").open("a") as journal:
        journal.write(
            controller_events.encode(2, 2.0, controller_events.RunEnded(state="failed", exit_code=100)) + "\n"
        )
    monkeypatch.chdir(work)

    assert find_run_to_read(None, root).run == "digits-k3x9"
    assert find_run_to_read("crash", root).run == "crash-gq4d"
    assert find_run(None, root).run == "crash-gq4d"
