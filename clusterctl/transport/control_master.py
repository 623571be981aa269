"""Connections of our own that several `ssh` share for a while, so that what a node asks for is asked once."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

IDLE_TIMEOUT_S = 3600
"""How long such a connection stays after its last use; a run uses it for as long as it goes on."""


def control_folder() -> Path:
    """Return where such connections are found, however this user has logged in: on this machine, short enough."""
    return Path("/tmp", f"clusterctl-ssh-{os.geteuid()}")


def control_path(way: object) -> Path:
    """Return the socket of a connection (ControlPath).

    Args:
        way: What was resolved of the way to the host and of whom to trust on it: if ssh_config changes, it is another.
    """
    return control_folder() / hashlib.sha256(repr(way).encode()).hexdigest()[:32]


def has_shared_connection(path: Path) -> bool:
    """Tell whether there is a connection to share: one that nobody else can have put there."""
    try:
        private, made = control_folder().lstat(), path.lstat()
    except OSError:
        return False
    return is_private_folder(private) and stat.S_ISSOCK(made.st_mode) and made.st_uid == os.geteuid()


def is_private_folder(status: os.stat_result) -> bool:
    """Tell whether a folder is this user's alone."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
