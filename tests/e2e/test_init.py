"""`init` on a terminal asks four questions, and writes nothing to who leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from tests.documented import typed

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

CTRL_D = "\x04"


def test_four_answers_make_a_file_that_checks(head: LocalHead) -> None:
    (head.folder / "job.py").touch()
    with head.terminal("init") as screen:
        screen.expect("Hosts")
        screen.press("gpu[04-01]\r")
        screen.expect("runs backwards")
        screen.press("gpu[01-04]\r")
        screen.expect("GPUs each")
        screen.press("8\r")
        screen.expect("[job.py]")
        screen.press("\r")
        screen.expect("Python on the hosts")
        screen.press("~/venv/bin/python\r")

        assert screen.wait() == 0
        assert "`clusterctl up` runs it" in screen.shown
    written = yaml.safe_load((head.folder / "cluster.yaml").read_text())
    assert (written["hosts"], written["job"]) == ({"gpu[01-04]": 8}, {"script": "job.py"})
    assert written["defaults"] == {"python": "~/venv/bin/python"}


def test_who_leaves_a_question_finds_nothing_written(head: LocalHead) -> None:
    with head.terminal("init") as screen:
        screen.expect("Hosts")
        screen.press(CTRL_D)

        assert screen.wait() == 130
    assert not (head.folder / "cluster.yaml").exists()


def test_what_the_help_shows_can_be_typed(head: LocalHead) -> None:
    (head.folder / "train.py").touch()

    assert head.run(*typed("clusterctl init gpu[01-08] --gpus 8 --script train.py")).returncode == 0
    (head.folder / "cluster.yaml").unlink()
    (head.folder / "train.py").unlink()
    assert head.run(*typed("clusterctl init gpu[01-08] --template keras_ddp")).returncode == 0
    (head.folder / "cluster.yaml").unlink()
    for file in head.folder.glob("*.*"):
        file.unlink()
    (head.folder / "hosts").write_text("worker-1 slots=8\nworker-2 slots=8\n")
    assert head.run(*typed("clusterctl init --from hosts")).returncode == 0
    assert "worker-[1-2]: 8" in (head.folder / "cluster.yaml").read_text()
