"""Finds the replicas of worker output in a run directory on the head."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from clusterctl.agent.protocol.run_files import format_index_path, format_output_path

NODES_DIR = "nodes"

_STAMP_SETTLES_NS = 1_000_000_000
_ATTEMPT = re.compile(r"attempt-(\d+)")
_OUTPUT = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OutputFile:
    """The replica of one worker's output in one attempt."""

    attempt: int
    rank: int
    node: str
    path: str
    index_path: str


class OutputFileFinder:
    """Finds replicas of output files.

    To make polling cheap, the finder reads a folder again only if the folder has changed.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._nodes_dir = os.path.join(run_dir, NODES_DIR)
        self._stamps: dict[str, int] = {}
        self._known: set[str] = set()

    def find_new_files(self) -> list[OutputFile]:
        """Return the output files that are new since the last call, in the order of attempt and rank."""
        return sorted(self._iterate_new_files())

    def expect_file(self, node: str, attempt: int, rank: int) -> OutputFile:
        """Return an output file whose replica may not exist yet. `find_new_files` will not return this file."""
        node_dir = os.path.join(self._nodes_dir, node)
        path = os.path.join(node_dir, format_output_path(attempt, rank))
        self._known.add(path)
        index_path = os.path.join(node_dir, format_index_path(attempt, rank))
        return OutputFile(attempt=attempt, rank=rank, node=node, path=path, index_path=index_path)

    def _iterate_new_files(self) -> Iterator[OutputFile]:
        for node in _entries(self._nodes_dir):
            node_dir = os.path.join(self._nodes_dir, node)
            for name in _entries(node_dir):
                if match := _ATTEMPT.fullmatch(name):
                    yield from self._new_in(node_dir, node, int(match[1]))

    def _new_in(self, node_dir: str, node: str, attempt: int) -> Iterator[OutputFile]:
        folder = os.path.dirname(os.path.join(node_dir, format_output_path(attempt, 0)))
        try:
            stamp = os.stat(folder).st_mtime_ns
        except OSError:
            return
        if self._stamps.get(folder) == stamp:
            return
        # File times change only once per scheduler tick: after a recent change, the folder may change again with the
        # same time.
        if time.time_ns() - stamp > _STAMP_SETTLES_NS:
            self._stamps[folder] = stamp
        for name in _entries(folder):
            match = _OUTPUT.fullmatch(name)
            path = os.path.join(folder, name)
            if match and path not in self._known:
                yield self.expect_file(node, attempt, int(match[1]))


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
