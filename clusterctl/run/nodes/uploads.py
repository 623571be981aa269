"""Sends files to nodes: the code of a run, and the files of `clusterctl cp`. A node gets only the files it lacks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clusterctl.agent.protocol import command_payload_types, file_list
from clusterctl.agent.protocol.frames import CHUNK_BYTES
from clusterctl.errors import AgentError, NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.run.nodes.code_manifest import CodeManifest, ContentStore
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import COPY, MANIFEST, RECEIVE

_SYNC_TIMEOUT_S = 1800.0
_MIN_BYTES_PER_S = 16 * 1024
"""The lowest speed of a node in bytes per second. A slower node could delay a start for ever, so it is given up."""


T = TypeVar("T")
Answer = TypeVar("Answer", bound="Mapping[str, Any]")


@dataclass(slots=True)
class Upload:
    """Files to send to any number of nodes.

    Attributes:
        entries: Name on the node, size, permission bits and SHA-256 of each file.
        paths: Path of the content of each file on the head.
        excluded: Paths that are not sent: links to folders, broken links, and special files.
        listing: All entries as bytes, in the form that nodes read.
    """

    entries: list[tuple[str, int, int, str]]
    paths: list[Path]
    excluded: list[Path] = field(default_factory=list)
    listing: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.listing = file_list.encode_file_list(self.entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _, _ in self.entries)

    def read(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yield the content of the entries with these numbers, in this order.

        Raises:
            RefusedError: A file cannot be read, or has become shorter.
        """
        for number in numbers:
            yield from self.read_range(number, 0, self.entries[number][1])

    def read_range(self, number: int, offset: int, missing: int) -> Iterator[bytes]:
        """Yield `missing` bytes of an entry from `offset` on.

        Raises:
            RefusedError: The file cannot be read, or has become shorter.
        """
        path = self.paths[number]
        try:
            with path.open("rb") as file:
                file.seek(offset)
                while missing and (chunk := file.read(min(CHUNK_BYTES, missing))):
                    missing -= len(chunk)
                    yield chunk
        except OSError as error:
            raise RefusedError(f"cannot read {path}: {error.strerror or error}") from error
        if missing:
            raise RefusedError(f"{path} has become shorter while it was copied")


def send_missing_files(
    session: Session,
    listing: bytes,
    compare: Callable[[int], Future[Answer]],
    read: Callable[[Sequence[int]], Iterator[bytes]],
) -> Answer:
    """Send a node the files of a listing that the node lacks. Return the node's answer to the listing.

    Args:
        session: The session with the node.
        listing: The entries as bytes (see `Upload.listing`).
        compare: A function that asks the node to compare the listing that a stream brings. `need` in the answer has the
            numbers of the entries that the node lacks.
        read: A function that yields the content of the entries with these numbers, in this order.

    Raises:
        RefusedError: The node refuses the files.
        NodeError: The node could not store them, was too slow, or was lost.
    """
    listed, found = compare_files(session, listing, compare)
    if found["need"]:
        send_listed_files(session, listed, read(found["need"]))
    return found


def compare_files(session: Session, listing: bytes, compare: Callable[[int], Future[Answer]]) -> tuple[int, Answer]:
    """Compare a listing with the files of a node. Return the stream that names the transfer, and the node's answer.

    Raises:
        RefusedError: The node refuses the files.
        NodeError: The node could not compare them, or was lost.
    """
    listed = session.allocate_streams()
    compared = compare(listed)
    session.send_data(listed, 0, listing)
    return listed, wait_for_answer(session.node, compared)


def send_listed_files(session: Session, listed: int, content: Iterator[bytes]) -> None:
    """Send a node the content of the files that it needs. `listed` names the transfer (see `compare_files`).

    Raises:
        RefusedError: The node refuses the files.
        NodeError: The node could not store them, was too slow, or was lost.
    """
    stream = session.allocate_streams()
    answer = RECEIVE.call_async(session, {"manifest": listed, "stream": stream})
    offset, deadline = 0, time.monotonic() + _SYNC_TIMEOUT_S
    for chunk in content:
        if answer.done():
            break  # the node has failed
        if time.monotonic() > deadline + offset / _MIN_BYTES_PER_S:
            raise AgentError(session.node, f"it has taken {offset} bytes and is too slow")
        session.send_data(stream, offset, chunk)
        offset += len(chunk)
    wait_for_answer(session.node, answer)


