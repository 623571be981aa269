"""Files from the head to nodes: the code of a run, and files that a person copies. A node gets only what it lacks."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clusterctl.agent.protocol import file_list
from clusterctl.agent.protocol.frames import CHUNK_BYTES
from clusterctl.errors import AgentError, NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.session.requests import COPY, MANIFEST, RECEIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from clusterctl.agent.protocol import command_types
    from clusterctl.run.nodes.code_manifest import ContentStore, Manifest
    from clusterctl.session.session import Session


_SYNC_SECONDS = 1800.0
_LEAST_BYTES_A_SECOND = 16 * 1024
"""A node that takes less for long is given up: it could hold a start for ever."""


class SyncPayload:
    """Code on its way to any number of nodes: what they all are told is put together once.

    Args:
        manifest: What must be there.
        store: Has the content.
    """

    def __init__(self, manifest: Manifest, store: ContentStore) -> None:
        self.store = store
        self.entries = [(path, *entry) for path, entry in manifest.files.items()]
        self.listing = file_list.encode_file_list(self.entries)


def sync_files(
    session: Session, workdir: str, parcel: SyncPayload, *, run: str | None, say: Callable[[str], None]
) -> tuple[int, int]:
    """Make a node's workdir hold what a parcel names; return how many files and bytes were sent.

    Args:
        session: With the node.
        workdir: On the node; `~` is its own home.
        parcel: What must be there.
        run: For whom; a workdir that another live run uses is not touched.
        say: Takes what the node is doing.

    Raises:
        RefusedError: Another run uses the workdir.
        NodeError: The node could not, or was lost.
    """
    say("comparing files")
    manifest = session.new_stream()
    found = _compared(
        session, parcel, {"workdir": workdir, "run": run, "stream": manifest, "size": len(parcel.listing)}
    )
    need = [parcel.entries[number] for number in found["need"]]
    if need:
        say(f"receiving {plural(len(need), 'file')}")
        send_contents(session, manifest, _read_contents(parcel.store, [digest for *_, digest in need]))
    return len(need), sum(size for _, size, _, _ in need)


@dataclass(frozen=True, slots=True)
class SyncPreview:
    """What a push would do to a node's workdir.

    Attributes:
        files_to_send: Files that would be sent: path and size.
        removal_count: How many files would be removed.
        removed_paths: The first of them.
        active_run: A live run that uses the workdir, so that nothing would be changed; `None` where there is none.
    """

    files_to_send: tuple[tuple[str, int], ...]
    removal_count: int
    removed_paths: tuple[str, ...]
    active_run: str | None


def preview_sync(session: Session, workdir: str, parcel: SyncPayload) -> SyncPreview:
    """Return what `push` would do; nothing is changed.

    Raises:
        NodeError: The node could not tell, or was lost.
    """
    stream, length = session.new_stream(), len(parcel.listing)
    asked: command_types.ManifestArguments = {
        "workdir": workdir,
        "run": None,
        "stream": stream,
        "size": length,
        "look": True,
    }
    found = _compared(session, parcel, asked)
    needed = tuple((path, size) for path, size, *_ in (parcel.entries[number] for number in found["need"]))
    return SyncPreview(needed, found.get("going", 0), tuple(found.get("gone", ())), found.get("user"))


def _compared(
    session: Session, parcel: SyncPayload, asked: command_types.ManifestArguments
) -> command_types.ManifestAnswer:
    """Have a node compare its workdir with a parcel."""
    told = MANIFEST.call_async(session, asked)
    session.send_data(asked["stream"], 0, parcel.listing)
    return wait_for_answer(session.node, told)


def send_contents(session: Session, compared: int, chunks: Iterable[bytes]) -> None:
    """Send the content of files that a node said it needs.

    Args:
        session: With the node.
        compared: The stream of the listing that it compared.
        chunks: All of the content, in the order of its answer.

    Raises:
        RefusedError: It must not take them.
        NodeError: The node could not, was too slow, or was lost.
    """
    stream = session.new_stream()
    answer = RECEIVE.call_async(session, {"manifest": compared, "stream": stream})
    offset, deadline = 0, time.monotonic() + _SYNC_SECONDS
    for chunk in chunks:
        if answer.done():
            break  # with an error: more of it would help nobody
        if time.monotonic() > deadline + offset / _LEAST_BYTES_A_SECOND:
            raise AgentError(session.node, f"it has taken {offset} bytes and is too slow")
        session.send_data(stream, offset, chunk)
        offset += len(chunk)
    wait_for_answer(session.node, answer)


T = TypeVar("T")


def wait_for_answer(node: str, answer: Future[T]) -> T:
    """Wait for what a node says of files; it may have many to look at.

    Raises:
        ClusterctlError: It refused or failed, or did not answer.
    """
    try:
        return answer.result(_SYNC_SECONDS)
    except FutureTimeoutError as error:
        raise AgentError(node, f"no answer within {_SYNC_SECONDS:g} s") from error


def _read_contents(store: ContentStore, digests: Sequence[str]) -> Iterator[bytes]:
    for digest in digests:
        with store.path(digest).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


_CHUNK = 1 << 20


@dataclass(slots=True)
class Upload:
    """Files on their way.

    Attributes:
        entries: Name there, size, permission bits and SHA-256 of each; the first part of a name is that of its source.
        paths: Where each lies here.
        left_out: Links to folders, links that lead nowhere, and what is no file.
        listing: All entries, as they travel.
    """

    entries: list[tuple[str, int, int, str]] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)
    listing: bytes = b""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(size for _, size, _, _ in self.entries)


def collect_upload(sources: Sequence[str], most: int) -> Upload:
    """Return the files that these paths name, those in folders too.

    Raises:
        NotFoundError: There is no such path, or no file in it.
        RefusedError: They have more than `most` bytes, or one cannot be read.
    """
    files = [(name, path) for source in sources for name, path in _list_source_files(source)]
    load = Upload(left_out=[path for _, path in files if not path.is_file()])
    whole = [(name, path) for name, path in files if path.is_file()]
    total = sum(_size(path) for _, path in whole)
    if total > most:
        text = f"{', '.join(sources)}: {format_size(total)}, more than the {format_size(most)} that are copied"
        raise RefusedError(text, hint="`--max-size` allows more")
    for name, path in whole:
        found = _hash_file(path)
        if found is not None:
            load.entries.append((name, *found))
            load.paths.append(path)
    if not load.entries:
        raise NotFoundError(f"{', '.join(sources)}: no file is in there")
    load.listing = file_list.encode_file_list(load.entries)
    return load


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


def _size(path: Path) -> int:
    """Return the size of a file, 0 where it is gone by now."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _hash_file(path: Path) -> tuple[int, int, str] | None:
    """Return size, permission bits and SHA-256 of a file; `None` where it is gone by now."""
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
    """Where files go on a node.

    Attributes:
        folder: To which `target` is relative.
        target: A folder, or the new name of the one source.
        is_folder: It is, or is to be, a folder.
    """

    folder: str
    target: str
    is_folder: bool


