"""From which checkpoint an attempt goes on: the newest whole one of the run, which is copied to nodes that lack it.

What was there when the run began belongs to others. It is known again by its time and size, whatever its path is by
then; clocks are compared with nothing.
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.agent.protocol import command_types
from clusterctl.agent.protocol.command_types import CheckpointsAnswer
from clusterctl.config.field_types import ResumePolicy
from clusterctl.config.spec import CheckpointSpec, ClusterSpec, TransportKind
from clusterctl.errors import RefusedError
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes.checkpoint_copy import CheckpointCopy
from clusterctl.run.nodes.fan_out import call_all, fold_names, raise_first, select_sessions
from clusterctl.run.record import run_facts
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.checkpoint_files import (
    CopiedFile,
    Version,
    find_conflicting_paths,
    find_missing_files,
    find_nodes_with_lost_files,
    resolve_copies,
)
from clusterctl.session.requests import CHECKPOINTS
from clusterctl.session.session import Session

CheckpointsByNode = dict[str, dict[str, Version]]
"""By node: the complete checkpoints there, by path; the version is that of the newest file."""

_FILE = "checkpoints.json"
_SHOWN_LATE = 5.0
_LOOK_AGAIN = 0.5
_MOST_TRIED = 20
"""Older checkpoints are not looked at: who has kept so many writes them often."""
_HASH_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint; `version` as the node gives it that writes them."""

    path: str
    version: Version

    @property
    def label(self) -> str:
        """Text that another checkpoint does not have, nor one that had this path before."""
        return f"{self.path} {self.version[0]!r} {self.version[1]}"


# --- deciding


def exclude_older(
    seen: Mapping[str, Mapping[str, Version]], before: Mapping[str, Collection[Version]]
) -> CheckpointsByNode:
    """Return what has appeared, or was written anew, since the run began.

    Args:
        seen: What each node shows now.
        before: The versions of all files that each node showed then. A node that was not asked, such as a spare that
            was reached later, counts only where it shows the very file that another node vouches for.
    """
    old = {version for versions in before.values() for version in versions}
    fresh = {node: {p: v for p, v in checkpoints.items() if v not in old} for node, checkpoints in seen.items()}
    vouched = {item for node, checkpoints in fresh.items() if node in before for item in checkpoints.items()}
    return {
        node: checkpoints if node in before else dict(item for item in checkpoints.items() if item in vouched)
        for node, checkpoints in fresh.items()
    }


def list_newest_first(
    order: Sequence[str], seen: Mapping[str, Mapping[str, Version]], copies: Sequence[CopiedFile]
) -> list[Checkpoint]:
    """Return the checkpoints of the first node that writes them, the newest first: times of nodes are not compared.

    Where no node has written any, they are those of the first node that has a copy of one.
    """
    copied = {(copy.node, copy.version) for copy in copies}
    writers = [node for node in order if any((node, version) not in copied for version in seen[node].values())]
    first = next((node for node in [*writers, *order] if seen[node]), None)
    if first is None:
        return []
    by_age = sorted(seen[first].items(), key=lambda item: (item[1][0], item[0]), reverse=True)
    return [Checkpoint(path, version) for path, version in by_age]


def describe_choice(number: int, checkpoint: CheckpointSpec, path: str | None) -> str:
    """Return what a person should know of an attempt: which checkpoint it takes, or that there is none."""
    if path is not None:
        return f"attempt {number} goes on from `{path}`"
    whose = "" if checkpoint.resume is ResumePolicy.ANY else " of this run"
    return f"attempt {number} starts from scratch: no checkpoint{whose} matches `{checkpoint.pattern}`"


def describe_older_checkpoints(count: int, pattern: str) -> str:
    """Return what a person should know of checkpoints that were there before a run that does not go on from them."""
    what, it = ("checkpoint", "it") if count == 1 else ("checkpoints", "them")
    return (
        f"{count} {what} of earlier runs match{'es' if count == 1 else ''} `{pattern}`: "
        f"this run does not go on from {it} (`job.checkpoint.resume: any` would)"
    )


def describe_local_disks(pattern: str, *, shared: bool) -> str:
    """Return what a person should know where each node keeps checkpoints for itself."""
    if shared:
        return (
            f"`job.checkpoint.shared` says that all nodes see the same files, but `{pattern}` is on disks of their own"
        )
    return f"`{pattern}` is on disks of the nodes' own: a restart copies the newest checkpoint to nodes that lack it"


