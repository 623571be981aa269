"""Which node has which files of a checkpoint, and whether they are a whole checkpoint together. Pure.

A node may hold all files of a checkpoint, a part of them (its shards), or none. A copy that we made is the same file
as its source, until the source is written anew: then it is nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    H = TypeVar("H", bound=Hashable)

Version = tuple[float, int]
"""Time (seconds, by the file system) and size (bytes) of a file."""

_RANK = re.compile(r"(?<!mp_)rank[-_]?(\d+)|__(\d+)_\d+\.distcp$")
"""How names of files tell which rank has written them. DeepSpeed's `mp_rank_00` is no rank of the job."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file that was copied to a node: its version there, whence it came, and which version it had there."""

    node: str
    path: str
    version: Version
    source_node: str
    source_version: Version


def resolve_copies(
    files: Mapping[str, Mapping[str, Version]], copies: Iterable[CopiedFile]
) -> dict[str, dict[str, Version]]:
    """Return the files of each node, each copy by the version of its source; a copy whose source has changed is none.

    Nor is one whose source has gone from a checkpoint that is still there.

    Args:
        files: By node: what is there, by path.
        copies: What was copied to nodes, and may have been written anew since.
    """
    copied = {(copy.node, copy.path, copy.version): copy for copy in copies}
    written: dict[str, set[Version]] = {}
    for node, paths_at_node in files.items():
        for path, version in paths_at_node.items():
            if (node, path, version) not in copied:
                written.setdefault(path, set()).add(version)

    def counts(copy: CopiedFile) -> bool:
        if copy.path in written:
            return copy.source_version in written[copy.path]
        at_source = files.get(copy.source_node)
        return not at_source or copy.path in at_source

    by_node: dict[str, dict[str, Version]] = {}
    for node, paths_at_node in files.items():
        by_node[node] = {}
        for path, version in paths_at_node.items():
            copy = copied.get((node, path, version))
            if copy is None or counts(copy):
                by_node[node][path] = version if copy is None else copy.source_version
    return by_node


def find_conflicting_paths(files: Mapping[str, Mapping[str, H]]) -> set[str]:
    """Return the paths under which nodes hold different files."""
    several: dict[str, set[H]] = {}
    for paths_at_node in files.values():
        for path, file in paths_at_node.items():
            several.setdefault(path, set()).add(file)
    return {path for path, versions in several.items() if len(versions) > 1}


def find_missing_files(
    files: Mapping[str, Mapping[str, H]], nodes: Sequence[str], order: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return which files these nodes lack, by node: path and the first node in `order` that has it."""
    source = {path: node for node in reversed(order) for path in files[node]}
    all_lacking = {node: {p: source[p] for p in sorted(source) if p not in files[node]} for node in nodes}
    return {node: paths for node, paths in all_lacking.items() if paths}


def find_nodes_with_lost_files(
    files: Mapping[str, Mapping[str, H]], unreachable: Mapping[str, Collection[int]]
) -> list[str]:
    """Return the nodes that cannot be asked and with which a part of the checkpoint is lost, as far as one can tell.

    Args:
        files: By node: what is there, by path.
        unreachable: Nodes that cannot be asked, and their ranks.
    """
    paths = {path for paths_at_node in files.values() for path in paths_at_node}
    named = {int(found[1] or found[2]) for path in paths for found in _RANK.finditer(path)}
    if named:
        return [node for node, ranks in unreachable.items() if not named.issuperset(ranks)]
    # Where one node has all of it, no node had a part of its own.
    return [] if any(paths == paths_at_node.keys() for paths_at_node in files.values()) else list(unreachable)
