"""Files that travel between the head and a workdir."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.facts import checkpoints
from clusterctl.agent.protocol import commands, file_list, frames, request_errors
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.record import folders, rundir, workspace
from clusterctl.agent.serve import code_look, copies
from clusterctl.agent.serve.summary import summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Callable

    from clusterctl.agent.linux.aside import Out, Outcome
    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.serve.session import Handler, Session


_MOST_BYTES = 1 << 62
"""No file is larger, and no number of a request."""
_MOST_GONE = 100
"""Of so many files that a sync would remove the names are told."""


def handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of these commands."""
    sync = _Sync(session)
    return {
        Command.MANIFEST: sync.manifest,
        Command.COPY: sync.copy,
        Command.RECEIVE: sync.receive,
        Command.FETCH: sync.fetch,
        Command.CHECKPOINTS: sync.checkpoints,
        Command.CODE: sync.code,
    }


def _folder(
    asked: command_types.FetchArguments
    | command_types.ManifestArguments
    | command_types.CheckpointsArguments
    | command_types.CodeArguments,
) -> str:
    return os.path.abspath(os.path.expanduser(str(asked["workdir"])))


def _user_of(folder: str, root: str, run: str | None) -> str | None:
    """Return another run that uses a workdir now, or `None`."""
    folder = os.path.realpath(folder)
    for other in rundir.runs(root):
        if other.run == run:
            continue
        other_run = summary(other)
        if other_run["live"] and other_run["workdir"] and os.path.realpath(other_run["workdir"]) == folder:
            return other.run
    return None


def _nothing(*_: object) -> None:
    pass


def _needed(entries: Sequence[Sequence[object]], need: Iterable[str]) -> command_types.ManifestAnswer:
    """Return the numbers of files in a listing."""
    lacking = set(need)
    return {"need": [number for number, (path, *_) in enumerate(entries) if path in lacking]}


def _differences(place: workspace.Workspace, run: str | None, data: bytes) -> command_types.ManifestAnswer:
    """Return what a sync would do, and under which live run."""
    entries = file_list.decode_file_list(data)
    found = place.differences({path: entry for path, *entry in entries})
    return {
        **_needed(entries, found.need),
        "going": len(found.gone),
        "gone": found.gone[:_MOST_GONE],
        "user": _user_of(place.folder, place.root, run) if found.changed else None,
    }


@dataclass(frozen=True)
class _Wanted:
    """Files that were compared and are to come: who takes them in, and what is done once they are there."""

    begin: Callable[[], folders.Receiver]
    settle: Callable[[], None] = _nothing


