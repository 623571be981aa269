"""What a sync would do is told by the node itself, and nothing of it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.agent.test_node_commands import Code, entry

if TYPE_CHECKING:
    from pathlib import Path

    from tests.agent.conftest import Node

OLD = {"train.py": b"print(1)\n", "model.py": b"pass\n", "gone.py": b"", "mended.py": b"1\n"}
NEW = {"train.py": b"print(2)\n", "model.py": b"pass\n", "data/new.bin": b"12345"}
ENTRIES = {path: entry(content) for path, content in NEW.items()}


@pytest.fixture
def code(node: Node) -> Code:
    return Code(node, node.talk())


def everything(folder: Path) -> dict[str, tuple[float, bytes]]:
    return {str(p): (p.stat().st_mtime, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_what_differs_and_what_would_be_removed_is_told_and_stays_as_it_is(code: Code, node: Node) -> None:
    code.send(OLD)
    (code.workdir / "mended.py").write_text("by hand\n")
    before = everything(node.home)

    told = code.look(ENTRIES)

    assert (told["need"], told["going"], told["gone"]) == (["train.py", "data/new.bin"], 1, ["gone.py"])
    assert everything(node.home) == before


def test_on_a_node_that_never_had_code_nothing_is_made(code: Code, node: Node) -> None:
    before = everything(node.home)

    told = code.look(ENTRIES)

    assert (told["need"], told["going"], told["user"]) == (list(NEW), 0, None)
    assert everything(node.home) == before
    assert not code.workdir.exists()


def test_a_live_run_that_would_have_its_code_changed_is_named(code: Code, node: Node) -> None:
    code.send(OLD)
    node.launch(["sleep", "1000"], workdir=str(code.workdir))

    assert code.look(ENTRIES)["user"] == node.run
    assert code.look({path: entry(content) for path, content in OLD.items()})["user"] is None


def test_who_only_looks_holds_up_nobody(code: Code, node: Node) -> None:
    code.look(ENTRIES)

    other = Code(node, node.talk())
    other.send(NEW)

    assert code.look(ENTRIES)["need"] == []
