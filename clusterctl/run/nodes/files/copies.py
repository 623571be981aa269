"""Files of the head that are copied to nodes: looked at once, sent to any number of them."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import file_list
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.formatting import format_size
from clusterctl.run.nodes.transfer import answered, send_all
from clusterctl.session.requests import COPY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from clusterctl.agent.protocol import command_types
    from clusterctl.session.session import Session

_CHUNK = 1 << 20


@dataclass(slots=True)
class Load:
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


def load_of(sources: Sequence[str], most: int) -> Load:
    """Return the files that these paths name, those in folders too.

    Raises:
        NotFoundError: There is no such path, or no file in it.
        RefusedError: They have more than `most` bytes, or one cannot be read.
    """
    files = [(name, path) for source in sources for name, path in _files(source)]
    load = Load(left_out=[path for _, path in files if not path.is_file()])
    whole = [(name, path) for name, path in files if path.is_file()]
    total = sum(_size(path) for _, path in whole)
    if total > most:
        text = f"{', '.join(sources)}: {format_size(total)}, more than the {format_size(most)} that are copied"
        raise RefusedError(text, hint="`--max-size` allows more")
    for name, path in whole:
        found = _look(path)
        if found is not None:
            load.entries.append((name, *found))
            load.paths.append(path)
    if not load.entries:
        raise NotFoundError(f"{', '.join(sources)}: no file is in there")
    load.listing = file_list.encode_file_list(load.entries)
    return load


def _files(source: str) -> Iterator[tuple[str, Path]]:
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


def _look(path: Path) -> tuple[int, int, str] | None:
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
class Place:
    """Where files go on a node.

    Attributes:
        folder: To which `target` is relative.
        target: A folder, or the new name of the one source.
        inside: It is, or is to be, a folder.
    """

    folder: str
    target: str
    inside: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """What a node did not have yet, and where all of it is: a folder, or what was given another name."""

    files: int
    bytes: int
    place: str


def send(session: Session, place: Place, load: Load, told: Callable[[int], None]) -> Sent:
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
    need, answer = send_entries(session, place, load.listing, lambda need: _contents(load, need, told))
    where = "/".join([answer["folder"].rstrip("/"), *filter(None, [answer["name"]])])
    return Sent(len(need), sum(load.entries[number][1] for number in need), where)


def send_entries(
    session: Session, place: Place, entries: bytes, contents: Callable[[list[int]], Iterator[bytes]]
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
        "inside": place.inside,
        "stream": stream,
        "size": len(entries),
    }
    compared = COPY.call_async(session, request)
    session.send_data(stream, 0, entries)
    answer = answered(session.node, compared)
    need = answer["need"]
    if need:
        send_all(session, stream, contents(need))
    return need, answer


def _contents(load: Load, need: Sequence[int], told: Callable[[int], None]) -> Iterator[bytes]:
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
