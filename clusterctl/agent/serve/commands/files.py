"""Files that travel between the head and a workdir."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

from clusterctl.agent.facts import checkpoint_files
from clusterctl.agent.protocol import commands, frames, listing, refusals
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.record import folders, rundir, workspace
from clusterctl.agent.serve import code_look
from clusterctl.agent.serve.summary import summary

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.linux.aside import Out
    from clusterctl.agent.serve.session import Handler, Session


_MOST_BYTES = 1 << 62
"""No file is larger, and no number of a request."""


def handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of these commands."""
    sync = _Sync(session)
    return {
        Command.MANIFEST: sync.manifest,
        Command.RECEIVE: sync.receive,
        Command.FETCH: sync.fetch,
        Command.CHECKPOINTS: sync.checkpoints,
        Command.CODE: sync.code,
    }


def _folder(arguments: dict[str, Any]) -> str:
    return os.path.abspath(os.path.expanduser(str(arguments["workdir"])))


def _user_of(folder: str, root: str, run: str | None) -> str | None:
    """Return another run that uses a workdir now, or `None`."""
    folder = os.path.realpath(folder)
    for other in rundir.runs(root):
        if other.run == run:
            continue
        said = summary(other)
        if said["live"] and said["workdir"] and os.path.realpath(said["workdir"]) == folder:
            return other.run
    return None


class _Sync:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted: dict[int, tuple[workspace.Workspace, bytes, list[int]]] = {}
        """By the stream of a manifest: its workdir, its listing, and the numbers of the files that are needed."""

    def manifest(self, identity: int, arguments: dict[str, Any], _epoch: int | None) -> None:
        place = workspace.Workspace(_folder(arguments), self._session.root)
        run, stream = arguments.get("run"), int(arguments["stream"])

        def compare(data: bytes) -> None:
            self._compare(identity, place, run, stream, data)

        self._gather(identity, stream, int(arguments["size"]), compare)

    def _compare(self, identity: int, place: workspace.Workspace, run: str | None, stream: int, data: bytes) -> None:
        """Answer a MANIFEST, whose listing came in `stream`."""
        hold = self._session.holds.take(place, run)

        def look(_out: Out) -> dict[str, Any]:
            starting = hold.wait()
            entries = listing.decode(data)
            user = _user_of(place.folder, place.root, run) or starting
            need = set(place.compare({path: entry for path, *entry in entries}, user))
            return {"need": [number for number, (path, *_) in enumerate(entries) if path in need]}

        def compared(outcome: dict[str, Any] | Exception) -> None:
            if isinstance(outcome, Exception):
                self._session.holds.drop(place)
                self._session.answer_error(identity, outcome)
                return
            if outcome["need"]:
                self._wanted[stream] = (place, data, outcome["need"])
            else:
                self._session.holds.settle(place)
            self._session.answer(identity, outcome)

        self._session.jobs.work(look, compared, keep=[hold.fd])

    def _gather(self, identity: int, stream: int, size: int, whole: Callable[[bytes], None]) -> None:
        """Call `whole` with `size` bytes of a stream once they are there; what it raises answers the request."""
        data = bytearray()

        def take(part: frames.Data) -> None:
            data.extend(part.payload)
            if len(data) >= size:
                del self._session.data_handlers[stream]
                try:
                    whole(bytes(data))
                except Exception as error:
                    self._session.answer_error(identity, error)

        self._session.data_handlers[stream] = take

    def receive(self, identity: int, arguments: dict[str, Any], _epoch: int | None) -> dict[str, Any] | None:
        stream = int(arguments["stream"])
        if arguments["manifest"] not in self._wanted:
            raise refusals.RequestError(commands.ErrorKind.BAD_REQUEST, "these files were not compared")
        place, data, need = self._wanted.pop(arguments["manifest"])
        entries = listing.decode(data)
        receiver = place.receive([entries[number] for number in need])
        if receiver.done:
            self._session.holds.settle(place)
            return {"written": receiver.written, "hash": receiver.hash}

        def take(data: frames.Data) -> None:
            try:
                receiver.feed(data.payload)
            except Exception as error:
                receiver.abandon()
                # What is still on its way is swallowed.
                self._session.data_handlers[stream] = lambda _data: None
                self._session.answer_error(identity, error)
                return
            if receiver.done:
                self._session.holds.settle(place)
                del self._session.data_handlers[stream]
                self._session.answer(identity, {"written": receiver.written, "hash": receiver.hash})

        self._session.data_handlers[stream] = take
        self._session.at_end(receiver.abandon)
        return None

    def fetch(self, identity: int, arguments: dict[str, Any], _epoch: int | None) -> None:
        folder, pattern, stream = _folder(arguments), str(arguments["pattern"]), int(arguments["stream"])

        def send(out: Out) -> dict[str, Any]:
            files, offset = [], 0
            found = folders.files_matching(folder, pattern)
            _must_fit([name for name, _ in found], pattern)
            for name, path in found:
                size, mode = _send_file(out, stream, offset, path)
                offset += size
                files.append([name, size, mode])
            return {"files": files}

        self._session.work(identity, send)

    def checkpoints(self, identity: int, arguments: dict[str, Any], _epoch: int | None) -> None:
        folder, pattern = _folder(arguments), str(arguments["pattern"])

        def look(_out: Out) -> dict[str, Any]:
            found = {"found": checkpoint_files.complete(folder, pattern)}
            return (
                {**found, "versions": checkpoint_files.versions(folder, pattern)}
                if arguments.get("versions")
                else found
            )

        self._session.work(identity, look)

    def code(self, identity: int, arguments: dict[str, Any], _epoch: int | None) -> None:
        folder = _folder(arguments)
        if arguments.get("unsynced"):
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
    except frames.TooLargeError as error:
        text = f"`{pattern}` matches {len(names)} files, more than an answer can name"
        raise refusals.refused(text, "fetch them in parts, or put them into one archive there") from error


def _send_file(out: Out, stream: int, offset: int, path: str) -> tuple[int, int]:
    """Send a file as far as it goes now; return how many bytes that were, and its mode."""
    sent = 0
    with open(path, "rb") as file:
        while True:
            data = file.read(frames.CHUNK_BYTES)
            if not data:
                return sent, stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            out.data(stream, offset + sent, data)
            sent += len(data)
