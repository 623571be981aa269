"""Chooses the newest complete checkpoint, from which an attempt resumes, and copies it to nodes that lack it.

Files that existed when the run began belong to other runs. Such files are recognized by modification time and size,
even if they were renamed. Clocks of different machines are never compared.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import posixpath
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from clusterctl.agent.protocol import file_list
from clusterctl.agent.protocol.command_payload_types import CheckpointsAnswer, CheckpointsArguments
from clusterctl.agent.protocol.frames import CHUNK_BYTES
from clusterctl.config.field_types import ResumePolicy
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import CheckpointSpec, ClusterSpec, TransportKind
from clusterctl.errors import ClusterctlError, NodeError, RefusedError
from clusterctl.formatting import format_size
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes.downloads import FetchOptions, fetch_to_spool
from clusterctl.run.nodes.fan_out import (
    CancelledError,
    Progress,
    call_all,
    raise_first,
    select_sessions,
)
from clusterctl.run.nodes.uploads import Destination, copy_listed_files
from clusterctl.run.record import run_origin
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.missing_checkpoint_files import (
    CopiedFile,
    Version,
    find_conflicting_paths,
    find_missing_files,
    find_nodes_with_lost_files,
    resolve_copy_versions,
)
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import CHECKPOINTS

CheckpointsByNode = dict[str, dict[str, Version]]
"""For each node: the path of each complete checkpoint, and the version of the newest file in the checkpoint."""

_FILE = "checkpoints.json"
_SHARED_DELAY_S = 5.0
"""Seconds until a shared file system shows a new file on other machines."""
_POLL_S = 0.5
_MAX_TRIED = 20
"""The most checkpoints to try, beginning with the newest."""
_HASH_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint; the node that writes the checkpoint reports its `version`."""

    path: str
    version: Version

    @property
    def label(self) -> str:
        """A text that identifies the checkpoint. A later checkpoint with the same path has another label."""
        return f"{self.path} {self.version[0]!r} {self.version[1]}"


# --- decisions


def exclude_earlier_checkpoints(
    present: Mapping[str, Mapping[str, Version]], before: Mapping[str, Collection[Version]]
) -> CheckpointsByNode:
    """Return the checkpoints that were written after the run began.

    Args:
        present: The checkpoints of each node now.
        before: The versions of all files of each node at the start of the run. A node without an entry, such as a spare
            that connected later, may have older files. Its checkpoints count only if a node with an entry has them,
            too.
    """
    old = {version for versions in before.values() for version in versions}
    fresh = {node: {p: v for p, v in checkpoints.items() if v not in old} for node, checkpoints in present.items()}
    vouched = {item for node, checkpoints in fresh.items() if node in before for item in checkpoints.items()}
    return {
        node: checkpoints if node in before else dict(item for item in checkpoints.items() if item in vouched)
        for node, checkpoints in fresh.items()
    }


def list_checkpoints_newest_first(
    order: Sequence[str], present: Mapping[str, Mapping[str, Version]], copies: Sequence[CopiedFile]
) -> list[Checkpoint]:
    """Return the checkpoints of the first node that writes checkpoints, newest first.

    If no node writes checkpoints, return the checkpoints of the first node that received copies. Modification times on
    different nodes are not compared.
    """
    copied = {(copy.node, copy.version) for copy in copies}
    writers = [node for node in order if any((node, version) not in copied for version in present[node].values())]
    first = next((node for node in [*writers, *order] if present[node]), None)
    if first is None:
        return []
    by_age = sorted(present[first].items(), key=lambda item: (item[1][0], item[0]), reverse=True)
    return [Checkpoint(path, version) for path, version in by_age]


def describe_resume_choice(number: int, checkpoint: CheckpointSpec, path: str | None) -> str:
    """Return a sentence about the checkpoint from which an attempt resumes; `path` is `None` without a checkpoint."""
    if path is not None:
        return f"attempt {number} goes on from `{path}`"
    whose = "" if checkpoint.resume is ResumePolicy.ANY else " of this run"
    return f"attempt {number} starts from scratch: no checkpoint{whose} matches `{checkpoint.pattern}`"


