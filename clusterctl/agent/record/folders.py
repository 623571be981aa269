"""Folders and files of users, gone into step by step: no link leads out of the folder of the code."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import refusals
from clusterctl.agent.protocol.commands import ErrorKind

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_path(path: str) -> str:
    """Return a path of a manifest, which must lie inside the workdir.

    Raises:
        RequestError: It is absolute, empty, or leads outside.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise refusals.RequestError(ErrorKind.BAD_REQUEST, f"not a path inside the workdir: {path!r}")
    return path


_OURS = "~/.local/share/clusterctl"
"""Below it lies the code of files that name no `workdir`: what was synced is for its user alone."""


def make_workdir(folder: str) -> None:
    """Make the folder that the code goes to, where it is not there.

    Raises:
        RequestError: It cannot be made, as in the home of a root who is nobody on its server.
    """
    ours = os.path.expanduser(_OURS)
    try:
        if folder.startswith(ours + "/"):
            os.makedirs(ours, 0o700, exist_ok=True)
            os.chmod(ours, 0o700)
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise refusals.failed(
            f"cannot make the workdir {folder}: {error.strerror or error}",
            "set `workdir` of this host to a folder that its user can make there",
        ) from error


def unlink(name: str, parent: int) -> None:
    """Remove a file of an open folder, where it is there."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=parent)


def open_folder(name: str, parent: int, *, make: bool) -> int:
    """Open a folder of an open folder, never through a link.

    Raises:
        OSError: It is not there and not to be made, or it is none.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


def make_way(name: str, parent: int) -> None:
    """Remove an empty folder where a file is to be; one with something in it stays, and the sync fails."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=parent)


def matching(workdir: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield `(path as the pattern wrote it, absolute path)` of what is inside the workdir and matches.

    Raises:
        RequestError: The pattern leads outside.
    """
    if os.path.isabs(pattern) or ".." in pattern.split("/"):
        raise refusals.RequestError(ErrorKind.BAD_REQUEST, f"not a pattern inside the workdir: {pattern!r}")
    top = os.path.realpath(workdir)
    for path in sorted(glob.glob(os.path.join(glob.escape(top), pattern), recursive=True)):
        if os.path.realpath(path).startswith(top + "/"):
            yield os.path.relpath(path, top), path


def files_matching(workdir: str, pattern: str) -> list[tuple[str, str]]:
    """Return every regular file that a pattern means: matches, and all that lies in matching folders."""
    files: dict[str, str] = {}
    for name, path in matching(workdir, pattern):
        if os.path.isdir(path):
            for place, _, names in os.walk(path):
                for inner in names:
                    whole = os.path.join(place, inner)
                    files[os.path.join(name, os.path.relpath(whole, path))] = whole
        else:
            files[name] = path
    return [(name, path) for name, path in sorted(files.items()) if _is_plain(path)]


def _is_plain(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
