"""Fetches files from nodes: files that match a pattern, and the results of a run."""

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

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.command_payload_types import RunArguments
from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.config.field_types import ResultsFetchCondition
from clusterctl.config.host_ranges import fold_hosts, group_names_by_value
from clusterctl.config.spec import ClusterSpec, ResultsSpec
from clusterctl.errors import AgentError, ClusterctlError, NodeError, RefusedError
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes.fan_out import CancelledError, call_all
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import FETCH

_ANY_DEPTH = "**"


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a file or a folder above it, by the rules of `glob`.

    As in a shell, `*`, `?` and `**` match no hidden names.

    Args:
        pattern: A relative pattern; `**` matches folders of any depth.
        name: A relative path without `.` and `..`.
    """
    wanted = posixpath.normpath(pattern).split("/")
    # A pattern such as `**` also matches the top folder, so only the parts of the name decide.
    reached = _passing(wanted, {0}) - {len(wanted)}
    for part in name.split("/"):
        reached = _passing(wanted, {at + step for at in reached for step in _steps(wanted[at], part)})
        if len(wanted) in reached:
            return True
        if not reached:
            return False
    return False


def _steps(wanted: str, part: str) -> tuple[int, ...]:
    """Return by how many parts of the pattern a match of this part of a path may move forward.

    The result is empty if the part does not match. `**` matches without moving: it may match the next part too.
    """
    if part.startswith(".") and not wanted.startswith("."):
        return ()
    if wanted == _ANY_DEPTH:
        return (0,)
    return (1,) if fnmatchcase(part, wanted) else ()


def _passing(wanted: list[str], reached: set[int]) -> set[int]:
    """Return the reached positions in a pattern. After a reached `**`, the next position is reached too."""
    resolved = set(reached)
    for at, part in enumerate(wanted):
        if at in resolved and part == _ANY_DEPTH:
            resolved.add(at + 1)
    return resolved


# A node that does not answer does not reach this limit: its session ends after minutes.
_FETCH_TIMEOUT_S = 24 * 3600.0

_POLL_S = 0.5


MAX_BYTES = 10 << 30
"""Default limit for the files of one node, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Options of a fetch.

    Attributes:
        max_bytes: Limit for all files together.
        limit_name: The option that raises the limit.
        follow_links: Follow links, also out of the folder.
        newer_than: A run. Files that are older than this run are left out.
        new_name: The name that replaces the first part of each path.
        on_bytes: The function to call with the number of bytes of each received piece, in the thread that reads the
            session.
        cancelled: Set when the user has cancelled the run.
    """

    max_bytes: int = MAX_BYTES
    limit_name: str = "--max-size"
    follow_links: bool = False
    newer_than: RunArguments | None = None
    new_name: str | None = None
    on_bytes: Callable[[int], None] = lambda _count: None
    cancelled: threading.Event = field(default_factory=threading.Event)


def pull_files(
    session: Session, workdir: str, pattern: str, target: Path, options: FetchOptions = FetchOptions()
) -> tuple[list[str], int]:
    """Fetch the files of a node that match a pattern; return their names relative to `target`, and their total bytes.

    Existing files are replaced atomically.

    Args:
        session: The session with the node.
        workdir: Folder on the node to which the pattern is relative.
        pattern: A pattern such as `ckpt/**`.
        target: Folder on the head. The folder is created if there are files.
        options: The options.

    Raises:
        RefusedError: The head cannot write the files, or they exceed the limit.
        NodeError: The node could not send the files, or sent a file that does not match. Nothing was written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent) as spool:
            files = fetch_to_spool(session, workdir, pattern, spool, options)
            for name, _, _ in files:
                _refuse_unrequested(session.node, pattern, name)
            spool.seek(0)
            if options.new_name is not None:
                files = [
                    ("/".join([options.new_name, *PurePosixPath(n).parts[1:]]), size, mode) for n, size, mode in files
                ]
            for name, size, mode in files:
                _write_file(_resolve_inside(target, name), spool, size, mode)
    except OSError as error:
        raise RefusedError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
    return [name for name, _, _ in files], sum(size for _, size, _ in files)


def fetch_to_spool(
    session: Session, workdir: str, pattern: str, spool: BinaryIO, options: FetchOptions
) -> list[tuple[str, int, int]]:
    """Fetch the matching files of a node into one file, one after the other; return name, size and mode of each.

    Raises:
        OSError: The head cannot write the files.
        RefusedError: The files exceed the limit.
        CancelledError: The user cancelled the run.
        NodeError: The node could not send the files.
    """
    failed: list[OSError | ClusterctlError] = []

    def take(data: StreamData) -> None:
        # Runs on the reading thread of the session, which an error here must not end.
        if failed:
            return
        if data.offset != spool.tell():
            raise FrameError(f"byte {data.offset} of the files arrives instead of byte {spool.tell()}")
        if data.offset + len(data.payload) > options.max_bytes:
            text = f"{session.node}: what matches `{pattern}` has over {options.max_bytes} bytes"
            failed.append(RefusedError(text, hint=f"`{options.limit_name}` allows more"))
            session.close()
            return
        try:
            spool.write(data.payload)
            options.on_bytes(len(data.payload))
        except (OSError, ValueError) as error:  # ValueError: the caller has given up and closed the spool
            failed.append(error if isinstance(error, OSError) else OSError(str(error)))

    stream = session.allocate_streams(take)
    links = options.follow_links
    request: command_payload_types.FetchArguments = {
        "workdir": workdir,
        "pattern": pattern,
        "stream": stream,
        "links": links,
    }
    if options.newer_than is not None:
        request["of"] = options.newer_than
    try:
        answer = _wait_for_fetch(session, request, options.cancelled)
    except CancelledError as error:
        failed.append(error)  # `take` drops the rest
        raise
    except NodeError:
        if failed:
            raise failed[0] from None
        raise
    if failed:
        raise failed[0]
    files = [(str(name), int(size), int(mode)) for name, size, mode in answer["files"]]
    announced = sum(size for _, size, _ in files)
    if announced != spool.tell():
        raise AgentError(session.node, f"it sent {spool.tell()} bytes for files of {announced} bytes")
    return files