class _UnusableError(Exception):
    """The nodes of an attempt cannot resume from this checkpoint."""


# --- copying


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """Copies a checkpoint through the head, from the nodes that have its files to the nodes that lack them.

    Attributes:
        path: Path of the checkpoint on the nodes.
        needed: For each node that lacks files: the path of each missing file, and a node that has the file.
        sizes: The size of each missing file in bytes, by path.
        workdirs: Workdir of each node.
        sessions: Session of each node.
    """

    path: str
    needed: Mapping[str, Mapping[str, str]]
    sizes: Mapping[str, int]
    workdirs: Mapping[str, str]
    sessions: Mapping[str, Session]

    @property
    def size_bytes(self) -> int:
        """Bytes that pass through the head; each file counts once."""
        return sum(self.sizes[path] for path in {path for files in self.needed.values() for path in files})

    @property
    def sources(self) -> list[str]:
        """The nodes that send files."""
        return sorted({source for files in self.needed.values() for source in files.values()})

    @property
    def route(self) -> str:
        """The source nodes and target nodes of the copy, in words."""
        return f"from {fold_hosts(self.sources)} to {fold_hosts(self.needed)}"

    def copy_to_nodes(
        self, spool: Path, post: Callable[[controller_events.ControllerEvent], None], cancelled: threading.Event
    ) -> None:
        """Copy the files. Each file appears on a node only when it is complete and its hash is verified.

        Args:
            spool: Folder on the head for temporary files.
            post: A function that receives events about the progress.
            cancelled: Set when the user has cancelled the run.

        Raises:
            RefusedError: There is no space, or the files have changed.
            CancelledError: The user cancelled the run.
            NodeError: A node could not send or receive the files, or was lost.
        """
        step = Progress("resume", len(self.needed), post)
        for node in self.needed:
            step.set_waiting(node, f"waiting for {self.path} from {fold_hosts(self.sources)}")
        try:
            for source in self.sources:
                self._copy_from(source, spool, step, cancelled)
        except ClusterctlError as error:
            step.end(failed=True)
            text = f"`{self.path}` cannot be copied {self.route}: {error}"
            if isinstance(error, CancelledError):
                raise
            if isinstance(error, NodeError):
                raise NodeError(error.node, text, hint=error.hint) from error
            raise RefusedError(text, hint=error.hint) from error
        for node in self.needed:
            step.finish_node(node)
        step.end(format_size(self.size_bytes))

    def _copy_from(self, source: str, spool: Path, step: Progress, cancelled: threading.Event) -> None:
        """Copy files from one node to all nodes that lack these files."""
        targets = {
            node: paths
            for node, files in self.needed.items()
            if (paths := [path for path, whence in files.items() if whence == source])
        }
        wanted = {path for paths in targets.values() for path in paths}
        total = sum(self.sizes[path] for path in wanted)
        free = shutil.disk_usage(spool).free
        if total > free:
            raise RefusedError(
                f"{format_size(total)} pass through {spool} on this machine, which has {format_size(free)}",
                hint="make room there, or have the job write to a folder that all nodes share",
            )
        folder, base = posixpath.split(self.path.rstrip("/"))
        how = FetchOptions(
            max_bytes=free,
            limit_name="room",
            follow_links=True,
            on_bytes=lambda count: step.add_bytes(f"from {source}", count, total),
            cancelled=cancelled,
        )
        try:
            with tempfile.TemporaryFile(dir=spool) as file:
                workdir = posixpath.join(self.workdirs[source], folder)
                came = fetch_to_spool(self.sessions[source], workdir, glob.escape(base), file, how)
                file.flush()
                entries = {posixpath.join(folder, name): entry for name, entry in _hash_entries(file, came).items()}
                for path in sorted(wanted):
                    if path not in entries or entries[path][1][1] != self.sizes[path]:
                        raise RefusedError(f"`{path}` on {source} was removed or changed meanwhile")
                contents = {node: [entries[path] for path in paths] for node, paths in targets.items()}
                self._send(file, contents, step, cancelled)
        except OSError as error:
            raise RefusedError(f"{spool} on this machine cannot be written: {error.strerror or error}") from error

    def _send(
        self, file: BinaryIO, contents: Mapping[str, list[_SpooledFile]], step: Progress, cancelled: threading.Event
    ) -> None:
        """Send each node the files that it lacks, from the spool file."""
        way = f"to {fold_hosts(contents)}"
        total = sum(entry[1] for files in contents.values() for _, entry in files)

        def send(node: str, session: Session) -> None:
            step.set_waiting(node, f"receiving {self.path}")

            def read(numbers: Sequence[int]) -> Iterator[bytes]:
                for number in numbers:
                    start, entry = contents[node][number]
                    for chunk in _read_pieces(file, start, entry[1]):
                        if cancelled.is_set():
                            raise CancelledError("cancelled while a checkpoint was copied")
                        step.add_bytes(way, len(chunk), total)
                        yield chunk

            place = Destination(self.workdirs[node], posixpath.dirname(self.path.rstrip("/")) or ".", is_folder=True)
            listing = file_list.encode_file_list([entry for _, entry in contents[node]])
            copy_listed_files(session, place, listing, read)

        raise_first(call_all({node: self.sessions[node] for node in contents}, send)[1])


