"""Safety of paths: who may write a file, and which folders must not be sent to nodes.

A cluster file decides what runs, so it must belong to the user or to root, and nobody else may write it. A home is no
code, and holds files that nobody else may have.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator


class UnsafePermissionsError(Exception):
    """Another user could have written the file; `hint` is the remedy."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def check_only_user_can_write(path: str, file_stat: os.stat_result) -> None:
    """Refuse a file that another user owns, can write or can replace.

    A group that only the user belongs to may write it, as with the umask 002 of Debian and Fedora. OpenSSH has the same
    rule for its own files.

    Args:
        path: The path that was opened.
        file_stat: `os.stat_result` of the open file. A pipe is accepted, as only the user can have passed it.

    Raises:
        UnsafePermissionsError: The file is not safe.
        OSError: Its folder cannot be read.
    """
    if not stat.S_ISREG(file_stat.st_mode):
        return
    me = os.geteuid()
    if file_stat.st_uid not in (0, me):
        whose, mine = _format_user(file_stat.st_uid), _format_user(me)
        hint = f"read it, then use a copy that is yours, or make it yours: `chown {mine} {shlex.quote(path)}`"
        raise UnsafePermissionsError(f"belongs to {whose}, and what it says would be run as {mine}", hint)
    if _can_others_write(file_stat):
        raise UnsafePermissionsError(
            "others can write it, and what it says is run", f"`chmod go-w {shlex.quote(path)}`"
        )
    for folder in dict.fromkeys((os.path.dirname(os.path.abspath(path)), os.path.dirname(os.path.realpath(path)))):
        state = os.stat(folder)
        if _can_others_write(state) and not state.st_mode & stat.S_ISVTX:
            hint = f"`chmod go-w {shlex.quote(folder)}`, or keep it in a folder of your own"
            raise UnsafePermissionsError(f"others can write in {folder}, and put another file in its place", hint)


def _can_others_write(file_stat: os.stat_result) -> bool:
    if file_stat.st_mode & stat.S_IWOTH:
        return True
    return bool(file_stat.st_mode & stat.S_IWGRP) and file_stat.st_gid != 0 and not _is_private_group(file_stat.st_gid)


def _is_private_group(gid: int) -> bool:
    """Return whether a group is the user's own: the primary group, with the user's name and no other member."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if me.pw_gid != gid or group.gr_name != me.pw_name or not set(group.gr_mem) <= {me.pw_name}:
        return False
    # Last, as it may take long to list all users of a network directory.
    return all(user.pw_name == me.pw_name for user in pwd.getpwall() if user.pw_gid == gid)


def _format_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_HOME_PARENTS = ("/home", "/Users")
_FIRST_OF_PEOPLE, _NOBODY = 1000, 65534
UPLOAD_HINT = "put the code into a folder of its own, and name that as `sync.source`; or `sync: none`"


def find_upload_obstacle(folder: str) -> str | None:
    """Return the reason why a folder must not be sent to nodes, such as "is a home"; `None` if it may be sent."""
    real = os.path.realpath(folder)
    if ".ssh" in real.split("/"):
        return "holds the keys of ssh"
    if real == "/":
        return "is the whole file system"
    if real in _HOME_PARENTS:
        return "holds the homes of people"
    if os.path.dirname(real) in _HOME_PARENTS or real == "/root":
        return "is a home"
    try:
        file_stat = os.stat(real)
    except OSError:
        return None
    for home in _list_homes(file_stat.st_uid):
        if home.startswith(real + "/"):
            return f"holds the home {home}"
        # A second mount may give the same folder another path.
        if home == real or (os.path.exists(home) and os.path.samestat(os.stat(home), file_stat)):
            return "is a home"
    return None


def _list_homes(owner: int) -> Iterator[str]:
    """Yield homes: the user's own, the one of the folder's owner, and those of the people that the machine lists."""
    people = [entry for entry in pwd.getpwall() if _FIRST_OF_PEOPLE <= entry.pw_uid < _NOBODY or entry.pw_uid == 0]
    for uid in {os.getuid(), owner}:
        try:
            people.append(pwd.getpwuid(uid))
        except KeyError:
            continue
    for home in {os.environ.get("HOME", ""), *(entry.pw_dir for entry in people)}:
        real = os.path.realpath(home)
        # The entries of daemons may name any folder.
        if home.startswith("/") and real != "/":
            yield real