@dataclass(frozen=True, slots=True)
class UploadResult:
    """What a node did not have yet, and where all of it is: a folder, or what was given another name."""

    files: int
    bytes: int
    place: str


def upload(session: Session, place: Destination, load: Upload, told: Callable[[int], None]) -> UploadResult:
    """Copy files to a node, each put in place at once and whole; those that are there already are not sent.

    Args:
        session: With the node.
        place: Where they go.
        load: The files.
        told: Takes the bytes of each piece that was sent.

    Raises:
        RefusedError: The node must not put them there, or they have changed meanwhile.
        NodeError: It could not, or was lost.
    """
    need, answer = upload_entries(session, place, load.listing, lambda need: _read_upload(load, need, told))
    where = "/".join([answer["folder"].rstrip("/"), *filter(None, [answer["name"]])])
    return UploadResult(len(need), sum(load.entries[number][1] for number in need), where)


def upload_entries(
    session: Session, place: Destination, entries: bytes, contents: Callable[[list[int]], Iterator[bytes]]
) -> tuple[list[int], command_types.CopyAnswer]:
    """Copy what a listing names to a node; return the numbers of the files that were sent, and its answer.

    Args:
        session: With the node.
        place: Where they go.
        entries: The listing, as it travels.
        contents: Gives the content of the files with these numbers, in their order.

    Raises:
        RefusedError: The node must not put them there.
        NodeError: It could not, or was lost.
    """
    stream = session.new_stream()
    request: command_types.CopyArguments = {
        "folder": place.folder,
        "target": place.target,
        "inside": place.is_folder,
        "stream": stream,
        "size": len(entries),
    }
    compared = COPY.call_async(session, request)
    session.send_data(stream, 0, entries)
    answer = wait_for_answer(session.node, compared)
    need = answer["need"]
    if need:
        send_contents(session, stream, contents(need))
    return need, answer


def _read_upload(load: Upload, need: Sequence[int], told: Callable[[int], None]) -> Iterator[bytes]:
    from clusterctl.agent.protocol.frames import CHUNK_BYTES

    for number in need:
        path, left = load.paths[number], load.entries[number][1]
        try:
            with path.open("rb") as file:
                while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                    left -= len(chunk)
                    told(len(chunk))
                    yield chunk
        except OSError as error:
            raise RefusedError(f"cannot read {path}: {error.strerror or error}") from error
        if left:
            raise RefusedError(f"{path} has become shorter while it was copied")
