"""Files are made to outlive the machine's power, and nobody waits for the disk."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.node_state.fsync_queue import FsyncQueue
from tests.agent.hung import mounted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_disk_that_does_not_answer_holds_up_neither_the_loop_nor_the_end(tmp_path: Path) -> None:
    loop = EventLoop()
    syncer = FsyncQueue(loop)
    with mounted(tmp_path / "hung") as hung:

        def look() -> None:
            if hung.asked():
                loop.stop()

        syncer.add(str(hung.folder / "journal"))
        loop.call_repeatedly(0.01, look)
        loop.run()
        syncer.add(str(tmp_path / "later"))
        began = time.monotonic()
        syncer.flush_and_close(0.2)
        assert 0.2 <= time.monotonic() - began < 2.0


def test_what_was_named_meanwhile_is_written_through_before_the_end(tmp_path: Path) -> None:
    loop = EventLoop()
    syncer = FsyncQueue(loop)
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        syncer.add(str(tmp_path / name), str(tmp_path / "not there"))
    began = time.monotonic()
    syncer.flush_and_close(20.0)
    assert time.monotonic() - began < 20.0