def describe_unshared(path: str, lacking: Collection[str], nodes: Sequence[str]) -> str:
    """Return what a person should know where a folder is not shared that the file calls shared."""
    there = fold_names(node for node in nodes if node not in lacking)
    return (
        f"`job.checkpoint.shared` says that all nodes see the same files, but `{path}` is not on {fold_names(lacking)}"
        + (f" as it is on {there}" if there else "")
    )


class _UnusableError(Exception):
    """A checkpoint from which the nodes of an attempt cannot go on."""


# --- doing


class CheckpointPicker:
    """Chooses the checkpoint of each attempt of a run.

    Thread: the launch thread, or one that looks for the newest checkpoint after an attempt.

    Args:
        run: Where the run lies; what was there when it began is kept with it, for a controller that adopts it.
        spec: What to run.
        sessions: Gives the sessions as they are now, by node name.
        post: Takes controller events, in order.
        cancelled: Set when a person has ended the run.
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

    def choose(
        self, number: int, nodes: Sequence[str], former: Mapping[str, Sequence[int]]
    ) -> tuple[str | None, Checkpoint | None]:
        """Return the path from which an attempt goes on, and the newest checkpoint that there is; say which it takes.

        Files that nodes lack are copied to them.

        Args:
            number: The attempt.
            nodes: Who takes part, in order of node rank.
            former: Who took part in the attempt before and does not any more, and their ranks.

        Raises:
            RefusedError: There are checkpoints, but none from which these nodes could go on.
            NodeError: A node cannot be asked, or was lost.
        """
        pattern, mode = self._checkpoint.pattern, self._checkpoint.resume
        if pattern is None or (number == 0 and mode is not ResumePolicy.ANY and not self._was_requeued(nodes)):
            self._record_existing(nodes)
            return None, None
        look = self._take_snapshot(nodes, former)
        newest = look.checkpoints[0] if look.checkpoints else None
        if mode is ResumePolicy.NEVER:
            return None, newest
        if newest is None:
            self._refuse_lost_checkpoints(look)
            self._post(controller_events.Note(text=describe_choice(number, self._checkpoint, None)))
            return None, None
        path = self._pick_usable(look)
        self._post(controller_events.Note(text=describe_choice(number, self._checkpoint, path)))
        return path, self._take_snapshot(nodes, former).checkpoints[0]

    def _was_requeued(self, nodes: Sequence[str]) -> bool:
        """Return whether this run goes on where an earlier one of its Slurm job was when Slurm started that again.

        What was there before that one was there before this one, and what it has written belongs to both.
        """
        if self._checkpoint.resume is not ResumePolicy.THIS_RUN:
            return False
        memories = [_load_stored_versions(run.path / _FILE) for run in run_facts.list_runs_before_requeue(self._run)]
        earlier = next((memory for memory in memories if memory.before), None)
        if earlier is None:
            return False
        answers, errors = call_all(select_sessions(self._sessions(), nodes), self._ask)
        raise_first(errors)
        # Another node sees the same files on a disk that all share; one of its own has nothing of this job.
        everything = set().union(*earlier.before.values())
        shared = self._checkpoint.shared
        for node in (node for node in nodes if node not in earlier.before):
            if shared or answers[node].get("network", False):
                earlier.before[node] = everything
        self._stored = earlier
        self._stored.save(self._file)
        return True

    def _pick_usable(self, look: _Snapshot) -> str:
        """Return the newest checkpoint from which the nodes can go on, once all of them have it."""
        reasons: list[str] = []
        for checkpoint in look.checkpoints[:_MOST_TRIED]:
            try:
                needed, sizes = self._find_needed(checkpoint.path, look)
            except _UnusableError as error:
                reasons.append(str(error))
                continue
            if reasons:
                self._post(controller_events.Note(text=reasons[0], level="warn"))
            if needed:
                self._copy_files(checkpoint.path, needed, sizes, look)
            return checkpoint.path
        hint = "have the job write to a folder that all nodes share; `clusterctl up` starts from scratch"
        raise RefusedError(f"no checkpoint can be gone on from, and nothing is written over: {reasons[0]}", hint=hint)

    def _find_needed(self, path: str, look: _Snapshot) -> tuple[dict[str, dict[str, str]], dict[str, int]]:
        """Return which files of a checkpoint each node lacks and who has them, and their sizes.

        Raises:
            _UnusableError: The nodes cannot go on from it.
        """
        files = self._list_files(path, look)
        own = find_conflicting_paths(files)
        if own and self._has_different_content(path, files, own):
            lacking_all = [node for node in look.nodes if path not in look.seen[node]]
            if lacking_all:
                raise _UnusableError(f"each node has a `{path}` of its own, and {fold_names(lacking_all)} has none")
            return {}, {}
        needed = find_missing_files(files, look.nodes, look.order)
        if needed:
            lost = find_nodes_with_lost_files(files, look.gone)
            if lost:
                raise _UnusableError(f"what {fold_names(lost)} wrote of `{path}` is lost with it")
            for node in [node for node in needed if not files[node]]:
                self._refuse_own_checkpoints(path, node, look)
        return needed, {file: version[1] for there in files.values() for file, version in there.items()}

    def _refuse_own_checkpoints(self, path: str, node: str, look: _Snapshot) -> None:
        """Refuse to copy a checkpoint to a node that writes its own: it may be the part of other ranks."""
        copied = {copy.version for copy in self._stored.copies if copy.node == node}
        written = {p: version for p, version in look.seen[node].items() if version not in copied}
        if not written:
            return
        last = max(written, key=lambda p: (written[p], p))
        if all(one.path != last for one in look.checkpoints):
            raise _UnusableError(f"`{path}` is not on {node}, which writes checkpoints of other names, as `{last}`")
        files = self._list_files(last, look)
        own = find_conflicting_paths(files)
        if own and self._has_different_content(last, files, own):
            raise _UnusableError(f"`{path}` is not on {node}, and each node writes its own")

    def _has_different_content(self, path: str, files: Mapping[str, Mapping[str, Version]], paths: set[str]) -> bool:
        """Return whether nodes hold different content under these names of files."""
        sizes = {node: {p: v[1] for p, v in there.items() if p in paths} for node, there in files.items()}
        if find_conflicting_paths(sizes):
            return True
        holders = {node: session for node, session in self._sessions().items() if sizes.get(node)}
        answers, errors = call_all(holders, lambda node, session: self._ask_files(node, session, path, hashes=True))
        raise_first(errors)
        folder = posixpath.dirname(path.rstrip("/"))
        hashes = {
            node: {posixpath.join(folder, file["name"]): file["sha256"] for file in answer["files"]}
            for node, answer in answers.items()
        }
        return bool(
            find_conflicting_paths(
                {node: {p: h for p, h in there.items() if p in paths} for node, there in hashes.items()}
            )
        )

    def _list_files(self, path: str, look: _Snapshot) -> dict[str, dict[str, Version]]:
        """Return the files of a checkpoint on each node, by path, as far as they are of this run."""
        answers = self._ask_all(look.order, look.nodes, lambda node, session: self._ask_files(node, session, path))
        folder = posixpath.dirname(path.rstrip("/"))
        files = {
            node: {posixpath.join(folder, file["name"]): (file["mtime"], file["size"]) for file in answer["files"]}
            for node, answer in answers.items()
        }
        old = {version for versions in self._stored.before.values() for version in versions}
        for node, there in files.items():
            # In a whole one that is new, a file may be a copy of an older one, with its time.
            if path not in look.seen[node] and self._checkpoint.resume is not ResumePolicy.ANY:
                files[node] = {p: version for p, version in there.items() if version not in old}
        return resolve_copies(files, self._stored.copies)

    def _copy_files(self, path: str, needed: dict[str, dict[str, str]], sizes: dict[str, int], look: _Snapshot) -> None:
        """Bring to each node what it lacks of a checkpoint, and remember that it was a copy."""
        if self._checkpoint.shared:
            self._post(controller_events.Note(text=describe_unshared(path, needed, look.nodes), level="warn"))
        sources = self._list_files(path, look)
        copy = CheckpointCopy(path, needed, sizes, self._workdirs, select_sessions(self._sessions(), look.order))
        copy.run(self._file.parent, self._post, self._cancelled)
        answers, errors = call_all(
            select_sessions(self._sessions(), needed), lambda node, session: self._ask_files(node, session, path)
        )
        raise_first(errors)
        folder = posixpath.dirname(path.rstrip("/"))
        for node, answer in answers.items():
            there = {posixpath.join(folder, file["name"]): (file["mtime"], file["size"]) for file in answer["files"]}
            for file, source in needed[node].items():
                if file not in there or there[file][1] != sizes[file]:
                    raise RefusedError(f"`{file}` was copied to {node} and is not there any more")
                self._stored.copies.append(CopiedFile(node, file, there[file], source, sources[source][file]))
        self._stored.save(self._file)
        self._post(controller_events.Note(text=copy.sentence))

    def _refuse_lost_checkpoints(self, look: _Snapshot) -> None:
        """Refuse to start from scratch where the only checkpoints may lie on a node that is gone.

        Raises:
            RefusedError: Rank 0 was on a node that cannot be asked, and no other machine may see its files.
        """
        gone = [node for node, ranks in look.gone.items() if 0 in ranks]
        if not gone:
            return
        answers, errors = call_all(
            select_sessions(self._sessions(), look.nodes), lambda node, session: self._ask(node, session, versions=True)
        )
        raise_first(errors)
        if _has_only_local_disks(answers, self._here, least=1):
            lost = fold_names(gone)
            text = f"no checkpoint of this run is on {fold_names(look.nodes)}, and {lost} may have some and is gone"
            hint = f"start again with {lost} and `job.checkpoint.resume: any`, or from scratch with `clusterctl up`"
            raise RefusedError(text, hint=hint)

    def _record_existing(self, nodes: Sequence[str]) -> None:
        """Keep with the run what is there before it has written anything, on its spares too."""
        pattern = self._checkpoint.pattern
        in_slurm = (begun := run_facts.read_origin(self._run)) is not None and begun.slurm_job
        if pattern is None or not (self._restarts or in_slurm):
            return
        answers, errors = call_all(self._sessions(), lambda node, session: self._ask(node, session, versions=True))
        raise_first({node: errors[node] for node in nodes if node in errors})
        self._stored.before = {node: _pairs(answer["versions"]) for node, answer in answers.items()}
        self._stored.save(self._file)
        if self._checkpoint.resume is ResumePolicy.NEVER:
            return
        # Who has read it once at a start of this job knows it; what each restart takes is told anyway.
        earlier = list(self._list_earlier_records())
        older = {entry["path"] for answer in answers.values() for entry in answer["found"]}
        if older and self._checkpoint.resume is ResumePolicy.THIS_RUN and not any(map(_shows_any, earlier)):
            self._post(controller_events.Note(text=describe_older_checkpoints(len(older), pattern)))
        if self._restarts and _has_only_local_disks({node: answers[node] for node in nodes}, self._here):
            shared = self._checkpoint.shared
            if shared or not earlier:
                text = describe_local_disks(pattern, shared=shared)
                self._post(controller_events.Note(text=text, level="warn" if shared else "info"))

    def _list_earlier_records(self) -> Iterator[Path]:
        """Yield what was noted at earlier starts of the job, as far as their runs are still there."""
        for path in self._file.parent.parent.glob(f"*/{_FILE}"):
            if path != self._file and path.parent.name.rpartition("-")[0] == self._name:
                yield path

    def find_newest(self, nodes: Sequence[str]) -> Checkpoint | None:
        """Return the newest checkpoint that counts for the run.

        Raises:
            NodeError: A node cannot be asked.
        """
        if self._checkpoint.pattern is None:
            return None
        return next(iter(self._take_snapshot(nodes, {}).checkpoints), None)

    def _take_snapshot(self, nodes: Sequence[str], former: Mapping[str, Sequence[int]]) -> _Snapshot:
        """Return what counts of the checkpoints that are on each node, those of an attempt and those before."""
        sessions = self._sessions()
        order = list(dict.fromkeys([nodes[0], *(node for node in former if node in sessions), *nodes[1:]]))
        gone = {node: tuple(ranks) for node, ranks in former.items() if node not in sessions}
        until = time.monotonic() + (_SHOWN_LATE if self._checkpoint.shared else 0.0)
        while True:
            seen = self._list_checkpoints(order, nodes)
            checkpoints = list_newest_first(order, seen, self._stored.copies)
            # A shared file system shows new files on other machines only after a while.
            late = checkpoints and any(checkpoints[0].path not in seen[node] for node in nodes)
            if not late or time.monotonic() > until:
                return _Snapshot(tuple(nodes), order, gone, seen, checkpoints)
            self._cancelled.wait(_LOOK_AGAIN)

    def _list_checkpoints(self, order: Sequence[str], nodes: Sequence[str]) -> CheckpointsByNode:
        mine = self._checkpoint.resume is not ResumePolicy.ANY
        strangers = [node for node in order if node not in self._stored.before] if mine else []
        answers = self._ask_all(order, nodes, lambda node, session: self._ask(node, session, versions=bool(strangers)))
        if strangers:
            # What only a node has that was not asked at the start was there before the run came to it.
            known = {v for node in order if node not in strangers for v in _pairs(answers[node]["versions"])}
            for node in strangers:
                self._stored.before[node] = _pairs(answers[node]["versions"]) - known
            self._stored.save(self._file)
        seen = {
            node: {entry["path"]: (entry["mtime"], entry["size"]) for entry in answer["found"]}
            for node, answer in answers.items()
        }
        return exclude_older(seen, self._stored.before) if mine else seen

    def _ask_all(
        self, order: Sequence[str], nodes: Sequence[str], ask: Callable[[str, Session], CheckpointsAnswer]
    ) -> dict[str, CheckpointsAnswer]:
        """Return what these nodes answer; one that takes no part any more may be lost meanwhile, and shows nothing."""
        sessions = self._sessions()
        select_sessions(sessions, nodes)
        answers, errors = call_all({node: sessions[node] for node in order if node in sessions}, ask)
        raise_first({node: errors[node] for node in nodes if node in errors})
        nothing: CheckpointsAnswer = {"found": [], "files": [], "versions": []}
        return {node: answers.get(node, nothing) for node in order}

    def _ask(self, node: str, session: Session, *, versions: bool = False) -> CheckpointsAnswer:
        request: command_types.CheckpointsArguments = {
            "workdir": self._workdirs[node],
            "pattern": self._checkpoint.pattern,
            "versions": versions,
        }
        return CHECKPOINTS.call(session, request)

    def _ask_files(self, node: str, session: Session, path: str, *, hashes: bool = False) -> CheckpointsAnswer:
        request: command_types.CheckpointsArguments = {
            "workdir": self._workdirs[node],
            "pattern": self._checkpoint.pattern,
            "files": path,
            "hashes": hashes,
        }
        return CHECKPOINTS.call(session, request, timeout=_HASH_SECONDS if hashes else None)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What there is at one moment.

    Attributes:
        nodes: Who is to take part, in order of node rank.
        order: Those and the former nodes that can be asked; the first that writes checkpoints tells which is newest.
        gone: Former nodes that cannot be asked, and their ranks.
        seen: What counts of each node's checkpoints.
        checkpoints: The newest first.
    """

    nodes: tuple[str, ...]
    order: list[str]
    gone: dict[str, tuple[int, ...]]
    seen: CheckpointsByNode
    checkpoints: list[Checkpoint]


