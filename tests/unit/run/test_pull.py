"""Files that are fetched: only what was asked for is written, whatever the node sends."""

from __future__ import annotations

import stat
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.workdir.file_tree import find_matching_files
from clusterctl.errors import AgentError, ConnectError, RefusedError
from clusterctl.run.nodes.downloads import FetchOptions, matches_pattern, pull_files
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
    sent = {name for name, _ in find_matching_files(str(tmp_path), pattern)}

    assert {name for name in FILES if matches_pattern(pattern, name)} == sent


class Node:
    """A session with a node that answers with files of its own choice."""

    node = "gpu01"

    def __init__(self, *files: tuple[str, int, int], sends: int | None = None, offset: int = 0) -> None:
        self._files, self._offset = files, offset
        self._sends = sum(size for _, size, _ in files) if sends is None else sends
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def allocate_streams(self, take: Any) -> int:
        self._take = take
        return 0

    def call_async(self, *_: Any) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        self._take(SimpleNamespace(offset=self._offset, payload=b"x" * self._sends))
        if self.closed:
            answer.set_exception(ConnectError(self.node, "the session was closed"))
        else:
            answer.set_result({"files": [list(file) for file in self._files]})
        return answer


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
        pull_files(Node(("ckpt/1.pt", 1, 0o644), (name, 1, 0o644)), "work", "ckpt/**", tmp_path / "gpu01")  # type: ignore[arg-type]

    assert caught.value.node == "gpu01"
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("mode", "kept"),
    [(0o777, 0o755), (0o6666, 0o644), (0o600, 0o600), (0o000, 0o600), (0o1750, 0o750)],
    ids=oct,
)
def test_a_node_does_not_decide_who_may_change_a_file_of_the_head(mode: int, kept: int, tmp_path: Path) -> None:
    pull_files(Node(("ckpt/1.pt", 1, mode)), "work", "ckpt/**", tmp_path / "gpu01")  # type: ignore[arg-type]

    assert stat.S_IMODE((tmp_path / "gpu01/ckpt/1.pt").stat().st_mode) == kept


def test_of_more_than_was_allowed_nothing_is_written_and_the_session_is_ended(tmp_path: Path) -> None:
    node = Node(("ckpt/1.pt", 101, 0o644))

    with pytest.raises(RefusedError, match="over 100 bytes") as caught:
        pull_files(node, "work", "ckpt/**", tmp_path / "gpu01", FetchOptions(max_bytes=100))  # type: ignore[arg-type]

    assert "--max-size" in str(caught.value.hint)
    assert node.closed
    assert list(tmp_path.rglob("*")) == []


def test_a_node_that_tells_of_other_sizes_than_it_sent_is_not_believed(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="sent 1 bytes for files of 8 bytes"):
        pull_files(Node(("ckpt/1.pt", 8, 0o644), sends=1), "work", "ckpt/**", tmp_path / "gpu01")  # type: ignore[arg-type]

    assert list(tmp_path.rglob("*")) == []


def test_bytes_of_files_that_come_out_of_order_are_no_frame_of_ours(tmp_path: Path) -> None:
    with pytest.raises(FrameError, match="instead of byte 0"):
        pull_files(Node(("ckpt/1.pt", 1, 0o644), offset=1 << 62), "work", "ckpt/**", tmp_path / "gpu01")  # type: ignore[arg-type]


def test_a_name_of_many_parts_costs_what_its_length_does() -> None:
    pattern = "/".join(["**", "a"] * 8)
    work = [calls(lambda n=n: matches_pattern(pattern, "a/" * n + "b")) for n in (200, 400)]  # type: ignore[misc]

    assert work[1] < 3 * work[0]
