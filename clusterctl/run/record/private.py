"""Folders of this user alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder that only its user can read, or take from others what an earlier umask left them.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)
