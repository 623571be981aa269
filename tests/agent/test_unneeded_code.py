"""Code goes from a node with the last run that needs it there; what somebody wrote beside it stays."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from tests.agent.talk import Refused
from tests.agent.test_node_commands import Code

if TYPE_CHECKING:
    from tests.agent.conftest import Node

FILES = {"train.py": b"print(1)\n", "pkg/model.py": b"", "pkg/data.bin": b"12345"}


class Place:
    """A workdir on a node, and runs that had it."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.folder = node, folder
        self.talk = node.talk(env={"HOME": str(node.home)})
        self._numbers = itertools.count()

    def sync(self, run: str | None = None) -> None:
        code = Code(self.node, self.talk)
        code.workdir, code.run = self.folder, run
        code.send(FILES)

    def run(self, *, over: bool = True) -> dict[str, str]:
        where = {"run": f"run-{next(self._numbers)}", "node": "n"}
        self.sync(where["run"])
        self.talk.ask(
            Command.PREPARE, **where, attempt=0, ranks=[0], workdir=str(self.folder), grace=1.0, health_seconds=0.0,
            reserve=1 << 20,
        )  # fmt: skip
        if over:
            self.talk.ask(Command.FINISH, **where, state="succeeded", exit_code=0)
        return where

    def clean(self, where: dict[str, str]) -> None:
        self.talk.ask(Command.CLEAN, **where)

    def left(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())


@pytest.fixture
def place(node: Node) -> Place:
    return Place(node, node.home / ".local/share/clusterctl/work/p-1")


def test_nothing_is_left_of_the_code_with_the_last_run_of_it(place: Place) -> None:
    first, second = place.run(), place.run()
    for folder, name in (("", "train"), ("pkg", "model")):
        (place.folder / folder / "__pycache__").mkdir()
        (place.folder / folder / f"__pycache__/{name}.cpython-311.pyc").touch()

    place.clean(first)
    assert set(FILES) <= set(place.left())
    place.clean(second)

    assert not place.folder.exists()
    assert list((place.node.home / "state/clusterctl/sync").glob("*.json")) == []


def test_what_a_job_or_a_person_wrote_stays(place: Place) -> None:
    run = place.run()
    (place.folder / "ckpt").mkdir()
    (place.folder / "ckpt/step-1.pt").touch()
    (place.folder / "pkg/data.bin").write_bytes(b"mended by hand")
    place.clean(run)
    assert place.left() == ["ckpt/step-1.pt", "pkg/data.bin"]


def test_code_in_a_folder_that_a_person_chose_stays(place: Place) -> None:
    place.folder = place.node.home / "mine"
    place.clean(place.run())
    assert place.left() == sorted(FILES)


def test_code_that_was_synced_since_for_no_run_stays(place: Place) -> None:
    run = place.run()
    place.sync()
    place.clean(run)
    assert place.left() == sorted(FILES)


@pytest.mark.parametrize("last", [0, 1])
def test_in_whichever_order_its_runs_go_the_code_goes_with_the_last(place: Place, last: int) -> None:
    runs = [place.run(), place.run()]
    place.clean(runs[1 - last])
    assert place.left() == sorted(FILES)
    place.clean(runs[last])
    assert place.left() == []


def test_code_of_a_start_that_failed_before_it_was_prepared_goes_with_it(place: Place) -> None:
    place.sync("early")
    place.talk.close()
    place.talk = place.node.talk(env={"HOME": str(place.node.home)})
    place.clean({"run": "early", "node": "n"})
    assert not place.folder.exists()


def test_a_start_that_failed_before_it_was_prepared_takes_no_code_of_another_run_along(place: Place) -> None:
    other = place.run()
    place.sync("early")
    place.talk.close()
    place.talk = place.node.talk(env={"HOME": str(place.node.home)})
    with pytest.raises(Refused, match="no run early"):
        place.clean({"run": "early", "node": "n"})
    assert place.left() == sorted(FILES)
    place.clean(other)
    assert place.left() == []


def test_code_of_a_run_that_is_being_started_stays(place: Place, node: Node) -> None:
    run = place.run()
    other = node.talk(env={"HOME": str(node.home)})
    code = Code(node, other)
    code.workdir, code.run = place.folder, "next"
    code.send(FILES)
    place.clean(run)
    assert place.left() == sorted(FILES)


def test_code_stays_where_a_run_cannot_say_what_it_needs(place: Place) -> None:
    run, other = place.run(), place.run()
    prepared = place.node.home / "state/clusterctl/nodes" / other["run"] / "n/prepare.json"
    prepared.write_text("{")
    place.clean(run)
    assert place.left() == sorted(FILES)


def test_a_live_run_keeps_its_code(place: Place) -> None:
    run, live = place.run(), place.run(over=False)
    place.clean(run)
    left = place.left()
    place.talk.ask(Command.FINISH, **live, state="cancelled", exit_code=103)
    assert left == sorted(FILES)
