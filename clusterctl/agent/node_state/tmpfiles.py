"""Protects the files of a run from `systemd-tmpfiles`, which removes old files from /var/tmp, even open ones."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux import helper_process

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from clusterctl.agent.linux.helper_process import HelperOutput


def touch_trees(paths: Iterable[str]) -> None:
    """Touch files, and folders with everything in them."""
    for path in paths:
        _touch(path)
        for place, folders, files in os.walk(path):
            for name in (*folders, *files):
                _touch(os.path.join(place, name))


def touch_in_child(paths: Iterable[str]) -> None:
    """Call `touch_trees` in a child, because it may take long."""

    def work(_out: HelperOutput) -> dict[str, Any]:
        touch_trees(paths)
        return {}

    with contextlib.suppress(OSError):
        os.close(helper_process.start_helper(work)[1])


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        now = time.time_ns()
        # Bytecode is valid for one modification time of its source.
        modified = os.lstat(path).st_mtime_ns if path.endswith(".py") else now
        os.utime(path, ns=(now, modified), follow_symlinks=False)
