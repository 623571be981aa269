"""Files from nodes to the head: what a pattern matches, and the results that the cluster file names."""

from __future__ import annotations

import contextlib
import os
import posixpath
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from clusterctl.agent.protocol import command_types
from clusterctl.agent.protocol.command_types import RunArguments
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.config.field_types import FetchCondition
from clusterctl.config.spec import ClusterSpec, ResultsSpec
from clusterctl.errors import AgentError, ClusterctlError, NodeError, RefusedError
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes.fan_out import CancelledError, call_all, fold_names
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.session.requests import FETCH
from clusterctl.session.session import Session

_ANY_DEPTH = "**"


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a file is one that a pattern means, by the rules of `glob`: it matches, or a folder above it does.

    As for a shell, `*`, `?` and `**` mean no hidden names; in a folder that matches, all files are meant.

    Args:
        pattern: Relative; `**` stands for folders of any depth.
        name: A relative path without `.` and `..`.
    """
    wanted = posixpath.normpath(pattern).split("/")
    # A pattern that means the folder itself, `**`, means what is in it, which its parts decide.
    reached = _passing(wanted, {0}) - {len(wanted)}
    for part in name.split("/"):
        reached = _passing(wanted, {at + step for at in reached for step in _steps(wanted[at], part)})
        if len(wanted) in reached:
            return True
        if not reached:
            return False
    return False


def _steps(wanted: str, part: str) -> tuple[int, ...]:
    """Return by how many parts a pattern goes on with one part of a name; none where that does not match."""
    if part.startswith(".") and not wanted.startswith("."):
        return ()
    if wanted == _ANY_DEPTH:
        return (0,)
    return (1,) if fnmatchcase(part, wanted) else ()


def _passing(wanted: list[str], reached: set[int]) -> set[int]:
    """Add what is reached where `**` stands for no folder at all."""
    resolved = set(reached)
    for at, part in enumerate(wanted):
        if at in resolved and part == _ANY_DEPTH:
            resolved.add(at + 1)
    return resolved


# Only a bound: a node that goes silent ends the session long before.
_FETCH_SECONDS = 24 * 3600.0


_LOOK_SECONDS = 0.5


MAX_BYTES = 10 << 30
"""Of the files of one node, where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How files are fetched.

    Attributes:
        max_bytes: Bytes that all of them may have.
        limit_name: What allows more.
        follow_links: Links are followed to wherever they lead.
        newer_than: A run; files that are older than it are left out.
        new_name: The new name of what the pattern names, where it has no wildcards.
        on_bytes: Takes the number of bytes of each piece that has come, on the thread that reads the session.
        cancelled: Set when a person has ended the run that this is for.
    """

    max_bytes: int = MAX_BYTES
    limit_name: str = "--max-size"
    follow_links: bool = False
    newer_than: RunArguments | None = None
    new_name: str | None = None
    on_bytes: Callable[[int], None] = lambda _count: None
    cancelled: threading.Event = field(default_factory=threading.Event)


def pull(
    session: Session, workdir: str, pattern: str, target: Path, how: FetchOptions = FetchOptions()
) -> tuple[list[str], int]:
    """Fetch the files of a node that match; return their names, relative to `target`, and their bytes in all.

    Files that are there already are replaced, each at once and whole.

    Args:
        session: With the node.
        workdir: On the node; the pattern begins there.
        pattern: Such as `ckpt/**`.
        target: Folder on the head; made if there is anything to put into it.
        how: More of it.

    Raises:
        RefusedError: The head cannot write them, or there are more.
        NodeError: The node could not send them, or sent one that was not asked for; nothing was written then.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent) as spool:
            files = fetch_to_spool(session, workdir, pattern, spool, how)
            for name, _, _ in files:
                _refuse_unrequested(session.node, pattern, name)
            spool.seek(0)
            if how.new_name is not None:
                files = [("/".join([how.new_name, *PurePosixPath(n).parts[1:]]), size, mode) for n, size, mode in files]
            for name, size, mode in files:
                _write_file(_resolve_inside(target, name), spool, size, mode)
    except OSError as error:
        raise RefusedError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
    return [name for name, _, _ in files], sum(size for _, size, _ in files)