class _Sync:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted: dict[int, _Wanted] = {}
        """By the stream of a listing: what is to come of it."""
        self._receivers: dict[int, folders.Receiver] = {}
        session.at_end(self._abandon)

    def _abandon(self) -> None:
        for receiver in self._receivers.values():
            receiver.abandon()

    def manifest(self, identity: int, asked: command_types.ManifestArguments, _epoch: int | None) -> None:
        place = workspace.Workspace(_folder(asked), self._session.root)
        run, stream = asked.get("run"), int(asked["stream"])

        def compare(data: bytes) -> None:
            if asked.get("look"):
                self._session.work(identity, lambda _out: _differences(place, run, data))
            else:
                self._compare(identity, place, run, stream, data)

        self._gather(identity, stream, int(asked["size"]), compare)

    def _compare(self, identity: int, place: workspace.Workspace, run: str | None, stream: int, data: bytes) -> None:
        """Answer a MANIFEST, whose listing came in `stream`."""
        hold = self._session.holds.take(place, run)

        def look(_out: Out) -> command_types.ManifestAnswer:
            starting = hold.wait()
            entries = file_list.decode_file_list(data)
            user = _user_of(place.folder, place.root, run) or starting
            return _needed(entries, place.compare({path: entry for path, *entry in entries}, user, run))

        def compared(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                self._session.holds.drop(place)
                self._session.answer_error(identity, outcome)
                return
            if outcome["need"]:
                entries = file_list.decode_file_list(data)
                files = [entries[number] for number in outcome["need"]]
                self._wanted[stream] = _Wanted(lambda: place.receive(files), lambda: self._session.holds.settle(place))
            else:
                self._session.holds.settle(place)
            self._session.answer(identity, outcome)

        self._session.jobs.work(look, compared, keep=[hold.fd])

    def _gather(self, identity: int, stream: int, size: int, whole: Callable[[bytes], None]) -> None:
        """Call `whole` with `size` bytes of a stream once they are there; what it raises answers the request."""
        data = bytearray()

        def take(part: frames.StreamData) -> None:
            data.extend(part.payload)
            if len(data) >= size:
                del self._session.data_handlers[stream]
                try:
                    whole(bytes(data))
                except Exception as error:
                    self._session.answer_error(identity, error)

        self._session.data_handlers[stream] = take

    def copy(self, identity: int, asked: command_types.CopyArguments, _epoch: int | None) -> None:
        stream = int(asked["stream"])

        def look(data: bytes) -> None:
            self._look(identity, asked, stream, data)

        self._gather(identity, stream, int(asked["size"]), look)

    def _look(self, identity: int, asked: command_types.CopyArguments, stream: int, data: bytes) -> None:
        """Answer a COPY, whose listing came in `stream`."""
        root = self._session.root

        def lacking(_out: Out) -> command_types.CopyAnswer:
            return copies.lacking(asked, file_list.decode_file_list(data), root)

        def looked(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                self._session.answer_error(identity, outcome)
                return
            if outcome["need"]:
                entries = copies.named(file_list.decode_file_list(data), outcome["name"])
                files, tree = [entries[number] for number in outcome["need"]], folders.Tree(outcome["folder"])
                watch = copies.Watch(tree.folder, [path for path, *_ in files], root)
                self._wanted[stream] = _Wanted(lambda: folders.Receiver(tree, files, check=watch.check))
            self._session.answer(identity, outcome)

        self._session.jobs.work(lacking, looked)

    def receive(
        self, identity: int, asked: command_types.ReceiveArguments, _epoch: int | None
    ) -> command_types.ReceiveAnswer | None:
        stream = int(asked["stream"])
        if asked["manifest"] not in self._wanted:
            raise request_errors.RequestError(commands.ErrorKind.BAD_REQUEST, "these files were not compared")
        wanted = self._wanted.pop(asked["manifest"])
        receiver = wanted.begin()
        if receiver.done:
            wanted.settle()
            return {"written": receiver.written, "hash": receiver.hash}

        def take(data: frames.StreamData) -> None:
            try:
                receiver.feed(data.payload)
            except Exception as error:
                self._receivers.pop(stream).abandon()
                # What is still on its way is swallowed.
                self._session.data_handlers[stream] = lambda _data: None
                self._session.answer_error(identity, error)
                return
            if receiver.done:
                wanted.settle()
                del self._session.data_handlers[stream], self._receivers[stream]
                self._session.answer(identity, {"written": receiver.written, "hash": receiver.hash})

        self._session.data_handlers[stream], self._receivers[stream] = take, receiver
        return None

    def fetch(self, identity: int, asked: command_types.FetchArguments, _epoch: int | None) -> None:
        folder, pattern, stream = _folder(asked), str(asked["pattern"]), int(asked["stream"])

        of = asked.get("of")
        began = None if of is None else self._session.states.of(self._session.known_run(of)).began

        def send(out: Out) -> command_types.FetchAnswer:
            files: list[tuple[str, int, int]] = []
            offset = 0
            matching = folders.files_matching(folder, pattern, links=bool(asked.get("links")))
            if began is not None:
                matching = folders.changed_since(matching, began, folder)
            _must_fit([name for name, _ in matching], pattern)
            for name, path in matching:
                sent = _send_file(out, stream, offset, path)
                if sent is not None:
                    offset += sent[0]
                    files.append((name, *sent))
            return {"files": files}

        self._session.work(identity, send)

    def checkpoints(self, identity: int, asked: command_types.CheckpointsArguments, _epoch: int | None) -> None:
        folder, pattern = _folder(asked), str(asked["pattern"])

        def look(_out: Out) -> command_types.CheckpointsAnswer:
            if "files" in asked:
                files = checkpoints.list_checkpoint_files(
                    folder, str(asked["files"]), with_hashes=bool(asked.get("hashes"))
                )
                return {"found": [], "files": files}
            answer: command_types.CheckpointsAnswer = {"found": checkpoints.list_complete_checkpoints(folder, pattern)}
            if asked.get("versions"):
                answer["versions"] = checkpoints.list_file_versions(folder, pattern)
                answer["network"] = rundir.is_network(checkpoints.checkpoint_folder(folder, pattern))
            return answer

        self._session.work(identity, look)

    def code(self, identity: int, asked: command_types.CodeArguments, _epoch: int | None) -> None:
        folder = _folder(asked)
        if asked.get("unsynced"):
            self._session.work(identity, lambda _out: {"files": code_look.hashes(folder)})
            return
        place = workspace.Workspace(folder, self._session.root)
        self._session.work(identity, lambda _out: {"hash": place.code_hash()})


def _must_fit(names: list[str], pattern: str) -> None:
    """Refuse before anything is sent what the answer to it could not name.

    Raises:
        RequestError: There are too many files.
    """
    try:
        frames.encode_message({"files": [[name, _MOST_BYTES, 0o7777] for name in names], "id": _MOST_BYTES})
    except frames.FrameTooLargeError as error:
        text = f"`{pattern}` matches {len(names)} files, more than an answer can name"
        raise request_errors.make_refused_error(
            text, "fetch them in parts, or put them into one archive there"
        ) from error


def _send_file(out: Out, stream: int, offset: int, path: str) -> tuple[int, int] | None:
    """Send a file as far as it goes now; return how many bytes that were, and its mode; `None` where it is gone."""
    sent = 0
    try:
        with open(path, "rb") as file:
            while True:
                data = file.read(frames.CHUNK_BYTES)
                if not data:
                    return sent, stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                out.data(stream, offset + sent, data)
                sent += len(data)
    except OSError as error:
        if not sent and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None
        raise
