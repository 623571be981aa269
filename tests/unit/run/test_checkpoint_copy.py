"""A checkpoint that cannot be copied through the head: why, and between which nodes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.errors import RefusedError
from clusterctl.run.nodes.checkpoints import CheckpointCopy

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = "ckpt/step-2.pt"


class Node:
    """A session with a node that has these files, by size."""

    node = "gpu1"

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files

    def allocate_streams(self, take: Any) -> int:
        self._take = take
        return 1

    def call_async(self, *_: Any) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        self._take(SimpleNamespace(offset=0, payload=b"x" * sum(self._files.values())))
        answer.set_result({"files": [[name, size, 0o644] for name, size in self._files.items()]})
        return answer


@pytest.mark.parametrize(
    ("files", "size", "why"),
    [
        pytest.param({}, 7, "`ckpt/step-2.pt` on gpu1 was removed or changed meanwhile", id="the source has gone"),
        pytest.param({"step-2.pt": 5}, 7, "was removed or changed meanwhile", id="the source has changed"),
        pytest.param({}, 1 << 60, "TiB pass through ", id="no space on this machine"),
    ],
)
def test_why_a_checkpoint_was_not_copied_is_told_with_its_nodes(
    tmp_path: Path, files: dict[str, int], size: int, why: str
) -> None:
    sessions: Any = {"gpu1": Node(files)}
    copy = CheckpointCopy(SOURCE, {"gpu2": {SOURCE: "gpu1"}}, {SOURCE: size}, {"gpu1": "~/w", "gpu2": "~/w"}, sessions)

    with pytest.raises(RefusedError) as caught:
        copy.copy_to_nodes(tmp_path, lambda _: None, threading.Event())

    assert str(caught.value).startswith("`ckpt/step-2.pt` cannot be copied from gpu1 to gpu2: ")
    assert why in str(caught.value)
    assert list(tmp_path.iterdir()) == []