def fetch_to_spool(
    session: Session, workdir: str, pattern: str, spool: BinaryIO, how: FetchOptions
) -> list[tuple[str, int, int]]:
    """Fetch the files of a node that match into one file, one behind the other; return name, size and mode of each.

    Raises:
        OSError: The head cannot write them.
        RefusedError: There are more.
        CancelledError: A person ended the run.
        NodeError: The node could not send them.
    """
    failed: list[OSError | ClusterctlError] = []

    def take(data: StreamData) -> None:
        # Runs on the session's reading thread, which an error of ours must not end.
        if failed:
            return
        if data.offset != spool.tell():
            raise FrameError(f"byte {data.offset} of the files comes where {spool.tell()} is due")
        if data.offset + len(data.payload) > how.max_bytes:
            text = f"{session.node}: what matches `{pattern}` has over {how.max_bytes} bytes"
            failed.append(RefusedError(text, hint=f"`{how.limit_name}` allows more"))
            session.close()
            return
        try:
            spool.write(data.payload)
            how.on_bytes(len(data.payload))
        except (OSError, ValueError) as error:  # ValueError: nobody waits for it any more, the spool is closed
            failed.append(error if isinstance(error, OSError) else OSError(str(error)))

    stream = session.new_stream(take)
    request: command_types.FetchArguments = {
        "workdir": workdir,
        "pattern": pattern,
        "stream": stream,
        "links": how.follow_links,
    }
    if how.newer_than is not None:
        request["of"] = how.newer_than
    try:
        answer = _wait_for_fetch(session, request, how.cancelled)
    except CancelledError as error:
        failed.append(error)  # what still comes is thrown away
        raise
    except NodeError:
        if failed:
            raise failed[0] from None
        raise
    if failed:
        raise failed[0]
    files = [(str(name), int(size), int(mode)) for name, size, mode in answer["files"]]
    told = sum(size for _, size, _ in files)
    if told != spool.tell():
        raise AgentError(session.node, f"it sent {spool.tell()} bytes and tells of {told}")
    return files


def _wait_for_fetch(
    session: Session, request: command_types.FetchArguments, cancelled: threading.Event
) -> command_types.FetchAnswer:
    """Wait for the end of a FETCH, or of the run."""
    answer = FETCH.call_async(session, request)
    until = time.monotonic() + _FETCH_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(FutureTimeoutError):
            return answer.result(_LOOK_SECONDS)
        if cancelled.is_set():
            raise CancelledError("cancelled while files were fetched")
    raise AgentError(session.node, f"no answer to `{Command.FETCH.value}` within {_FETCH_SECONDS:g}s")


