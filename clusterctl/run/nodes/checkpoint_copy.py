"""Files of a checkpoint from the nodes that have them to those that lack them, through the head."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import posixpath
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from clusterctl.agent.protocol import requests
from clusterctl.agent.protocol.frames import CHUNK_BYTES
from clusterctl.errors import ClusterctlError, NodeError, RefusedError
from clusterctl.formatting import format_size
from clusterctl.run.nodes.downloads import FetchOptions, fetch_to_spool
from clusterctl.run.nodes.fan_out import CancelledError, Progress, call_all, fold_names, raise_first
from clusterctl.run.nodes.uploads import Destination, copy_entries
from clusterctl.run.rules import controller_events
from clusterctl.session.session import Session

Entry = tuple[str, int, int, str]
"""Name, size, permission bits and SHA-256 of a file."""


class CheckpointCopy:
    """Copies one checkpoint.

    Args:
        path: Of the checkpoint, as nodes show it.
        needed: By node that lacks files: each file, as nodes show it, and the node that has it.
        sizes: Bytes of these files.
        workdirs: By node.
        sessions: By node.
    """

    def __init__(
        self,
        path: str,
        needed: Mapping[str, Mapping[str, str]],
        sizes: Mapping[str, int],
        workdirs: Mapping[str, str],
        sessions: Mapping[str, Session],
    ) -> None:
        self._path, self._needed, self._sizes = path, needed, sizes
        self._workdirs, self._sessions = workdirs, sessions
        self._folder, self._base = posixpath.split(path.rstrip("/"))
        self.sources = sorted({source for files in needed.values() for source in files.values()})

    @property
    def size(self) -> int:
        """Bytes that pass through the head, each once."""
        return sum(self._sizes[path] for path in {path for files in self._needed.values() for path in files})

    @property
    def sentence(self) -> str:
        """What is copied, from where to where."""
        route = f"from {fold_names(self.sources)} to {fold_names(self._needed)}"
        return f"{self._path} copied {route}, {format_size(self.size)}"

    def run(
        self, spool: Path, post: Callable[[controller_events.ControllerEvent], None], cancelled: threading.Event
    ) -> None:
        """Copy it; each file is put in place at once and whole, once its hash is right.

        Args:
            spool: Folder on the head in which the files lie meanwhile.
            post: Takes how far it has come.
            cancelled: Set when a person has ended the run.

        Raises:
            RefusedError: There is no space, or the files have changed.
            CancelledError: A person ended the run.
            NodeError: A node could not send or take them, or was lost.
        """
        step = Progress("resume", len(self._needed), post)
        for node in self._needed:
            step.set_waiting(node, f"waiting for {self._path} from {fold_names(self.sources)}")
        try:
            for source in self.sources:
                self._from(source, spool, step, cancelled)
        except CancelledError:
            step.end(failed=True)
            raise
        except ClusterctlError as error:
            step.end(failed=True)
            raise self._explained(error) from error
        for node in self._needed:
            step.finish_node(node)
        step.end(format_size(self.size))

    def _explained(self, error: ClusterctlError) -> ClusterctlError:
        text = f"`{self._path}` cannot be copied from {fold_names(self.sources)} to {fold_names(self._needed)}: {error}"
        if isinstance(error, NodeError):
            return NodeError(error.node, text, hint=error.hint)
        return RefusedError(text, hint=error.hint)

    def _from(self, source: str, spool: Path, step: Progress, cancelled: threading.Event) -> None:
        """Copy what one node has to all that lack it."""
        wanted = {path for files in self._needed.values() for path, whence in files.items() if whence == source}
        total = sum(self._sizes[path] for path in wanted)
        free = shutil.disk_usage(spool).free
        if total > free:
            hint = "make room there, or have the job write to a folder that all nodes share"
            raise RefusedError(
                f"{format_size(total)} pass through {spool} on this machine, which has {format_size(free)}", hint=hint
            )
        try:
            with tempfile.TemporaryFile(dir=spool) as file:
                counted = _Counter(f"from {source}", total, step)
                how = FetchOptions(
                    max_bytes=free, limit_name="room", follow_links=True, on_bytes=counted.add, cancelled=cancelled
                )
                folder = posixpath.join(self._workdirs[source], self._folder)
                came = fetch_to_spool(self._sessions[source], folder, glob.escape(self._base), file, how)
                file.flush()
                entries = self._checked(source, wanted, _entries(file, came))
                self._to_all(source, file, entries, step, cancelled)
        except OSError as error:
            raise RefusedError(f"{spool} on this machine cannot be written: {error.strerror or error}") from error

    def _checked(
        self, source: str, wanted: set[str], entries: dict[str, tuple[int, Entry]]
    ) -> dict[str, tuple[int, Entry]]:
        """Return the entries of what is wanted, by path as nodes show it.

        Raises:
            RefusedError: A file has gone or is another one by now.
        """
        by_path = {posixpath.join(self._folder, name): entry for name, entry in entries.items()}
        for path in sorted(wanted):
            if path not in by_path or by_path[path][1][1] != self._sizes[path]:
                raise RefusedError(f"`{path}` on {source} has gone or was changed meanwhile")
        return by_path

    def _to_all(
        self,
        source: str,
        file: BinaryIO,
        entries: Mapping[str, tuple[int, Entry]],
        step: Progress,
        cancelled: threading.Event,
    ) -> None:
        targets = {
            node: [entries[path] for path, whence in files.items() if whence == source]
            for node, files in self._needed.items()
        }
        targets = {node: files for node, files in targets.items() if files}
        counted = _Counter(
            f"to {fold_names(targets)}", sum(entry[1] for files in targets.values() for _, entry in files), step
        )

        def one(node: str, session: Session) -> None:
            step.set_waiting(node, f"receiving {self._path}")
            files = targets[node]
            place = Destination(self._workdirs[node], self._folder or ".", is_folder=True)

            def contents(need: Sequence[int]) -> Iterator[bytes]:
                for number in need:
                    start, entry = files[number]
                    for chunk in _pieces(file, start, entry[1]):
                        if cancelled.is_set():
                            raise CancelledError("cancelled while a checkpoint was copied")
                        counted.add(len(chunk))
                        yield chunk

            copy_entries(session, place, requests.encode_file_list([entry for _, entry in files]), contents)

        _, errors = call_all({node: self._sessions[node] for node in targets}, one)
        raise_first(errors)


class _Counter:
    """Shows how many bytes have gone one way."""

    def __init__(self, way: str, total: int, step: Progress) -> None:
        self._way, self._total, self._step = way, total, step
        self._done = 0
        self._guard = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes."""
        with self._guard:
            self._done += count
            self._step.set_detail(f"{self._way}: {format_size(self._done)} of {format_size(self._total)}")


def _entries(file: BinaryIO, came: Sequence[tuple[str, int, int]]) -> dict[str, tuple[int, Entry]]:
    """Return where each file that has come begins, and its entry, by name."""
    entries, start = {}, 0
    for name, length, mode in came:
        digest = hashlib.sha256()
        for chunk in _pieces(file, start, length):
            digest.update(chunk)
        entries[name] = (start, (name, length, mode & 0o777, digest.hexdigest()))
        start += length
    return entries


def _pieces(file: BinaryIO, start: int, length: int) -> Iterator[bytes]:
    """Yield a part of a file; several threads may read it."""
    read = functools.partial(os.pread, file.fileno())
    end = start + length
    while start < end and (chunk := read(min(CHUNK_BYTES, end - start), start)):
        start += len(chunk)
        yield chunk
