"""Which node has which files of a checkpoint, and whether they are a whole checkpoint together. Pure.

A node may hold all files of a checkpoint, a part of them (its shards), or none. A copy that we made is the same file
as its source, until the source is written anew: then it is nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    H = TypeVar("H", bound=Hashable)

Version = tuple[float, int]
"""Time (seconds, by the file system) and size (bytes) of a file."""

_RANK = re.compile(r"(?<!mp_)rank[-_]?(\d+)|__(\d+)_\d+\.distcp$")
"""How names of files tell which rank has written them. DeepSpeed's `mp_rank_00` is no rank of the job."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A file that was copied to a node: its version there, whence it came, and which version it had there."""

    node: str
    path: str
    version: Version
    whence: str
    source: Version


def by_origin(files: Mapping[str, Mapping[str, Version]], copies: Iterable[Copied]) -> dict[str, dict[str, Version]]:
    """Return the files of each node, each copy by the version of its source; a copy whose source has changed is none.

    Nor is one whose source has gone from a checkpoint that is still there.

    Args:
        files: By node: what is there, by path.
        copies: What was copied to nodes, and may have been written anew since.
    """
    copied = {(copy.node, copy.path, copy.version): copy for copy in copies}
    written: dict[str, set[Version]] = {}
    for node, there in files.items():
        for path, version in there.items():
            if (node, path, version) not in copied:
                written.setdefault(path, set()).add(version)

    def counts(copy: Copied) -> bool:
        if copy.path in written:
            return copy.source in written[copy.path]
        at_source = files.get(copy.whence)
        return not at_source or copy.path in at_source

    by_node: dict[str, dict[str, Version]] = {}
    for node, there in files.items():
        by_node[node] = {}
        for path, version in there.items():
            copy = copied.get((node, path, version))
            if copy is None or counts(copy):
                by_node[node][path] = version if copy is None else copy.source
    return by_node


def differing(files: Mapping[str, Mapping[str, H]]) -> set[str]:
    """Return the paths under which nodes hold different files."""
    several: dict[str, set[H]] = {}
    for there in files.values():
        for path, file in there.items():
            several.setdefault(path, set()).add(file)
    return {path for path, alike in several.items() if len(alike) > 1}


def lacking(
    files: Mapping[str, Mapping[str, H]], nodes: Sequence[str], order: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return which files these nodes lack, by node: path and the first node in `order` that has it."""
    source = {path: node for node in reversed(order) for path in files[node]}
    all_lacking = {node: {p: source[p] for p in sorted(source) if p not in files[node]} for node in nodes}
    return {node: paths for node, paths in all_lacking.items() if paths}


def lost_with(files: Mapping[str, Mapping[str, H]], gone: Mapping[str, Collection[int]]) -> list[str]:
    """Return the nodes that cannot be asked and with which a part of the checkpoint is lost, as far as one can tell.

    Args:
        files: By node: what is there, by path.
        gone: Nodes that cannot be asked, and their ranks.
    """
    paths = {path for there in files.values() for path in there}
    named = {int(found[1] or found[2]) for path in paths for found in _RANK.finditer(path)}
    if named:
        return [node for node, ranks in gone.items() if not named.issuperset(ranks)]
    # Where one node has all of it, no node had a part of its own.
    return [] if any(paths == there.keys() for there in files.values()) else list(gone)