def wait_for_answer(node: str, answer: Future[T]) -> T:
    """Wait for an answer about files. A node may have to hash many files before it answers.

    Raises:
        ClusterctlError: The node refused, failed or did not answer.
    """
    try:
        return answer.result(_SYNC_TIMEOUT_S)
    except FutureTimeoutError as error:
        raise AgentError(node, f"no answer within {_SYNC_TIMEOUT_S:g} s") from error


# --- code


def build_code_upload(manifest: CodeManifest, store: ContentStore) -> Upload:
    """Return the upload of the files of a manifest, with the content from the store."""
    entries = [(path, *entry) for path, entry in manifest.files.items()]
    return Upload(entries, [store.path(digest) for *_, digest in entries])


def sync_files(
    session: Session, workdir: str, code: Upload, *, run: str | None, on_activity: Callable[[str], None]
) -> tuple[int, int, tuple[str, ...]]:
    """Sync the code to the workdir of a node. Return how many files and bytes were sent, and paths edited on the node.

    Args:
        session: The session with the node.
        workdir: Folder on the node; `~` is the home on the node.
        code: The files of the code.
        run: The run that needs the code. The node refuses the code if another live run uses the workdir.
        on_activity: A function that receives the present activity of the node.

    Raises:
        RefusedError: Another run uses the workdir.
        NodeError: The node could not store the files, or was lost.
    """

    def read(numbers: Sequence[int]) -> Iterator[bytes]:
        on_activity(f"receiving {plural(len(numbers), 'file')}")
        return code.read(numbers)

    on_activity("comparing files")
    compare = functools.partial(compare_code, session, workdir, code, run)
    return summarize_sync(code, send_missing_files(session, code.listing, compare, read))


def compare_code(
    session: Session, workdir: str, code: Upload, run: str | None, stream: int
) -> Future[command_payload_types.ManifestAnswer]:
    """Ask a node to compare the listing of the code, which follows in a stream, with a workdir."""
    size = len(code.listing)
    return MANIFEST.call_async(session, {"workdir": workdir, "run": run, "stream": stream, "size": size})


def summarize_sync(code: Upload, found: command_payload_types.ManifestAnswer) -> tuple[int, int, tuple[str, ...]]:
    """Return the result of `sync_files` after a transfer of the files that a node needed."""
    sizes = [code.entries[number][1] for number in found["need"]]
    return len(sizes), sum(sizes), tuple(found.get("edited", ()))


def describe_replaced_files(sent: Mapping[str, tuple[int, int, tuple[str, ...]]]) -> str | None:
    """Return a warning about files that users had changed on nodes and that syncs have replaced, or `None`."""
    names = sorted({name for *_, edited in sent.values() for name in edited})
    if not names:
        return None
    what = f"`{names[0]}`" if len(names) == 1 else f"{len(names)} files, `{names[0]}` first"
    return f"replaced what a job or a person had changed on nodes: {what}; `sync.exclude` leaves files there alone"


@dataclass(frozen=True, slots=True)
class SyncPreview:
    """The changes that a sync would make in the workdir of a node.

    Attributes:
        files_to_send: Path and size (bytes) of each file that the sync would send.
        removal_count: Number of files that the sync would remove.
        removed_paths: Paths of the first files to remove.
        active_run: The live run that uses the workdir, or `None`. Such a run makes a sync impossible.
    """

    files_to_send: tuple[tuple[str, int], ...]
    removal_count: int
    removed_paths: tuple[str, ...]
    active_run: str | None


