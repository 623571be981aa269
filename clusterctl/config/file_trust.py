"""Finds files that other users could change, and folders that must not be sent to nodes.

A cluster file names commands that run as the user. Therefore the user or root must own the file, and no other user may
be able to write it. A home directory contains private files, so it is never sent to nodes.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator


class UnsafePermissionsError(Exception):
    """Another user could change the file; `hint` is the remedy."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check_only_user_can_write(path: str, file_stat: os.stat_result) -> None:
    """Raise an error if another user owns a file, can write to it or can replace it.

    A group may write to the file if the user is its only member (Debian and Fedora have the umask 002). OpenSSH has the
    same rule for its own files.

    Args:
        path: The path of the file.
        file_stat: `os.stat_result` of the open file. A pipe is accepted, because only the user can have passed it.

    Raises:
        UnsafePermissionsError: Another user could change the file.
        OSError: The folder of the file cannot be read.
    """
    if not stat.S_ISREG(file_stat.st_mode):
        return
    me = os.geteuid()
    if file_stat.st_uid not in (0, me):
        whose, mine = _format_user(file_stat.st_uid), _format_user(me)
        hint = f"read the file; then use a copy of your own, or take ownership: `chown {mine} {shlex.quote(path)}`"
        raise UnsafePermissionsError(f"belongs to {whose}, but its commands would run as {mine}", hint)
    if _can_others_write(file_stat):
        raise UnsafePermissionsError(
            "other users can write to this file, and clusterctl runs its commands", f"`chmod go-w {shlex.quote(path)}`"
        )
    for folder in dict.fromkeys((os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))):
        state = os.stat(folder)
        if _can_others_write(state) and not state.st_mode & stat.S_ISVTX:
            hint = f"`chmod go-w {shlex.quote(folder)}`, or move the file to a folder of your own"
            raise UnsafePermissionsError(f"other users can write to {folder}, and so replace this file", hint)


def _can_others_write(file_stat: os.stat_result) -> bool:
    if file_stat.st_mode & stat.S_IWOTH:
        return True
    return bool(file_stat.st_mode & stat.S_IWGRP) and file_stat.st_gid != 0 and not _is_private_group(file_stat.st_gid)


def _is_private_group(gid: int) -> bool:
    """Return whether a group is private to the user: the primary group, with the user's name and no other member."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if me.pw_gid != gid or group.gr_name != me.pw_name or not set(group.gr_mem) <= {me.pw_name}:
        return False
    # Read all users last, because this may take long with a network directory.
    return all(user.pw_name == me.pw_name for user in pwd.getpwall() if user.pw_gid == gid)


def _format_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_HOME_PARENTS = ("/home", "/Users")
_FIRST_HUMAN_UID, _NOBODY_UID = 1000, 65534
UPLOAD_HINT = "put the code into a separate folder and set `sync.source` to it, or write `sync: none`"


def find_upload_obstacle(folder: str) -> str | None:
    """Return why a folder must not be sent to nodes, such as "is a home directory", or `None` if it may be sent."""
    real = os.path.realpath(folder)
    if ".ssh" in real.split("/"):
        return "contains ssh keys"
    if real == "/":
        return "is the whole file system"
    if real in _HOME_PARENTS:
        return "contains home directories"
    if os.path.dirname(real) in _HOME_PARENTS or real == "/root":
        return "is a home directory"
    try:
        file_stat = os.stat(real)
    except OSError:
        return None
    for home in _list_homes(file_stat.st_uid):
        if home.startswith(real + "/"):
            return f"contains the home directory {home}"
        # A second mount may give the same folder another path.
        if home == real or (os.path.exists(home) and os.path.samestat(os.stat(home), file_stat)):
            return "is a home directory"
    return None


def _list_homes(owner: int) -> Iterator[str]:
    """Yield the home directories of the user, the folder's owner, and all human users in the password database."""
    people = [entry for entry in pwd.getpwall() if _FIRST_HUMAN_UID <= entry.pw_uid < _NOBODY_UID or entry.pw_uid == 0]
    for uid in {os.getuid(), owner}:
        try:
            people.append(pwd.getpwuid(uid))
        except KeyError:
            continue
    for home in {os.environ.get("HOME", ""), *(entry.pw_dir for entry in people)}:
        real = os.path.realpath(home)
        # The password database may list any folder as the home of a daemon.
        if home.startswith("/") and real != "/":
            yield real
