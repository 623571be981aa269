"""Files that are fetched: only what was asked for is written, whatever the node sends."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.agent.workspace import files_matching
from clusterctl.errors import AgentError
from clusterctl.run.asked import asked_for
from clusterctl.run.pull import pull
from tests.work import calls

FILES = [
    "a.pt", "b.txt", ".hidden", "ckpt/1.pt", "ckpt/step-2/x.pt", "ckpt/step-2/.y", "ckpt/.tmp/z.pt", "other/ckpt/3.pt",
    "[odd]/1.pt", "deep/a/b/c/d.pt",
]  # fmt: skip
PATTERNS = [
    "ckpt/**", "ckpt", "ckpt/", "./ckpt//*.pt", "**", "**/*.pt", "**/ckpt/**", "*", "*.pt", "?.txt", "ckpt/step-[0-9]", "*/1.pt",
    "[[]odd]/*", "ckpt/.tmp/*", ".hidden", "deep/**/c", "deep/*/*/c/*", "**/**/d.pt", "nothing",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_an_honest_node_sends_was_asked_for_and_nothing_else(pattern: str, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    sent = {name for name, _ in files_matching(str(tmp_path), pattern)}

    assert {name for name in FILES if asked_for(pattern, name)} == sent


class Node:
    """A session with a node that answers with files of its own choice."""

    node = "gpu01"

    def __init__(self, *files: tuple[str, int, int]) -> None:
        self._files = files

    def new_stream(self, take: Any) -> int:
        self._take = take
        return 0

    def call(self, *_: Any, **__: Any) -> dict[str, Any]:
        self._take(SimpleNamespace(offset=0, payload=b"x" * sum(size for _, size, _ in self._files)))
        return {"files": [list(file) for file in self._files]}


@pytest.mark.parametrize(
    "name",
    [
        "pyproject.toml",
        "ckpt.py",
        "src/ckpt/1.pt",
        ".bashrc",
        "../ckpt/1.pt",
        "/ckpt/1.pt",
        "ckpt/../../x",
        "ckpt/\0",
        "",
    ],
    ids=ascii,
)
def test_of_what_was_not_asked_for_nothing_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(AgentError) as caught:
        pull(Node(("ckpt/1.pt", 1, 0o644), (name, 1, 0o644)), "work", "ckpt/**", tmp_path / "gpu01")  # type: ignore[arg-type]

    assert caught.value.node == "gpu01"
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("mode", "kept"),
    [(0o777, 0o755), (0o6666, 0o644), (0o600, 0o600), (0o000, 0o600), (0o1750, 0o750)],
    ids=oct,
)
def test_a_node_does_not_decide_who_may_change_a_file_of_the_head(mode: int, kept: int, tmp_path: Path) -> None:
    pull(Node(("ckpt/1.pt", 1, mode)), "work", "ckpt/**", tmp_path / "gpu01")  # type: ignore[arg-type]

    assert stat.S_IMODE((tmp_path / "gpu01/ckpt/1.pt").stat().st_mode) == kept


def test_a_name_of_many_parts_costs_what_its_length_does() -> None:
    pattern = "/".join(["**", "a"] * 8)
    work = [calls(lambda n=n: asked_for(pattern, "a/" * n + "b")) for n in (200, 400)]  # type: ignore[misc]

    assert work[1] < 3 * work[0]