_SpooledFile = tuple[int, tuple[str, int, int, str]]
"""Describes a file within the spool file: its offset; its name, size in bytes, permission bits and SHA-256."""


def _hash_entries(file: BinaryIO, came: Sequence[tuple[str, int, int]]) -> dict[str, _SpooledFile]:
    """Return the description of each file within the spool file, by name."""
    entries, start = {}, 0
    for name, length, mode in came:
        digest = hashlib.sha256()
        for chunk in _read_pieces(file, start, length):
            digest.update(chunk)
        entries[name] = (start, (name, length, mode & 0o777, digest.hexdigest()))
        start += length
    return entries


def _read_pieces(file: BinaryIO, start: int, length: int) -> Iterator[bytes]:
    """Yield a part of a file in pieces. Several threads may read the file at once."""
    end = start + length
    while start < end and (chunk := os.pread(file.fileno(), min(CHUNK_BYTES, end - start), start)):
        start += len(chunk)
        yield chunk


# --- the choice


class CheckpointPicker:
    """Chooses the checkpoint of each attempt of a run.

    Thread: the launch thread, or a thread that searches for the newest checkpoint after an attempt.

    Args:
        run: The run directory. It stores the versions of earlier files for a controller that adopts the run.
        spec: The spec of the cluster file.
        sessions: A function that returns the current sessions by node.
        post: A function that receives the controller events, in order.
        cancelled: Set when the user has cancelled the run.
    """

    def __init__(
        self,
        run: RunDir,
        spec: ClusterSpec,
        sessions: Callable[[], Mapping[str, Session]],
        post: Callable[[controller_events.ControllerEvent], None],
        cancelled: threading.Event,
    ) -> None:
        self._run, self._sessions, self._post, self._cancelled = run, sessions, post, cancelled
        self._file = run.path / _FILE
        self._name = spec.name
        self._here = {host.name for host in spec.hosts if host.transport is TransportKind.LOCAL}
        self._workdirs = {host.name: get_workdir(spec, host.name) for host in spec.hosts}
        self._checkpoint = spec.job.checkpoint if spec.job is not None else CheckpointSpec()
        self._restarts = spec.restart.max_restarts > 0
        self._stored = _load_stored_versions(self._file)

    def choose_resume_checkpoint(
        self, number: int, nodes: Sequence[str], dropped_nodes: Mapping[str, Sequence[int]]
    ) -> tuple[str | None, Checkpoint | None]:
        """Choose the checkpoint for an attempt, and copy missing files. Return its path, and the newest checkpoint.

        Args:
            number: The attempt.
            nodes: The nodes of the attempt, in order of node rank.
            dropped_nodes: The nodes that only the previous attempt used, with their ranks.

        Raises:
            RefusedError: There are checkpoints, but these nodes cannot resume from any checkpoint.
            NodeError: A node did not answer, or was lost.
        """
        pattern, mode = self._checkpoint.pattern, self._checkpoint.resume
        if pattern is None or (number == 0 and mode is not ResumePolicy.ANY and not self._was_requeued(nodes)):
            self._record_existing(nodes)
            return None, None
        snapshot = self._take_snapshot(nodes, dropped_nodes)
        newest = snapshot.checkpoints[0] if snapshot.checkpoints else None
        if mode is ResumePolicy.NEVER:
            return None, newest
        if newest is None:
            self._refuse_lost_checkpoints(snapshot)
            self._note(describe_resume_choice(number, self._checkpoint, None))
            return None, None
        path = self._pick_usable(snapshot)
        self._note(describe_resume_choice(number, self._checkpoint, path))
        return path, self._take_snapshot(nodes, dropped_nodes).checkpoints[0]

    def find_newest_checkpoint(self, nodes: Sequence[str]) -> Checkpoint | None:
        """Return the newest checkpoint of the run on these nodes.

        Raises:
            NodeError: A node cannot be asked.
        """
        if self._checkpoint.pattern is None:
            return None
        return next(iter(self._take_snapshot(nodes, {}).checkpoints), None)

    def _note(self, text: str, level: str = "info") -> None:
        self._post(controller_events.Note(text=text, level=level))

    def _was_requeued(self, nodes: Sequence[str]) -> bool:
        """Return whether Slurm has requeued the job of this run, so that it continues an earlier run.

        A file that existed before the first of these runs belongs to none of these runs.
        """
        if self._checkpoint.resume is not ResumePolicy.THIS_RUN:
            return False
        stored = [_load_stored_versions(run.path / _FILE) for run in run_origin.list_runs_before_requeue(self._run)]
        earlier = next((one for one in stored if one.before), None)
        if earlier is None:
            return False
        answers = self._ask(nodes)
        # On a shared disk, a new node has the same files. On a local disk, it has no files of this job.
        everything = set().union(*earlier.before.values())
        for node in (node for node in nodes if node not in earlier.before):
            if self._checkpoint.shared or answers[node].get("network", False):
                earlier.before[node] = everything
        self._stored = earlier
        self._stored.save(self._file)
        return True

    def _pick_usable(self, snapshot: _Snapshot) -> str:
        """Return the newest checkpoint from which the nodes can resume. Copy missing files to nodes."""
        reasons: list[str] = []
        for checkpoint in snapshot.checkpoints[:_MAX_TRIED]:
            try:
                needed, files = self._find_needed(checkpoint.path, snapshot)
            except _UnusableError as error:
                reasons.append(str(error))
                continue
            if reasons:
                self._note(reasons[0], "warn")
            if needed:
                self._copy_files(checkpoint.path, needed, files, snapshot)
            return checkpoint.path
        hint = "have the job write to a folder that all nodes share; `clusterctl up` starts from scratch"
        raise RefusedError(f"no checkpoint can be resumed, and none is overwritten: {reasons[0]}", hint=hint)

    def _find_needed(
        self, path: str, snapshot: _Snapshot
    ) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, Version]]]:
        """Return two mappings: each node's missing files, with a node that has the file; and each node's present files.

        Raises:
            _UnusableError: The nodes cannot resume from this checkpoint.
        """
        files = self._list_files(path, snapshot)
        own = find_conflicting_paths(files)
        if own and self._has_different_content(path, files, own):
            lacking_all = [node for node in snapshot.nodes if path not in snapshot.seen[node]]
            if lacking_all:
                raise _UnusableError(f"each node has a `{path}` of its own, and {fold_hosts(lacking_all)} has none")
            return {}, files
        needed = find_missing_files(files, snapshot.nodes, snapshot.order)
        if needed:
            lost = find_nodes_with_lost_files(files, snapshot.unreachable)
            if lost:
                raise _UnusableError(f"the part of `{path}` that {fold_hosts(lost)} wrote is lost with the node")
            for node in [node for node in needed if not files[node]]:
                self._refuse_own_checkpoints(path, node, snapshot)
        return needed, files

    def _refuse_own_checkpoints(self, path: str, node: str, snapshot: _Snapshot) -> None:
        """Refuse to copy a checkpoint to a node that writes checkpoints itself, for these may belong to other ranks."""
        copied = {copy.version for copy in self._stored.copies if copy.node == node}
        written = {p: version for p, version in snapshot.seen[node].items() if version not in copied}
        if not written:
            return
        last = max(written, key=lambda p: (written[p], p))
        if all(one.path != last for one in snapshot.checkpoints):
            raise _UnusableError(f"`{path}` is not on {node}, which writes checkpoints of other names, as `{last}`")
        files = self._list_files(last, snapshot)
        own = find_conflicting_paths(files)
        if own and self._has_different_content(last, files, own):
            raise _UnusableError(f"`{path}` is not on {node}, and each node writes its own")

    def _has_different_content(self, path: str, files: Mapping[str, Mapping[str, Version]], paths: set[str]) -> bool:
        """Return whether the content of these files differs between nodes."""
        sizes = {node: {p: v[1] for p, v in present.items() if p in paths} for node, present in files.items()}
        if find_conflicting_paths(sizes):
            return True
        answers = self._ask([node for node in self._sessions() if sizes.get(node)], path, hashes=True)
        folder = posixpath.dirname(path.rstrip("/"))
        hashes = {
            node: {p: f["sha256"] for f in answer["files"] if (p := posixpath.join(folder, f["name"])) in paths}
            for node, answer in answers.items()
        }
        return bool(find_conflicting_paths(hashes))

    def _list_files(self, path: str, snapshot: _Snapshot) -> dict[str, dict[str, Version]]:
        """Return the files of a checkpoint on each node by path, without files from before the run."""
        answers = self._ask(snapshot.order, path, required=snapshot.nodes)
        files = {node: _parse_files(path, answer) for node, answer in answers.items()}
        old = {version for versions in self._stored.before.values() for version in versions}
        for node, present in files.items():
            # A new and complete checkpoint may contain the copy of an older file, with the time of the older file.
            if path not in snapshot.seen[node] and self._checkpoint.resume is not ResumePolicy.ANY:
                files[node] = {p: version for p, version in present.items() if version not in old}
        return resolve_copy_versions(files, self._stored.copies)

    def _copy_files(
        self,
        path: str,
        needed: Mapping[str, Mapping[str, str]],
        sources: Mapping[str, Mapping[str, Version]],
        snapshot: _Snapshot,
    ) -> None:
        """Copy the missing files of a checkpoint to nodes, and record that these files are copies."""
        if self._checkpoint.shared:
            having = fold_hosts(node for node in snapshot.nodes if node not in needed)
            text = f"`{path}` is not on {fold_hosts(needed)}" + (f" as it is on {having}" if having else "")
            self._note(f"`job.checkpoint.shared` says that all nodes see the same files, but {text}", "warn")
        sizes = {file: version[1] for files in sources.values() for file, version in files.items()}
        copy = CheckpointCopy(path, needed, sizes, self._workdirs, select_sessions(self._sessions(), snapshot.order))
        copy.copy_to_nodes(self._file.parent, self._post, self._cancelled)
        for node, answer in self._ask(list(needed), path).items():
            present = _parse_files(path, answer)
            for file, source in needed[node].items():
                if file not in present or present[file][1] != sizes[file]:
                    raise RefusedError(f"`{file}` was copied to {node} and does not exist there any more")
                self._stored.copies.append(CopiedFile(node, file, present[file], source, sources[source][file]))
        self._stored.save(self._file)
        self._note(f"{path} copied {copy.route}, {format_size(copy.size_bytes)}")

    def _refuse_lost_checkpoints(self, snapshot: _Snapshot) -> None:
        """Refuse to start without a checkpoint if an unreachable node may have the only checkpoints.

        Raises:
            RefusedError: Rank 0 ran on an unreachable node, and no other machine can see the files of this node.
        """
        gone = [node for node, ranks in snapshot.unreachable.items() if 0 in ranks]
        if gone and _has_only_local_disks(self._ask(snapshot.nodes), self._here, least=1):
            lost = fold_hosts(gone)
            where = fold_hosts(snapshot.nodes)
            text = f"no checkpoint of this run is on {where}, and {lost}, which cannot be reached, may have some"
            hint = f"start again with {lost} and `job.checkpoint.resume: any`, or from scratch with `clusterctl up`"
            raise RefusedError(text, hint=hint)

    def _record_existing(self, nodes: Sequence[str]) -> None:
        """Record the files that exist on nodes and spares before the run writes files."""
        pattern = self._checkpoint.pattern
        in_slurm = (begun := run_origin.read_origin(self._run)) is not None and begun.slurm_job
        if pattern is None or not (self._restarts or in_slurm):
            return
        answers = self._ask(list(self._sessions()), required=nodes)
        self._stored.before = {node: _parse_versions(answer["versions"]) for node, answer in answers.items()}
        self._stored.save(self._file)
        if self._checkpoint.resume is ResumePolicy.NEVER:
            return
        # A note that an earlier start of this job has shown is not repeated.
        earlier = [
            _load_stored_versions(path)
            for path in self._file.parent.parent.glob(f"*/{_FILE}")
            if path != self._file and path.parent.name.rpartition("-")[0] == self._name
        ]
        older = {entry["path"] for answer in answers.values() for entry in answer["found"]}
        is_new = not any(versions for one in earlier for versions in one.before.values())
        if older and self._checkpoint.resume is ResumePolicy.THIS_RUN and is_new:
            what, it = ("checkpoint", "it") if len(older) == 1 else ("checkpoints", "them")
            self._note(
                f"{len(older)} {what} of earlier runs match{'es' if len(older) == 1 else ''} `{pattern}`: "
                f"this run does not go on from {it} (`job.checkpoint.resume: any` would)"
            )
        if self._restarts and _has_only_local_disks({node: answers[node] for node in nodes}, self._here):
            if self._checkpoint.shared:
                text = f"all nodes see the same files, but `{pattern}` is on disks of their own"
                self._note(f"`job.checkpoint.shared` says that {text}", "warn")
            elif not earlier:
                text = "a restart copies the newest checkpoint to nodes that lack it"
                self._note(f"`{pattern}` is on disks of the nodes' own: {text}")

    def _take_snapshot(self, nodes: Sequence[str], dropped_nodes: Mapping[str, Sequence[int]]) -> _Snapshot:
        """Return the checkpoints of this run on the nodes of an attempt and on dropped nodes."""
        sessions = self._sessions()
        order = list(dict.fromkeys([nodes[0], *(node for node in dropped_nodes if node in sessions), *nodes[1:]]))
        unreachable = {node: tuple(ranks) for node, ranks in dropped_nodes.items() if node not in sessions}
        until = time.monotonic() + (_SHARED_DELAY_S if self._checkpoint.shared else 0.0)
        while True:
            seen = self._list_checkpoints(order, nodes)
            checkpoints = list_checkpoints_newest_first(order, seen, self._stored.copies)
            is_late = checkpoints and any(checkpoints[0].path not in seen[node] for node in nodes)
            if not is_late or time.monotonic() > until:
                return _Snapshot(tuple(nodes), order, unreachable, seen, checkpoints)
            self._cancelled.wait(_POLL_S)

    def _list_checkpoints(self, order: Sequence[str], nodes: Sequence[str]) -> CheckpointsByNode:
        excludes_older = self._checkpoint.resume is not ResumePolicy.ANY
        unknown = [node for node in order if node not in self._stored.before] if excludes_older else []
        answers = self._ask(order, required=nodes, versions=bool(unknown))
        if unknown:
            # A node that was not asked at the start joins now. Assume that a file which only this node has is older
            # than the run.
            known = {v for n in order if n not in unknown for v in _parse_versions(answers[n]["versions"])}
            for node in unknown:
                self._stored.before[node] = _parse_versions(answers[node]["versions"]) - known
            self._stored.save(self._file)
        seen = {
            node: {entry["path"]: (entry["mtime"], entry["size"]) for entry in answer["found"]}
            for node, answer in answers.items()
        }
        return exclude_earlier_checkpoints(seen, self._stored.before) if excludes_older else seen

    def _ask(
        self,
        nodes: Sequence[str],
        path: str | None = None,
        *,
        required: Sequence[str] | None = None,
        versions: bool = True,
        hashes: bool = False,
    ) -> dict[str, CheckpointsAnswer]:
        """Return the complete checkpoints of nodes, or the files of one checkpoint.

        Args:
            nodes: The nodes to ask.
            path: The checkpoint; `None` for all.
            required: The nodes that have to answer, by default all. Any other node counts as empty if it does not
                answer.
            versions: Also ask for the versions of all files; used without `path`.
            hashes: Also ask for the hashes of the files; used with `path`.

        Raises:
            NodeError, NodesError: A required node did not answer.
        """
        required = nodes if required is None else required
        sessions = self._sessions()
        select_sessions(sessions, required)

        def ask(node: str, session: Session) -> CheckpointsAnswer:
            question: CheckpointsArguments = {"workdir": self._workdirs[node], "pattern": self._checkpoint.pattern}
            if path is None:
                return CHECKPOINTS.call(session, {**question, "versions": versions})
            timeout = _HASH_TIMEOUT_S if hashes else None
            return CHECKPOINTS.call(session, {**question, "files": path, "hashes": hashes}, timeout=timeout)

        answers, errors = call_all({node: sessions[node] for node in nodes if node in sessions}, ask)
        raise_first({node: errors[node] for node in required if node in errors})
        nothing: CheckpointsAnswer = {"found": [], "files": [], "versions": []}
        return {node: answers.get(node, nothing) for node in nodes}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The checkpoints on the nodes at one moment.

    Attributes:
        nodes: The nodes of the attempt, in order of node rank.
        order: These nodes and the dropped nodes with a session. The first of these nodes that writes checkpoints
            decides which checkpoint is the newest.
        unreachable: The dropped nodes without a session, and their ranks.
        seen: The checkpoints of each node that belong to this run.
        checkpoints: The checkpoints from which the attempt could resume, newest first.
    """

    nodes: tuple[str, ...]
    order: list[str]
    unreachable: dict[str, tuple[int, ...]]
    seen: CheckpointsByNode
    checkpoints: list[Checkpoint]


@dataclass(slots=True)
class _StoredVersions:
    """The versions of checkpoint files that the run directory stores.

    Attributes:
        before: The versions of all files of each node when the run began, or when the node joined.
        copies: The files that were copied to nodes at restarts.
    """

    before: dict[str, set[Version]]
    copies: list[CopiedFile]

    def save(self, path: Path) -> None:
        copies = [[copy.node, copy.path, copy.version, copy.source_node, copy.source_version] for copy in self.copies]
        before = {node: sorted(versions) for node, versions in self.before.items()}
        write_atomically(path, json.dumps({"before": before, "copies": copies}).encode())


def _load_stored_versions(path: Path) -> _StoredVersions:
    """Return the stored versions; none if the file does not exist or cannot be read."""
    try:
        stored = json.loads(path.read_text())
        copies = [
            CopiedFile(node, file, (float(v[0]), int(v[1])), source, (float(w[0]), int(w[1])))
            for node, file, v, source, w in stored["copies"]
        ]
        before = {node: _parse_versions(versions) for node, versions in stored["before"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return _StoredVersions({}, [])
    return _StoredVersions(before, copies)


def _parse_versions(versions: Iterable[Sequence[float]]) -> set[Version]:
    return {(float(mtime), int(size)) for mtime, size in versions}


def _parse_files(path: str, answer: CheckpointsAnswer) -> dict[str, Version]:
    """Return the files of a checkpoint that a node has, by path."""
    folder = posixpath.dirname(path.rstrip("/"))
    return {posixpath.join(folder, file["name"]): (file["mtime"], file["size"]) for file in answer["files"]}


def _has_only_local_disks(answers: Mapping[str, CheckpointsAnswer], here: Collection[str], least: int = 2) -> bool:
    """Return whether at least `least` machines have disks of their own. All local nodes (`here`) are one machine."""
    machines = len(answers) - max(0, sum(node in here for node in answers) - 1)
    return machines >= least and not any(answer.get("network", True) for answer in answers.values())
