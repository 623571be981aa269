"""What `cp` is asked: which words name files of this machine, and which those of nodes."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class There:
    """Files of nodes.

    Attributes:
        nodes: A set of their names, or `all`.
        path: On each of them; relative to the code folder.
    """

    nodes: str
    path: str


def parse(word: str) -> There | str:
    """Return what a word names: `NODES:PATH`, or a path of this machine.

    As for `scp`, a colon behind a slash belongs to a path: `./a:b` is a file here. One in brackets is part of a set.

    Raises:
        ValueError: Nodes are to be named, and none are.
    """
    depth = 0
    for at, sign in enumerate(word):
        depth += (sign == "[") - (sign == "]")
        if sign == "/" and not depth:
            return word
        if sign == ":" and not depth:
            if not at:
                raise ValueError(f"`{word}` names no node before its colon")
            return There(word[:at], word[at + 1 :])
    return word


@dataclass(frozen=True, slots=True)
class Asked:
    """Files of a node, as it is asked for them.

    Attributes:
        folder: Where the pattern begins; relative to the code folder, unless it begins with `/` or `~`.
        pattern: What is meant there.
        one: It names one file or folder, which may be given another name.
    """

    folder: str
    pattern: str
    one: bool


def asked_of(path: str) -> Asked:
    """Return how a node is asked for a path, which may hold wildcards: `*`, `?`, `[...]`, and `**` for any folders.

    Raises:
        ValueError: It names no files.
    """
    absolute = path.startswith("/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or parts == ["~"]:
        return Asked("/" if absolute else "~" if parts else "", "*", one=False)
    if parts[-1] == "..":
        raise ValueError(f"`{path}` has no name of its own; name what is in it, as in `{path}/*`")
    wild = next((at for at, part in enumerate(parts) if _WILD & set(part)), None)
    at = len(parts) - 1 if wild is None else wild
    if ".." in parts[at:]:
        raise ValueError(f"`{path}`: no `..` can stand behind a wildcard")
    return Asked(("/" if absolute else "") + "/".join(parts[:at]), "/".join(parts[at:]), one=wild is None)


def folder_of(workdir: str, folder: str) -> str:
    """Return a folder that may be relative to the code folder as a node finds it."""
    return folder if folder.startswith(("/", "~")) else posixpath.join(workdir, folder)
