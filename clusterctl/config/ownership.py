"""Whether a file may say what is run: it has to be the user's or root's, and nobody else may be able to write it.

OpenSSH asks the same of its own files. A group-writable file is no reason where the group is the user's alone, as it is
on Debian and Fedora, whose umask of 002 makes every file so.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat


class ForeignFileError(Exception):
    """A file that somebody else could have written; `hint` says what helps."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check(path: str, found: os.stat_result) -> None:
    """Refuse a file that somebody else owns or can write, or can put another in the place of.

    Args:
        path: As it was opened.
        found: What is known of the open file; anything but a regular file came by the user's own hand (a pipe).

    Raises:
        ForeignFileError: So it is.
        OSError: Its folder cannot be looked at.
    """
    if not stat.S_ISREG(found.st_mode):
        return
    me = os.geteuid()
    if found.st_uid not in (0, me):
        whose, mine = _user(found.st_uid), _user(me)
        hint = f"read it, then use a copy that is yours, or make it yours: `chown {mine} {shlex.quote(path)}`"
        raise ForeignFileError(f"belongs to {whose}, and what it says would be run as {mine}", hint)
    if _others_write(found):
        raise ForeignFileError("others can write it, and what it says is run", f"`chmod go-w {shlex.quote(path)}`")
    for folder in dict.fromkeys((os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))):
        state = os.stat(folder)
        if _others_write(state) and not state.st_mode & stat.S_ISVTX:
            hint = f"`chmod go-w {shlex.quote(folder)}`, or keep it in a folder of your own"
            raise ForeignFileError(f"others can write in {folder}, and put another file in its place", hint)


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid != 0 and not _is_private(found.st_gid)


def _is_private(gid: int) -> bool:
    """Tell whether a group is the user's own: primary, called like the user, and without anybody else in it."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if me.pw_gid != gid or group.gr_name != me.pw_name or not set(group.gr_mem) <= {me.pw_name}:
        return False
    # Last: where users are in a directory of the network, to list them all may take long.
    return all(user.pw_name == me.pw_name for user in _with_primary(gid))


def _with_primary(gid: int) -> list[pwd.struct_passwd]:
    return [user for user in pwd.getpwall() if user.pw_gid == gid]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
