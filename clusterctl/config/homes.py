"""Whether a folder is somebody's home, or holds homes: it is no code, and is full of what nobody else may have."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_HOMES = ("/home", "/Users")
_FIRST_OF_PEOPLE, _NOBODY = 1000, 65534
REMEDY = "put the code into a folder of its own, and name that as `sync.source`; or `sync: none`"


def why_not_sent(folder: str) -> str | None:
    """Return why a folder must not be sent as code, in words that follow its name; `None` where it may be."""
    real = os.path.realpath(folder)
    if ".ssh" in real.split("/"):
        return "holds the keys of ssh"
    if real == "/":
        return "is the whole file system"
    if real in _OF_HOMES:
        return "holds the homes of people"
    if os.path.dirname(real) in _OF_HOMES or real == "/root":
        return "is a home"
    try:
        found = os.stat(real)
    except OSError:
        return None
    for home in _homes(found.st_uid):
        if home.startswith(real + "/"):
            return f"holds the home {home}"
        # Another path may be the same folder, where it is mounted twice.
        if home == real or (os.path.exists(home) and os.path.samestat(os.stat(home), found)):
            return "is a home"
    return None


def _homes(owner: int) -> Iterator[str]:
    """Yield homes: the user's own, the one of a folder's owner, and those of people that the machine can list."""
    people = [entry for entry in pwd.getpwall() if _FIRST_OF_PEOPLE <= entry.pw_uid < _NOBODY or entry.pw_uid == 0]
    for uid in {os.getuid(), owner}:
        try:
            people.append(pwd.getpwuid(uid))
        except KeyError:
            continue
    for home in {os.environ.get("HOME", ""), *(entry.pw_dir for entry in people)}:
        real = os.path.realpath(home)
        # Of users who are none, such as daemons, the file may say anything.
        if home.startswith("/") and real != "/":
            yield real
