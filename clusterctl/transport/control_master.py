"""SSH connections that several `ssh` processes share for a while, so that the user logs in once (ControlMaster)."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

IDLE_TIMEOUT_S = 3600
"""How long a connection stays open after its last use. A run uses it as long as it goes on."""


def control_folder() -> Path:
    """Return the folder of the sockets. It is the same for every login of this user, local, and its path is short."""
    return Path("/tmp", f"clusterctl-ssh-{os.geteuid()}")


def control_path(way: object) -> Path:
    """Return the socket of a connection (ControlPath).

    Args:
        way: The resolved route to the host and the trusted keys: a change of ssh_config changes the path.
    """
    return control_folder() / hashlib.sha256(repr(way).encode()).hexdigest()[:32]


def has_shared_connection(path: Path) -> bool:
    """Return whether there is a connection to share that no other user can have created."""
    try:
        private, made = control_folder().lstat(), path.lstat()
    except OSError:
        return False
    return is_private_folder(private) and stat.S_ISSOCK(made.st_mode) and made.st_uid == os.geteuid()


def is_private_folder(status: os.stat_result) -> bool:
    """Return whether a folder belongs to this user alone."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