def _wait_for_fetch(
    session: Session, request: command_payload_types.FetchArguments, cancelled: threading.Event
) -> command_payload_types.FetchAnswer:
    """Wait for the answer of a fetch, or until the run is cancelled."""
    answer = FETCH.call_async(session, request)
    until = time.monotonic() + _FETCH_TIMEOUT_S
    while time.monotonic() < until:
        with contextlib.suppress(FutureTimeoutError):
            return answer.result(_POLL_S)
        if cancelled.is_set():
            raise CancelledError("cancelled while files were fetched")
    raise AgentError(session.node, f"no answer to `{Command.FETCH.value}` within {_FETCH_TIMEOUT_S:g}s")


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
            missing = size
            while missing and (chunk := spool.read(min(missing, 1024 * 1024))):
                file.write(chunk)
                missing -= len(chunk)
            file.flush()
            # The node must not decide who may change files of the head.
            os.fchmod(file.fileno(), 0o600 | (mode & 0o755))
            os.replace(file.name, path)
        except OSError as error:
            os.unlink(file.name)
            raise OSError(error.errno, error.strerror, str(path)) from error
        except BaseException:
            os.unlink(file.name)
            raise


_STUCK_AFTER_S = 120.0
"""Seconds without data from any node after which the fetch of results ends, because the run still holds its GPUs."""


def choose_results_to_fetch(spec: ClusterSpec, state: RunState, phase: RunPhase) -> ResultsSpec | None:
    """Return the results to fetch at the end of a run, or `None`; there are none if no worker ever started."""
    results = spec.results
    if results is None or not state.placements:
        return None
    return results if phase is RunPhase.SUCCEEDED or results.when is ResultsFetchCondition.ALWAYS else None


class ResultsFetch:
    """Fetches the results of a run from its nodes.

    Thread: `fetch` runs in a thread, and starts a thread for each node. The loop calls `is_stuck` and
    `build_results_event`.

    Args:
        spec: The spec of the run.
        results: The results to fetch.
        run: The id of the run, which is the name of the folder on the head.
    """

    def __init__(self, spec: ClusterSpec, results: ResultsSpec, run: str) -> None:
        self._spec, self._results, self._run = spec, results, run
        self._folder = Path(results.to) / run
        self._awaited: set[str] = set()
        self._came: dict[str, dict[str, tuple[int, int]]] = {}
        self._failed: dict[str, str] = {}
        self._last_bytes_at = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether no node has sent data for `_STUCK_AFTER_S`."""
        return time.monotonic() - self._last_bytes_at > _STUCK_AFTER_S

    def fetch(self, sessions: Mapping[str, Session], nodes: list[str]) -> controller_events.ResultsFetched:
        """Fetch from all nodes at once; return the event with the results.

        Args:
            sessions: The sessions of the connected nodes.
            nodes: All nodes of the run.
        """
        self._awaited = set(nodes)
        self._failed = dict.fromkeys([node for node in nodes if node not in sessions], "not connected")
        call_all({node: sessions[node] for node in nodes if node in sessions}, self._fetch)
        self._keep_from_nodes()
        return self.build_results_event("not fetched")

    def build_results_event(self, why: str) -> controller_events.ResultsFetched:
        """Return the event with the results so far; `why` is the reason for nodes that have not finished."""
        came = [one for of_node in list(self._came.values()) for one in of_node.values()]
        files = sum(number for number, _ in came)
        open_ones = self._awaited - self._came.keys() - self._failed.keys()
        failed = {**self._failed, **dict.fromkeys(sorted(open_ones), why)}
        missing = [f"{fold_hosts(nodes)}: {text}" for text, nodes in group_names_by_value(failed).items()]
        if not failed:
            nothing = [p for p in self._results.patterns if not any(found[p][0] for found in self._came.values())]
            missing += [f"no node has a file of this run that matches `{pattern}`" for pattern in nothing]
        return controller_events.ResultsFetched(
            to=str(self._folder), files=files, bytes=sum(size for _, size in came), missing=missing
        )

    def _fetch(self, node: str, session: Session) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        # Files of an earlier run in the workdir are no results of this run.
        own_run: RunArguments = {"run": self._run, "node": node}
        try:
            for pattern in self._results.patterns:
                options = FetchOptions(
                    max_bytes=self._results.max_size - sum(size for _, size in sizes.values()),
                    limit_name="results.max_size",
                    newer_than=own_run,
                    on_bytes=self._on_bytes,
                )
                files, size = pull_files(session, get_workdir(self._spec, node), pattern, self._folder / node, options)
                sizes[pattern] = (len(files), size)
        except ClusterctlError as error:
            self._failed[node] = str(error).removeprefix(f"{node}: ")
        else:
            self._came[node] = sizes

    def _on_bytes(self, _count: int) -> None:
        self._last_bytes_at = time.monotonic()

    def _keep_from_nodes(self) -> None:
        """Exclude the folder with the results from later syncs. Remove an empty folder."""
        try:
            if any(self._folder.iterdir()):
                (self._folder / ".gitignore").write_text("*\n")
            else:
                self._folder.rmdir()
                self._folder.parent.rmdir()
        except OSError:
            return