@dataclass(slots=True)
class _StoredVersions:
    """What is kept with the run.

    Attributes:
        before: What each node showed when the run began, or came to it.
        copies: What was copied to nodes at restarts.
    """

    before: dict[str, set[Version]]
    copies: list[CopiedFile]

    def save(self, path: Path) -> None:
        copies = [[copy.node, copy.path, copy.version, copy.source_node, copy.source_version] for copy in self.copies]
        before = {node: sorted(versions) for node, versions in self.before.items()}
        write_atomically(path, json.dumps({"before": before, "copies": copies}).encode())


def _load_stored_versions(path: Path) -> _StoredVersions:
    """Return what is kept with the run; nothing where that was never written down."""
    try:
        kept = json.loads(path.read_text())
        copies = [CopiedFile(n, file, _pair(v), whence, _pair(source)) for n, file, v, whence, source in kept["copies"]]
        return _StoredVersions({node: _pairs(versions) for node, versions in kept["before"].items()}, copies)
    except (OSError, ValueError, LookupError):
        return _StoredVersions({}, [])


def _pair(version: Sequence[float]) -> Version:
    return float(version[0]), int(version[1])


def _pairs(versions: Iterable[Sequence[float]]) -> set[Version]:
    return {_pair(version) for version in versions}


def _shows_any(noted: Path) -> bool:
    """Return whether some node had a file of a checkpoint when this was noted."""
    try:
        return any(json.loads(noted.read_text())["before"].values())
    except (OSError, ValueError, LookupError, AttributeError):
        return False


def _has_only_local_disks(answers: Mapping[str, CheckpointsAnswer], here: Collection[str], least: int = 2) -> bool:
    """Return whether no machine of at least so many sees what another writes. Local nodes (`here`) are one machine."""
    machines = len(answers) - max(0, sum(node in here for node in answers) - 1)
    return machines >= least and not any(answer.get("network", True) for answer in answers.values())
