"""Connections of our own that several `ssh` share for a while, so that what a node asks for is asked once."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.transport.ssh.config import Destination

IDLE_SECONDS = 3600
"""How long such a connection stays after its last use; a run uses it for as long as it goes on."""


def folder() -> Path:
    """Return where such connections are found: on this machine, short enough for a socket."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp", f"clusterctl-ssh-{os.geteuid()}")


def path_of(destination: Destination) -> Path:
    """Return the socket of the connection to a host (ControlPath)."""
    return folder() / hashlib.sha256(repr(destination).encode()).hexdigest()[:16]


def is_there(destination: Destination) -> bool:
    """Tell whether there is a connection to share: one that nobody else can have put there."""
    try:
        private, made = folder().lstat(), path_of(destination).lstat()
    except OSError:
        return False
    return is_private(private) and stat.S_ISSOCK(made.st_mode) and made.st_uid == os.geteuid()


def is_private(status: os.stat_result) -> bool:
    """Tell whether a folder is this user's alone."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
