"""Commands for files on a node: sync, copy, fetch, the search for checkpoints, and the hash of the code."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.cast import piece_store
from clusterctl.agent.environment import store
from clusterctl.agent.facts import storage_facts
from clusterctl.agent.linux import helper_process, syscalls
from clusterctl.agent.linux.event_loop import FrameChannel
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import command_messages, file_list, frames
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.pieces import CastPlan
from clusterctl.agent.serve.run_summary import summarize_run
from clusterctl.agent.workdir import file_tree, synced_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Callable

    from clusterctl.agent.cast import peer
    from clusterctl.agent.linux.helper_process import HelperOutput, Task, TaskResult
    from clusterctl.agent.protocol import command_payload_types, file_list
    from clusterctl.agent.protocol.frames import Message
    from clusterctl.agent.serve.agent_session import AgentSession, Handler
    from clusterctl.agent.serve.run_commands import RunCommands


def list_missing_files(
    arguments: command_payload_types.CopyArguments, entries: list[list[Any]], root: str
) -> command_payload_types.CopyAnswer:
    """Return the files of a listing that the target does not have; correct the permission bits of the other files.

    Missing parent folders are made. If the target folder does not exist, its name replaces the first part of each path.
    With `look` in the arguments, nothing is changed.

    Raises:
        RequestError: A file exists where a folder must be, the copy would change the code of a live run, or the disk is
            full.
    """
    for path, *_ in entries:
        file_tree.check_relative_path(path)
    look = bool(arguments.get("look"))
    folder, name = _choose_target(arguments, make=not look)
    files = replace_first_path_part(entries, name)
    if name is not None and os.path.exists(f"{folder}/{name}") and any("/" in path for path, *_ in files):
        raise command_messages.make_refused_error(
            f"cannot copy a folder to {folder}/{name}, which is a file", "choose another name"
        )
    need = _list_differing_files(file_tree.FileTree(folder), files, change_modes=not look)
    _refuse_code_of_live_runs(root, {os.path.join(os.path.realpath(folder), files[number][0]) for number in need})
    needed = [files[number] for number in need]
    file_tree.refuse_without_space(folder, [(path, size, digest) for path, size, _, digest in needed])
    return {"need": need, "folder": folder, "name": name}


def replace_first_path_part(entries: list[list[Any]], name: str | None) -> list[list[Any]]:
    """Replace the first part of each path by `name`, or return the entries unchanged if `name` is `None`."""
    if name is None:
        return entries
    return [["/".join([name, *path.split("/")[1:]]), *rest] for path, *rest in entries]


def _choose_target(arguments: command_payload_types.CopyArguments, *, make: bool) -> tuple[str, str | None]:
    """Return the target folder, and the new first part of all paths, or `None` if paths do not change.

    With `make`, the folder is made.
    """
    base, target = os.path.expanduser(str(arguments["folder"])), os.path.expanduser(str(arguments["target"]))
    place = os.path.abspath(os.path.join(base, target))
    if make and not os.path.isabs(target):
        file_tree.make_workdir(base)
    folder, name = (place, None) if arguments["inside"] or os.path.isdir(place) else os.path.split(place)
    try:
        if make:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise command_messages.make_refused_error(
            f"cannot make the folder {folder}: {error.strerror or error}"
        ) from error
    return folder, name


def _list_differing_files(tree: file_tree.FileTree, files: list[list[Any]], *, change_modes: bool) -> list[int]:
    need = []
    for number, (path, size, mode, digest) in enumerate(files):
        entry = tree.read_fingerprint(path, {}, {}, expected_size=size)
        if entry is None or not file_tree.has_same_content(entry, (size, mode & 0o777, digest)):
            need.append(number)
        elif change_modes and entry[1] != mode & 0o777:
            tree.chmod(path, mode)
    return need


def _refuse_code_of_live_runs(root: str, paths: set[str]) -> None:
    for run in run_dir.list_run_dirs(root) if paths else ():
        other_run = summarize_run(run)
        if not other_run["live"] or not other_run["workdir"]:
            continue
        folder = os.path.realpath(other_run["workdir"])
        for path in synced_code.SyncedWorkdir(folder, root).list_synced_files():
            if os.path.join(folder, path) in paths:
                hint = f"stop the run with `clusterctl down {run.run}`, wait for its end, or copy to another folder"
                raise command_messages.make_refused_error(f"run {run.run} uses {folder}/{path} as its code", hint)


_MAX_FILE_BYTES = 1 << 62
"""Upper bound of file sizes and request numbers."""
_MAX_REMOVED_NAMES = 100
"""A dry run of a sync lists at most this many of the files that the sync would remove."""


def make_file_handlers(session: AgentSession, runs: RunCommands) -> dict[Command, Handler]:
    """Return the handlers of the file commands."""
    files = _FileCommands(session, runs)
    return {
        Command.MANIFEST: files.manifest,
        Command.COPY: files.copy,
        Command.CAST: files.cast,
        Command.CONTENTS: files.contents,
        Command.RECEIVE: files.receive,
        Command.FETCH: files.fetch,
        Command.CHECKPOINTS: files.checkpoints,
        Command.CODE: files.code,
        Command.ENVIRONMENT: files.environment,
    }


def _resolve_workdir(
    arguments: command_payload_types.FetchArguments
    | command_payload_types.ManifestArguments
    | command_payload_types.CheckpointsArguments
    | command_payload_types.CodeArguments
    | command_payload_types.ContentsArguments,
) -> str:
    return os.path.abspath(os.path.expanduser(str(arguments["workdir"])))


def _find_live_run(folder: str, root: str, run: str | None) -> str | None:
    """Return the live run, other than `run`, whose workdir is `folder`, or `None`."""
    folder = os.path.realpath(folder)
    for other in run_dir.list_run_dirs(root):
        if other.run == run:
            continue
        other_run = summarize_run(other)
        if other_run["live"] and other_run["workdir"] and os.path.realpath(other_run["workdir"]) == folder:
            return other.run
    return None


def _read_python(run: run_dir.RunDir) -> str:
    """Return the Python that the request of a run names, or ""."""
    return str((syscalls.read_json(run.prepare_file) or {}).get("python") or "")


def _list_needed(entries: Sequence[Sequence[object]], need: Iterable[str]) -> command_payload_types.ManifestAnswer:
    """Return the positions of the needed files in a listing."""
    lacking = set(need)
    return {"need": [number for number, (path, *_) in enumerate(entries) if path in lacking]}


def _describe_sync(
    place: synced_code.SyncedWorkdir, run: str | None, data: bytes
) -> command_payload_types.ManifestAnswer:
    """Return the files that a sync would change, and the live run that uses the workdir."""
    entries = file_list.decode_file_list(data)
    found = place.compare_files({path: entry for path, *entry in entries})
    return {
        **_list_needed(entries, found.differing_files),
        "going": len(found.files_to_remove),
        "gone": found.files_to_remove[:_MAX_REMOVED_NAMES],
        "user": _find_live_run(place.folder, place.root, run) if found.changed_paths else None,
    }


@dataclass(frozen=True)
class _PendingTransfer:
    """A transfer that may follow a comparison: `make_receiver` makes its receiver, and `finish` is called last.

    Attributes:
        tree: The target folder.
        list_files: Returns the compared files: path, size, mode and hash.
        need: The positions of the files that this node lacks.
        lock: A descriptor to keep open during the transfer, or `None`.
    """

    tree: file_tree.FileTree
    list_files: Callable[[], list[list[Any]]]
    need: list[int]
    make_receiver: Callable[[], file_tree.FileReceiver]
    finish: Callable[[], None] = lambda: None
    lock: int | None = None


def _describe_transfer(transfer: _PendingTransfer) -> tuple[str, dict[str, str], dict[str, str], peer.Installer | None]:
    """Return the fields of `peer.Assignment` from `folder` on."""
    need = set(transfer.need)
    files = transfer.list_files()
    present = {
        digest: transfer.tree.resolve(path)
        for number, (path, size, _, digest) in enumerate(files)
        if size and number not in need
    }
    install = (lambda take: transfer.make_receiver().take_files(take)) if need else None
    return transfer.tree.folder, present, {digest: path for path, _, _, digest in files}, install


class _FileCommands:
    def __init__(self, session: AgentSession, runs: RunCommands) -> None:
        self._session, self._runs = session, runs
        self._transfers: dict[int, _PendingTransfer] = {}
        """The transfers that the controller may start, by the stream number of their listing."""
        self._receivers: dict[int, file_tree.FileReceiver] = {}
        session.end_actions.append(self._abandon_transfers)

    def _abandon_transfers(self) -> None:
        for receiver in self._receivers.values():
            receiver.abandon()

    def manifest(self, request_id: int, arguments: command_payload_types.ManifestArguments, _epoch: int | None) -> None:
        place = synced_code.SyncedWorkdir(_resolve_workdir(arguments), self._session.state_root)
        run, stream, locks = arguments.get("run"), int(arguments["stream"]), self._runs.workdir_locks

        def compare(data: bytes) -> None:
            if arguments.get("look"):
                self._session.run_task(request_id, lambda _out: _describe_sync(place, run, data))
                return
            lock = locks.get(place, run)

            def prepare_sync(_out: HelperOutput) -> command_payload_types.ManifestAnswer:
                starting = lock.wait_for_lock()
                entries = file_list.decode_file_list(data)
                user = _find_live_run(place.folder, place.root, run) or starting
                found = place.prepare_sync({path: entry for path, *entry in entries}, user, run)
                edited: command_payload_types.ManifestAnswer = {
                    "need": [],
                    "edited": found.edited[:_MAX_REMOVED_NAMES],
                }
                return {**edited, **_list_needed(entries, found.differing_files)}

            def plan_transfer(outcome: Message) -> _PendingTransfer:
                def list_files() -> list[list[Any]]:
                    return file_list.decode_file_list(data)

                def make_receiver() -> file_tree.FileReceiver:
                    entries = list_files()
                    return place.make_receiver([entries[number] for number in outcome["need"]])

                return _PendingTransfer(
                    place, list_files, outcome["need"], make_receiver, lambda: locks.downgrade(place), lock.fd
                )

            self._compare_list(request_id, stream, prepare_sync, plan_transfer, lambda: locks.release(place), [lock.fd])

        self._collect_stream(request_id, stream, int(arguments["size"]), compare)

    def _compare_list(
        self,
        request_id: int,
        stream: int,
        task: Task,
        plan_transfer: Callable[[Message], _PendingTransfer],
        on_error: Callable[[], None] = lambda: None,
        keep: Iterable[int] = (),
    ) -> None:
        """Compare a listing with the disk in a helper process, answer with the result, and store the transfer.

        Args:
            request_id: The request to answer.
            stream: The stream number of the listing. The command RECEIVE names the transfer by this number.
            task: Function that compares the listing with the disk; the result has the positions of the needed files.
            plan_transfer: Function that returns the transfer for a result of `task`.
            on_error: Called if the task fails.
            keep: Descriptors that stay open in the helper process.
        """

        def take_result(outcome: TaskResult) -> None:
            if isinstance(outcome, Exception):
                on_error()
                self._session.answer_error(request_id, outcome)
                return
            transfer = plan_transfer(outcome)
            self._transfers[stream] = transfer
            if not outcome["need"]:
                transfer.finish()
            self._session.answer(request_id, outcome)

        self._session.children.run_task(task, take_result, keep)

    def _collect_stream(self, request_id: int, stream: int, size: int, on_complete: Callable[[bytes], None]) -> None:
        """Call `on_complete` with the first `size` bytes of a stream; if `on_complete` fails, answer with its error."""
        data = bytearray()

        def take(part: frames.StreamData) -> None:
            data.extend(part.payload)
            if len(data) >= size:
                del self._session.data_handlers[stream]
                try:
                    on_complete(bytes(data))
                except Exception as error:
                    self._session.answer_error(request_id, error)

        self._session.data_handlers[stream] = take

    def copy(self, request_id: int, arguments: command_payload_types.CopyArguments, _epoch: int | None) -> None:
        stream, root = int(arguments["stream"]), self._session.state_root

        def compare(data: bytes) -> None:
            def list_missing(_out: HelperOutput) -> command_payload_types.CopyAnswer:
                return list_missing_files(arguments, file_list.decode_file_list(data), root)

            def plan_transfer(outcome: Message) -> _PendingTransfer:
                tree = file_tree.FileTree(outcome["folder"])

                def list_files() -> list[list[Any]]:
                    return replace_first_path_part(file_list.decode_file_list(data), outcome["name"])

                def make_receiver() -> file_tree.FileReceiver:
                    entries = list_files()
                    files = [entries[number] for number in outcome["need"]]
                    # Check again, because a run may have started since the comparison.
                    folder = os.path.realpath(tree.folder)
                    _refuse_code_of_live_runs(root, {os.path.join(folder, path) for path, *_ in files})
                    return file_tree.FileReceiver(tree, files)

                return _PendingTransfer(tree, list_files, outcome["need"], make_receiver)

            self._compare_list(request_id, stream, list_missing, plan_transfer)

        self._collect_stream(request_id, stream, int(arguments["size"]), compare)

    def environment(
        self, request_id: int, arguments: command_payload_types.EnvironmentArguments, _epoch: int | None
    ) -> None:
        root = self._session.state_root

        def describe(_out: HelperOutput) -> command_payload_types.EnvironmentAnswer:
            live = (run for run in run_dir.list_run_dirs(root) if summarize_run(run)["live"])
            return store.describe_store(arguments, (_read_python(run) for run in live), f"{root}/caches")

        self._session.run_task(request_id, describe)

    def receive(
        self, request_id: int, arguments: command_payload_types.ReceiveArguments, _epoch: int | None
    ) -> command_payload_types.ReceiveAnswer | None:
        stream = int(arguments["stream"])
        transfer = self._pop_transfer(arguments["manifest"])
        receiver = transfer.make_receiver()
        if receiver.is_complete:
            transfer.finish()
            return {"written": receiver.written, "hash": receiver.hash}

        def take(data: frames.StreamData) -> None:
            try:
                receiver.feed(data.payload)
            except Exception as error:
                self._receivers.pop(stream).abandon()
                # Ignore further data of this stream.
                self._session.data_handlers[stream] = lambda _data: None
                self._session.answer_error(request_id, error)
                return
            if receiver.is_complete:
                transfer.finish()
                del self._session.data_handlers[stream], self._receivers[stream]
                self._session.answer(request_id, {"written": receiver.written, "hash": receiver.hash})

        self._session.data_handlers[stream], self._receivers[stream] = take, receiver
        return None

    def _pop_transfer(self, manifest: int) -> _PendingTransfer:
        if manifest not in self._transfers:
            raise command_messages.RequestError(command_messages.ErrorKind.BAD_REQUEST, "these files were not compared")
        return self._transfers.pop(manifest)

    def cast(self, request_id: int, arguments: command_payload_types.CastArguments, _epoch: int | None) -> None:
        """Start a peer for a compared transfer, and relay messages between the peer and the head."""
        stream, transfer = int(arguments["stream"]), self._pop_transfer(arguments["manifest"])
        waiting, sent_bytes = [request_id], {stream: 0, stream + 1: 0}

        def send(number: int, payload: bytes) -> None:
            self._session.channel.send_data(number, sent_bytes[number], payload)
            sent_bytes[number] += len(payload)

        def start(plan: bytes) -> None:
            from clusterctl.agent.cast import peer  # It loads TLS, which few agents need and some Pythons lack.

            keep = [] if transfer.lock is None else [transfer.lock]
            fd = peer.fork_peer(peer.Assignment(stream, *_describe_transfer(transfer)), plan, keep)
            channel = FrameChannel(self._session.loop, fd, fd, forward, end)
            self._session.data_handlers[stream] = lambda part: channel.send_data(stream, part.offset, part.payload)

        def forward(frame: frames.Frame) -> None:
            if isinstance(frame, frames.StreamData):
                send(stream, frame.payload)
            elif waiting:
                outcome = helper_process.parse_result([frame])
                if isinstance(outcome, Exception):
                    self._session.answer_error(waiting.pop(), outcome)
                else:
                    self._session.answer(waiting.pop(), outcome)
            else:
                if frame.get("installed"):
                    transfer.finish()
                send(stream + 1, json.dumps(frame).encode() + b"\n")

        def end(_why: str) -> None:
            self._session.data_handlers[stream] = lambda _data: None
            forward({"ended": True})

        self._collect_stream(request_id, stream, int(arguments["size"]), start)

    def contents(self, request_id: int, arguments: command_payload_types.ContentsArguments, _epoch: int | None) -> None:
        """Send a list of files with their hashes, then the SHA-256 of each piece of their contents."""
        folder, pattern = _resolve_workdir(arguments), str(arguments["pattern"])
        stream = int(arguments["stream"])

        def hash_files(out: HelperOutput) -> command_payload_types.ContentsAnswer:
            files: list[tuple[str, int, int, str]] = []
            contents: dict[str, tuple[str, int]] = {}
            tree = file_tree.FileTree("/")
            for name, path in file_tree.find_matching_files(folder, pattern, links=True):
                out.send_message({"at": path})
                entry = tree.read_fingerprint(os.path.realpath(path)[1:], {}, {})
                if entry is not None:
                    files.append((name, *entry))
                    contents.setdefault(entry[2], (os.path.realpath(path), entry[0]))
            plan = [(digest, size) for digest, (_, size) in contents.items() if size]
            store = piece_store.PieceStore(
                folder,
                CastPlan("", plan, [], "", "", "", None),
                {digest: path for digest, (path, _) in contents.items()},
            )
            hashes = (hashlib.sha256(store.read(piece)).digest() for piece in range(store.map.count))
            listing, offset = file_list.encode_file_list(files), 0
            for data in (listing, *hashes):
                for start in range(0, len(data), frames.CHUNK_BYTES):
                    out.send_data(stream, offset + start, data[start : start + frames.CHUNK_BYTES])
                offset += len(data)
            return {"listing": len(listing)}

        self._session.run_task(request_id, hash_files)

    def fetch(self, request_id: int, arguments: command_payload_types.FetchArguments, _epoch: int | None) -> None:
        folder, pattern, stream = _resolve_workdir(arguments), str(arguments["pattern"]), int(arguments["stream"])

        of = arguments.get("of")
        began = None if of is None else self._runs.journal_states.read_state(self._runs.find_run(of)).began_at

        def send(out: HelperOutput) -> command_payload_types.FetchAnswer:
            files: list[tuple[str, int, int]] = []
            offset = 0
            matching = file_tree.find_matching_files(folder, pattern, links=bool(arguments.get("links")))
            if began is not None:
                matching = file_tree.filter_changed_since(matching, began, folder)
            _refuse_too_many_files([name for name, _ in matching], pattern)
            for name, path in matching:
                sent = _send_file(out, stream, offset, path)
                if sent is not None:
                    offset += sent[0]
                    files.append((name, *sent))
            return {"files": files}

        self._session.run_task(request_id, send)

    def checkpoints(
        self, request_id: int, arguments: command_payload_types.CheckpointsArguments, _epoch: int | None
    ) -> None:
        folder, pattern = _resolve_workdir(arguments), str(arguments["pattern"])

        def list_checkpoints(_out: HelperOutput) -> command_payload_types.CheckpointsAnswer:
            if "files" in arguments:
                files = storage_facts.list_checkpoint_files(
                    folder, str(arguments["files"]), with_hashes=bool(arguments.get("hashes"))
                )
                return {"found": [], "files": files}
            answer: command_payload_types.CheckpointsAnswer = {
                "found": storage_facts.list_complete_checkpoints(folder, pattern)
            }
            if arguments.get("versions"):
                answer["versions"] = storage_facts.list_checkpoint_file_versions(folder, pattern)
                answer["network"] = run_dir.is_on_network_filesystem(
                    storage_facts.find_checkpoint_folder(folder, pattern)
                )
            return answer

        self._session.run_task(request_id, list_checkpoints)

    def code(self, request_id: int, arguments: command_payload_types.CodeArguments, _epoch: int | None) -> None:
        folder = _resolve_workdir(arguments)
        place = synced_code.SyncedWorkdir(folder, self._session.state_root)
        self._session.run_task(request_id, lambda _out: {"hash": place.hash_synced_files()})


def _refuse_too_many_files(names: list[str], pattern: str) -> None:
    """Check before a transfer that its answer can list all files.

    Raises:
        RequestError: The pattern matches too many files.
    """
    try:
        frames.encode_message({"files": [[name, _MAX_FILE_BYTES, 0o7777] for name in names], "id": _MAX_FILE_BYTES})
    except frames.FrameTooLargeError as error:
        text = f"`{pattern}` matches {len(names)} files, which are too many for one transfer"
        raise command_messages.make_refused_error(
            text, "fetch fewer files at a time, or put them into an archive on the node"
        ) from error


def _send_file(out: HelperOutput, stream: int, offset: int, path: str) -> tuple[int, int] | None:
    """Send the content of a file; return its size and its permission bits, or `None` if it no longer exists."""
    sent = 0
    try:
        with open(path, "rb") as file:
            while True:
                data = file.read(frames.CHUNK_BYTES)
                if not data:
                    return sent, stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                out.send_data(stream, offset + sent, data)
                sent += len(data)
    except OSError as error:
        if not sent and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            return None
        raise
