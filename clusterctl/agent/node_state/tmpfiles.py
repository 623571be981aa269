"""Keeping the files of a run from who tidies up: `systemd-tmpfiles` takes what is old from /var/tmp, open or not.

It leaves a folder alone, and all below it, on which somebody holds a BSD lock (systemd 242 and later,
https://systemd.io/TEMPORARY_DIRECTORIES/), and whatever was touched lately (always).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from clusterctl.agent.linux import helper_process

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from clusterctl.agent.linux.helper_process import HelperOutput


def lock_against_cleanup(folder: str) -> list[int]:
    """Return a descriptor that keeps a folder as long as it is open; none where the folder cannot be locked."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return [fd]
    return []


def touch_trees(paths: Iterable[str]) -> None:
    """Touch files, and folders with all that is in them."""
    for path in paths:
        _touch(path)
        for place, folders, files in os.walk(path):
            for name in (*folders, *files):
                _touch(os.path.join(place, name))


def touch_in_child(paths: Iterable[str]) -> None:
    """Do so in a process of its own: it takes its time."""

    def work(_out: HelperOutput) -> dict[str, Any]:
        touch_trees(paths)
        return {}

    with contextlib.suppress(OSError):
        os.close(helper_process.start_helper(work)[1])


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def lock_run_folders(path: str) -> list[int]:
    """Keep the folders of attempt and run, where a file of a rank is to be written, from who tidies up."""
    attempt = os.path.dirname(path)
    return [*lock_against_cleanup(attempt), *lock_against_cleanup(os.path.dirname(attempt))]
