"""Sends the same files to many nodes at once. A node gets only the files that it lacks.

If little is missing, the head sends it to each node (a star). Otherwise the nodes pass it on to one another (a cast).
"""

from __future__ import annotations

import posixpath
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from clusterctl.agent.protocol import file_list
from clusterctl.agent.protocol.command_messages import RequestError
from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.agent.protocol.pieces import HASH_BYTES
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import AgentError, ClusterctlError, NotFoundError, RefusedError
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes import uploads
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.nodes.network_probe import guess_addresses
from clusterctl.run.nodes.uploads import Answer, Destination, Upload, UploadResult
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import CONTENTS

T = TypeVar("T")
Errors = dict[str, ClusterctlError]

CAST_FROM_BYTES = 32 << 20
"""From this many missing bytes on, starting the peers costs less time than it saves."""
_BUSY_S = (1.0, 3.0)
"""Seconds between two looks whether another cast to the same folder has ended."""


_MAX_LISTING_BYTES = 256 << 20


def _ignore(*_arguments: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSettings:
    """The settings of a transfer to many nodes.

    Attributes:
        limit: The bytes per second that each machine may send, and receive, in a cast, or `None`.
        piece_hashes: If a node has the files and this machine does not, the SHA-256 of their pieces.
        on_plan: A function that receives the bytes that each node lacks.
        on_warning: A function that receives a sentence for the user.
        on_sent: A function that receives numbers of bytes that this machine has sent.
    """

    limit: int | None = None
    piece_hashes: list[bytes] | None = None
    on_plan: Callable[[Mapping[str, int]], None] = _ignore
    on_warning: Callable[[str], None] = _ignore
    on_sent: Callable[[int], None] = _ignore


def send_files(
    spec: ClusterSpec,
    sessions: Mapping[str, Session],
    places: Mapping[str, Destination],
    files: Upload,
    on_bytes: Callable[[str, int], None],
    settings: CastSettings | None = None,
) -> tuple[dict[str, UploadResult], Errors]:
    """Send files to all nodes, each file atomically. Return the results and the errors by node.

    Args:
        spec: The spec of the cluster.
        sessions: The session of each node.
        places: The destination on each node.
        files: The files.
        on_bytes: A function that receives a node and the number of bytes that the node has just received. Several
            threads call it.
        settings: More settings.
    """
    transfer = _Transfer(
        spec,
        files,
        lambda session, stream: uploads.compare_copy(session, places[session.node], files.listing, stream),
        partial(uploads.summarize_copy, files),
        on_bytes,
        settings or CastSettings(),
    )
    return transfer.run(sessions)


def list_node_files(session: Session, folder: str, pattern: str) -> tuple[Upload, list[bytes]]:
    """Return the files that match a pattern in a folder of a node, and the SHA-256 of the pieces of their contents.

    Raises:
        NotFoundError: No file matches.
        NodeError: The node could not read the files, or was lost.
    """
    data = bytearray()

    def take(part: StreamData) -> None:
        data.extend(part.payload)
        if len(data) > _MAX_LISTING_BYTES:
            raise FrameError(f"a list of files with over {_MAX_LISTING_BYTES >> 20} MiB")

    stream = session.allocate_streams(take)
    answer = CONTENTS.call(session, {"workdir": folder, "pattern": pattern, "stream": stream})
    try:
        entries = file_list.decode_file_list(bytes(data[: answer["listing"]]))
    except RequestError as error:
        raise AgentError(session.node, str(error)) from error
    if not entries:
        raise NotFoundError(f"{session.node}: no file is at `{posixpath.join(folder, pattern)}`")
    hashes = bytes(data[answer["listing"] :])
    files = Upload([(path, size, mode, digest) for path, size, mode, digest in entries], [])
    return files, [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def send_code(
    spec: ClusterSpec,
    sessions: Mapping[str, Session],
    code: Upload,
    *,
    run: str | None,
    on_activity: Callable[[str, str], None] = _ignore,
    on_done: Callable[[str], None] = _ignore,
    on_warning: Callable[[str], None] = _ignore,
) -> tuple[dict[str, tuple[int, int, tuple[str, ...]]], Errors]:
    """Sync code to the workdir of each node. Return the results of `uploads.sync_files` and the errors by node.

    Args:
        spec: The spec of the cluster.
        sessions: The session of each node.
        code: The files of the code.
        run: The run that needs the code.
        on_activity: A function that receives a node and its present activity. Several threads call it.
        on_done: A function that receives a node that has the code.
        on_warning: A function that receives a sentence for the user.
    """

    def sync(node: str, session: Session) -> tuple[int, int, tuple[str, ...]]:
        workdir = get_workdir(spec, node)
        sent = uploads.sync_files(session, workdir, code, run=run, on_activity=partial(on_activity, node))
        on_done(node)
        return sent

    if code.size_bytes < CAST_FROM_BYTES or len(sessions) < 2:
        return call_all(sessions, sync)
    for node in sessions:
        on_activity(node, "receiving the code")
    transfer = _Transfer(
        spec,
        code,
        lambda session, stream: uploads.compare_code(session, get_workdir(spec, session.node), code, run, stream),
        partial(uploads.summarize_sync, code),
        _ignore,
        CastSettings(on_warning=on_warning),
    )
    sent, errors = transfer.run(sessions)
    for node in sent:
        on_done(node)
    return sent, errors


@dataclass(frozen=True, slots=True)
class _Transfer(Generic[T, Answer]):
    """A transfer to many nodes.

    Attributes:
        compare: Asks a node to compare the listing that a stream brings.
        summarize: Makes the result of a node from its answer.
    """

    spec: ClusterSpec
    files: Upload
    compare: Callable[[Session, int], Future[Answer]]
    summarize: Callable[[Answer], T]
    on_bytes: Callable[[str, int], None]
    settings: CastSettings

    def run(self, sessions: Mapping[str, Session]) -> tuple[dict[str, T], Errors]:
        """Send the files; return the results and the errors by node."""
        has_origin = self.settings.piece_hashes is not None
        if not has_origin and (self.files.size_bytes < CAST_FROM_BYTES or len(sessions) < 2):
            return call_all(sessions, self._send)
        is_waiting = False
        while True:
            compared, errors = call_all(
                sessions,
                lambda _node, session: uploads.compare_files(
                    session, self.files.listing, partial(self.compare, session)
                ),
            )
            needs = {node: self._list_needed(found) for node, (_, found) in compared.items()}
            missing = {
                node: sum(self.files.entries[number][1] for number in found["need"])
                for node, (_, found) in compared.items()
            }
            self.settings.on_plan(missing)
            if not has_origin and (sum(map(bool, needs.values())) < 2 or max(missing.values()) < CAST_FROM_BYTES):
                jobs = {node: (sessions[node], *answer) for node, answer in compared.items()}
                sent, failed = call_all(jobs, lambda _node, job: self._send_compared(*job))
                return sent, errors | failed
            listed = {node: stream for node, (stream, _) in compared.items()}
            failed, busy = self._cast({node: sessions[node] for node in compared}, listed, needs)
            if not busy:
                break
            if not is_waiting:
                self.settings.on_warning(f"waiting for another cast to the same folder on {fold_hosts(busy)}")
            is_waiting = True
            time.sleep(random.uniform(*_BUSY_S))
        done = {node: self.summarize(found) for node, (_, found) in compared.items() if node not in failed}
        return done, errors | failed

    def _list_needed(self, found: Answer) -> set[str]:
        entries = (self.files.entries[number] for number in found["need"])
        return {digest for _, size, _, digest in entries if size}

    def _read(self, node: str, numbers: Sequence[int]) -> Iterator[bytes]:
        for chunk in self.files.read(numbers):
            self.on_bytes(node, len(chunk))
            self.settings.on_sent(len(chunk))
            yield chunk

    def _send(self, node: str, session: Session) -> T:
        found = uploads.send_missing_files(
            session, self.files.listing, partial(self.compare, session), partial(self._read, node)
        )
        return self.summarize(found)

    def _send_compared(self, session: Session, listed: int, found: Answer) -> T:
        if found["need"]:
            uploads.send_listed_files(session, listed, self._read(session.node, found["need"]))
        return self.summarize(found)

    def _cast(
        self, sessions: Mapping[str, Session], listed: Mapping[str, int], needs: Mapping[str, set[str]]
    ) -> tuple[Errors, list[str]]:
        """Cast the files. Return the errors by node, or the nodes whose folder another cast uses."""
        from clusterctl.run.nodes.cast import Cast, CastFiles  # They load the code that makes certificates.

        has_files = self.settings.piece_hashes is None
        every = {digest for _, _, _, digest in self.files.entries}
        files = CastFiles(self.files, set().union(*needs.values()) if has_files else every)
        if self.settings.piece_hashes is None:
            files.hash_pieces()
        else:
            files.piece_hashes = self.settings.piece_hashes
        cast = Cast(
            sessions,
            listed,
            needs,
            guess_addresses(self.spec, sessions),
            files,
            self.on_bytes,
            limit=self.settings.limit,
            can_give=has_files,
        )
        try:
            refused, busy, sharing = cast.start()
        except BaseException:
            cast.end()
            raise
        if busy:
            cast.end()
            return {}, busy
        failed = cast.run()
        self.settings.on_sent(cast.sent_bytes)
        alone = [node for node, error in refused.items() if has_files and not isinstance(error, RefusedError)]
        if alone:
            why = f"{fold_hosts(alone)} cannot take part in the cast ({refused[alone[0]]})"
            self.settings.on_warning(f"{why}: this machine sends the files itself")
        _, errors = call_all({node: sessions[node] for node in [*alone, *sharing]}, self._send)
        for warning in cast.list_warnings():
            self.settings.on_warning(warning)
        return {node: error for node, error in refused.items() if node not in alone} | failed | errors, []