def _refuse_unrequested(node: str, pattern: str, name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\0" in name:
        raise AgentError(node, f"it names a file outside its folder: {name!r}")
    if not matches_pattern(pattern, "/".join(parts)):
        raise AgentError(node, f"it sends a file that `{pattern}` does not ask for: {name!r}")


def _resolve_inside(target: Path, name: str) -> Path:
    path = target.joinpath(*PurePosixPath(name).parts)
    if not path.parent.resolve().is_relative_to(target.resolve()):
        raise RefusedError(f"{path.parent} leads out of {target}", hint="remove the symbolic link")
    return path


def _write_file(path: Path, spool: BinaryIO, size: int, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".pull-", delete=False) as file:
        try:
            left = size
            while left and (chunk := spool.read(min(left, 1024 * 1024))):
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            # The node does not decide who may change files of the head.
            os.fchmod(file.fileno(), 0o600 | (mode & 0o755))
            os.replace(file.name, path)
        except OSError as error:
            os.unlink(file.name)
            raise OSError(error.errno, error.strerror, str(path)) from error
        except BaseException:
            os.unlink(file.name)
            raise


_PATIENCE = 120.0
"""Seconds in which no node sends anything, after which it is given up: a run must end, its GPUs are held until then."""


def choose_results(spec: ClusterSpec, state: RunState, phase: RunPhase) -> ResultsSpec | None:
    """Return what is to be fetched at this end of a run; nothing where no worker ever began."""
    results = spec.results
    if results is None or not state.placements:
        return None
    return results if phase is RunPhase.SUCCEEDED or results.when is FetchCondition.ALWAYS else None


class ResultsFetch:
    """Fetches results of nodes in a thread; another one may ask how it goes, and stop waiting.

    Thread: `fetch` works in a thread, with one more for each node; the loop calls `is_stuck` and `result`.

    Args:
        spec: Of the run.
        results: What to fetch.
        run: The run, after which the folder on the head is called.
    """

    def __init__(self, spec: ClusterSpec, results: ResultsSpec, run: str) -> None:
        self._spec, self._results, self._run = spec, results, run
        self._folder = Path(results.to) / run
        self._awaited: set[str] = set()
        self._came: dict[str, dict[str, tuple[int, int]]] = {}
        self._failed: dict[str, str] = {}
        self._moved = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """No node has sent anything for long."""
        return time.monotonic() - self._moved > _PATIENCE

    def fetch(self, sessions: Mapping[str, Session], nodes: list[str]) -> controller_events.Results:
        """Fetch from all of these nodes at once; return what came.

        Args:
            sessions: With those that are connected.
            nodes: All that took part.
        """
        self._awaited = set(nodes)
        self._failed = dict.fromkeys([node for node in nodes if node not in sessions], "not connected")
        call_all({node: sessions[node] for node in nodes if node in sessions}, self._fetch)
        self._keep_from_nodes()
        return self.result("not fetched")

    def result(self, why: str) -> controller_events.Results:
        """Return what has come so far; `why` is said of nodes that are not through."""
        came = [one for of_node in list(self._came.values()) for one in of_node.values()]
        files = sum(number for number, _ in came)
        open_ones = self._awaited - self._came.keys() - self._failed.keys()
        failed = {**self._failed, **dict.fromkeys(sorted(open_ones), why)}
        alike: dict[str, list[str]] = {}
        for node, text in failed.items():
            alike.setdefault(text, []).append(node)
        lacking = [f"{fold_names(nodes)}: {text}" for text, nodes in alike.items()]
        if not failed:
            nothing = [p for p in self._results.patterns if not any(found[p][0] for found in self._came.values())]
            lacking += [f"no node has a file of this run that matches `{pattern}`" for pattern in nothing]
        return controller_events.Results(
            to=str(self._folder), files=files, bytes=sum(size for _, size in came), missing=lacking
        )

    def _fetch(self, node: str, session: Session) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        # What an earlier run left in the workdir is none of this one's.
        of: RunArguments = {"run": self._run, "node": node}
        try:
            for pattern in self._results.patterns:
                left = self._results.max_size - sum(size for _, size in sizes.values())
                how = FetchOptions(max_bytes=left, limit_name="results.max_size", newer_than=of, on_bytes=self._told)
                files, size = pull(session, get_workdir(self._spec, node), pattern, self._folder / node, how)
                sizes[pattern] = (len(files), size)
        except ClusterctlError as error:
            self._failed[node] = str(error).removeprefix(f"{node}: ")
        else:
            self._came[node] = sizes

    def _told(self, _count: int) -> None:
        self._moved = time.monotonic()

    def _keep_from_nodes(self) -> None:
        """Have no later start send this folder to the nodes; remove it where nothing came."""
        try:
            if any(self._folder.iterdir()):
                (self._folder / ".gitignore").write_text("*\n")
            else:
                self._folder.rmdir()
                self._folder.parent.rmdir()
        except OSError:
            return
