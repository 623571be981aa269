"""Protects the files of a run from `systemd-tmpfiles`, which removes old files from /var/tmp, even open files.

`systemd-tmpfiles` skips a folder, and all files below it, while a process holds a BSD lock on the folder (systemd 242
and later, https://systemd.io/TEMPORARY_DIRECTORIES/). `systemd-tmpfiles` also skips recently touched files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux import helper_process

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from clusterctl.agent.linux.helper_process import HelperOutput


def lock_against_cleanup(folder: str) -> list[int]:
    """Lock a folder, so that systemd-tmpfiles keeps it; return a list with the descriptor, or an empty list."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return [fd]
    return []


def touch_in_child(paths: Iterable[str]) -> None:
    """Touch files, and folders with all files in them, in a child process, because this may take long."""

    def work(_out: HelperOutput) -> dict[str, Any]:
        for path in paths:
            _touch(path)
            for place, folders, files in os.walk(path):
                for name in (*folders, *files):
                    _touch(os.path.join(place, name))
        return {}

    with contextlib.suppress(OSError):
        os.close(helper_process.start_helper(work)[1])


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        now = time.time_ns()
        # Keep the modification time of a source file, because Python compares it with the one in the bytecode file.
        modified = os.lstat(path).st_mtime_ns if path.endswith(".py") else now
        os.utime(path, ns=(now, modified), follow_symlinks=False)


def lock_run_folders(rank_file: str) -> list[int]:
    """Lock the folders that contain the file of a rank, so that systemd-tmpfiles keeps them; return the descriptors."""
    attempt = os.path.dirname(rank_file)
    return [*lock_against_cleanup(attempt), *lock_against_cleanup(os.path.dirname(attempt))]