def preview_sync(session: Session, workdir: str, code: Upload) -> SyncPreview:
    """Return the changes that `sync_files` would make; nothing is changed.

    Raises:
        NodeError: The node could not compare the files, or was lost.
    """
    stream = session.allocate_streams()
    size = len(code.listing)
    compared = MANIFEST.call_async(
        session, {"workdir": workdir, "run": None, "stream": stream, "size": size, "look": True}
    )
    session.send_data(stream, 0, code.listing)
    found = wait_for_answer(session.node, compared)
    needed = tuple((path, size) for path, size, *_ in (code.entries[number] for number in found["need"]))
    return SyncPreview(needed, found.get("going", 0), tuple(found.get("gone", ())), found.get("user"))


# --- files of `clusterctl cp`

_CHUNK = 1 << 20


def build_file_upload(sources: Sequence[str], max_bytes: int) -> Upload:
    """Return the upload of these files and folders. The name of each file begins with the name of its source.

    Raises:
        NotFoundError: A path does not exist, or there is no file.
        RefusedError: The files have more than `max_bytes`, or one cannot be read.
    """
    files = [(name, path) for source in sources for name, path in _list_source_files(source)]
    total = 0
    for path in [path for _, path in files if path.is_file()]:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    if total > max_bytes:
        text = f"{', '.join(sources)}: {format_size(total)}, more than the {format_size(max_bytes)} that are copied"
        raise RefusedError(text, hint="`--max-size` allows more")
    hashed = [(name, path, found) for name, path in files if path.is_file() and (found := _hash_file(path)) is not None]
    if not hashed:
        raise NotFoundError(f"{', '.join(sources)}: this contains no file")
    entries = [(name, *found) for name, _, found in hashed]
    return Upload(entries, [path for _, path, _ in hashed], [path for _, path in files if not path.is_file()])


def _list_source_files(source: str) -> Iterator[tuple[str, Path]]:
    path = Path(source)
    if not path.exists():
        raise NotFoundError(f"{source}: no such file or folder")
    name = path.resolve().name if path.name in ("", "..") else path.name
    if not path.is_dir():
        yield name, path
        return
    if not name:
        raise RefusedError(f"{source} has no name under which it could be copied")
    for place, folders, files in os.walk(path):
        folders.sort()
        below = Path(place)
        links = [folder for folder in folders if (below / folder).is_symlink()]
        yield from ((f"{name}/{(below / inner).relative_to(path)}", below / inner) for inner in sorted(files + links))


def _hash_file(path: Path) -> tuple[int, int, str] | None:
    """Return size, permission bits and SHA-256 of a file; `None` if the file no longer exists."""
    digest, length = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                length += len(chunk)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror or error}") from error
    return length, mode & 0o777, digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Destination:
    """The place for copied files on a node.

    Attributes:
        folder: Folder to which `target` is relative.
        target: A folder, or the new name of the only source.
        is_folder: `target` is a folder, or a folder to create.
    """

    folder: str
    target: str
    is_folder: bool


@dataclass(frozen=True, slots=True)
class UploadResult:
    """The number of files and bytes sent to a node, and the path that received them."""

    files: int
    bytes: int
    place: str


def summarize_copy(files: Upload, found: command_payload_types.CopyAnswer) -> UploadResult:
    """Return the result of a transfer of the files that a node needed."""
    where = "/".join([found["folder"].rstrip("/"), *filter(None, [found["name"]])])
    return UploadResult(len(found["need"]), sum(files.entries[number][1] for number in found["need"]), where)


def compare_copy(
    session: Session, place: Destination, listing: bytes, stream: int, *, look: bool = False
) -> Future[command_payload_types.CopyAnswer]:
    """Ask a node to compare a listing, which follows in a stream, with a destination; with `look`, change nothing."""
    where: dict[str, Any] = {"folder": place.folder, "target": place.target, "inside": place.is_folder, "look": look}
    return COPY.call_async(session, {**where, "stream": stream, "size": len(listing)})  # type: ignore[typeddict-item]


def copy_listed_files(
    session: Session, place: Destination, listing: bytes, read: Callable[[Sequence[int]], Iterator[bytes]]
) -> command_payload_types.CopyAnswer:
    """Copy the files of a listing to a node (see `send_missing_files`)."""
    return send_missing_files(session, listing, functools.partial(compare_copy, session, place, listing), read)
