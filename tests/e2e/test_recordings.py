"""`health --record` and `--replay`: what nodes told, as one file that anybody can send and judge."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local({"command": ["true"]}, (1, 1))
    return head


def told(text: str) -> list[tuple[Any, ...]]:
    view = json.loads(text)
    found = [f for node in view["nodes"] for f in node["findings"]] + view["cluster"]
    return sorted((f["check"], f["status"], f["action"]) for f in found)


def test_a_recording_is_judged_as_the_nodes_were_and_without_them(head: LocalHead, make_head: MakeHead) -> None:
    looked = head.run("health", "--json", "--record", "sent.json")
    elsewhere = make_head()
    (elsewhere.folder / "got.json").write_bytes((head.folder / "sent.json").read_bytes())

    judged = elsewhere.run("health", "--json", "--replay", "got.json")

    assert judged.returncode == looked.returncode
    assert told(judged.stdout) == told(looked.stdout) != []
    assert "2 nodes" in looked.stderr
    shown = elsewhere.run("health", "--replay", "got.json", "--only", "host.disk").stdout
    assert "node[1-2]" in shown


def test_a_recording_does_not_name_this_machine(head: LocalHead) -> None:
    head.run("health", "--record", "sent.json")
    text = (head.folder / "sent.json").read_text()
    told = [socket.gethostname(), head.folder.name, "localhost.0", str(head.folder)]
    assert [name for name in told if f'"{name}' in text or f"/{name}" in text] == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(("--replay", "none.json"), 102, "none.json: No such file", id="not there"),
        pytest.param(("--replay", "cluster.yaml"), 6, "cluster.yaml: not JSON", id="another file"),
        pytest.param(("--replay", "other.json"), 6, "other.json: not a recording", id="other JSON"),
        pytest.param(
            ("--replay", "other.json", "cluster.yaml"),
            2,
            "cannot be used together with `FILE`",
            id="a cluster file beside it",
        ),
        pytest.param(
            ("--record", "x.json", "--watch", "5s"), 2, "cannot be used together", id="recorded again and again"
        ),
        pytest.param(("--record", "no/such/x.json"), 6, "cannot be written", id="no folder"),
    ],
)
def test_what_cannot_be_done_is_said(head: LocalHead, arguments: tuple[str, ...], code: int, words: str) -> None:
    (head.folder / "other.json").write_text("[]")
    done = head.run("health", *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
