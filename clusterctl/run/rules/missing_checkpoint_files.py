"""Finds nodes that lack files of a checkpoint, and nodes whose files may be lost. Pure.

A node may hold all files of a checkpoint, only the shards of its own ranks, or no files. A copy counts as the same file
as its source. If the source is written again, the copy is out of date and ignored.
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
"""The rank in the name of a checkpoint file. DeepSpeed's `mp_rank_00` is no rank of the job."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file that was copied to a node: its version there, and the node and version of its source."""

    node: str
    path: str
    version: Version
    source_node: str
    source_version: Version


def resolve_copy_versions(
    files: Mapping[str, Mapping[str, Version]], copies: Iterable[CopiedFile]
) -> dict[str, dict[str, Version]]:
    """Return the files of each node. A copied file gets the version of its source.

    A copy is left out if its source has changed. It is also left out if its source was removed from a node that still
    has other files.

    Args:
        files: The files of each node, by path.
        copies: The files that were copied to nodes. Programs may have overwritten them since then.
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
    """Return the files that each node lacks, with the first node in `order` that has them."""
    source = {path: node for node in reversed(order) for path in files[node]}
    all_lacking = {node: {p: source[p] for p in sorted(source) if p not in files[node]} for node in nodes}
    return {node: paths for node, paths in all_lacking.items() if paths}


def find_nodes_with_lost_files(
    files: Mapping[str, Mapping[str, H]], unreachable: Mapping[str, Collection[int]]
) -> list[str]:
    """Return the unreachable nodes that may hold the only copy of a part of the checkpoint.

    Args:
        files: The files of each node, by path.
        unreachable: The unreachable nodes, and their ranks.
    """
    paths = {path for paths_at_node in files.values() for path in paths_at_node}
    named = {int(found[1] or found[2]) for path in paths for found in _RANK.finditer(path)}
    if named:
        return [node for node, ranks in unreachable.items() if not named.issuperset(ranks)]
    # If one reachable node has all known files, assume that the unreachable nodes have no other files.
    return [] if any(paths == paths_at_node.keys() for paths_at_node in files.values()) else list(unreachable)
