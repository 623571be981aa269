"""Code to one node: what it lacks of a manifest, and nothing else."""

from __future__ import annotations

import contextlib
import os
import posixpath
import tempfile
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from clusterctl.agent.protocol import file_list
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.frames import CHUNK_BYTES, FrameError
from clusterctl.errors import AgentError, NodeError, RefusedError
from clusterctl.formatting import plural
from clusterctl.run.nodes.progress import CancelledError
from clusterctl.session.requests import FETCH, MANIFEST, RECEIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.command_types import RunArguments
    from clusterctl.agent.protocol.frames import StreamData
    from clusterctl.errors import ClusterctlError
    from clusterctl.run.nodes.code import ContentStore, Manifest
    from clusterctl.session.session import Session


_SYNC_SECONDS = 1800.0
_LEAST_BYTES_A_SECOND = 16 * 1024
"""A node that takes less for long is given up: it could hold a start for ever."""


class Parcel:
    """Code on its way to any number of nodes: what they all are told is put together once.

    Args:
        manifest: What must be there.
        store: Has the content.
    """

    def __init__(self, manifest: Manifest, store: ContentStore) -> None:
        self.store = store
        self.entries = [(path, *entry) for path, entry in manifest.files.items()]
        self.listing = file_list.encode_file_list(self.entries)


def push(
    session: Session, workdir: str, parcel: Parcel, *, run: str | None, say: Callable[[str], None]
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
        send_all(session, manifest, _contents(parcel.store, [digest for *_, digest in need]))
    return len(need), sum(size for _, size, _, _ in need)


@dataclass(frozen=True, slots=True)
class Differs:
    """What a push would do to a node's workdir.

    Attributes:
        needed: Files that would be sent: path and size.
        going: How many files would be removed.
        gone: The first of them.
        user: A live run that uses the workdir, so that nothing would be changed; `None` where there is none.
    """

    needed: tuple[tuple[str, int], ...]
    going: int
    gone: tuple[str, ...]
    user: str | None


def differs(session: Session, workdir: str, parcel: Parcel) -> Differs:
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
    return Differs(needed, found.get("going", 0), tuple(found.get("gone", ())), found.get("user"))


def _compared(session: Session, parcel: Parcel, asked: command_types.ManifestArguments) -> command_types.ManifestAnswer:
    """Have a node compare its workdir with a parcel."""
    told = MANIFEST.call_async(session, asked)
    session.send_data(asked["stream"], 0, parcel.listing)
    return answered(session.node, told)


def send_all(session: Session, compared: int, chunks: Iterable[bytes]) -> None:
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
    answered(session.node, answer)


T = TypeVar("T")


def answered(node: str, answer: Future[T]) -> T:
    """Wait for what a node says of files; it may have many to look at.

    Raises:
        ClusterctlError: It refused or failed, or did not answer.
    """
    try:
        return answer.result(_SYNC_SECONDS)
    except FutureTimeoutError as error:
        raise AgentError(node, f"no answer within {_SYNC_SECONDS:g} s") from error


def _contents(store: ContentStore, digests: Sequence[str]) -> Iterator[bytes]:
    for digest in digests:
        with store.path(digest).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


_ANY_DEPTH = "**"


def asked_for(pattern: str, name: str) -> bool:
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

MOST_BYTES = 10 << 30
"""Of the files of one node, where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetching:
    """How files are fetched.

    Attributes:
        most: Bytes that all of them may have.
        limit: What allows more.
        links: Links are followed to wherever they lead.
        of: A run; files that are older than it are left out.
        named: The new name of what the pattern names, where it has no wildcards.
        told: Takes the bytes of each piece that has come, on the thread that reads the session.
        cancelled: Set when a person has ended the run that this is for.
    """

    most: int = MOST_BYTES
    limit: str = "--max-size"
    links: bool = False
    of: RunArguments | None = None
    named: str | None = None
    told: Callable[[int], None] = lambda _count: None
    cancelled: threading.Event = field(default_factory=threading.Event)


def pull(
    session: Session, workdir: str, pattern: str, target: Path, how: Fetching = Fetching()
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
            files = fetch(session, workdir, pattern, spool, how)
            for name, _, _ in files:
                _refuse_unasked(session.node, pattern, name)
            spool.seek(0)
            files = [(_named(name, how.named), size, mode) for name, size, mode in files]
            for name, size, mode in files:
                _place(_inside(target, name), spool, size, mode)
    except OSError as error:
        raise RefusedError(f"{error.filename or target} cannot be written: {error.strerror or error}") from error
    return [name for name, _, _ in files], sum(size for _, size, _ in files)


def _named(name: str, other: str | None) -> str:
    """Return a path with another first part, where there is one."""
    return name if other is None else "/".join([other, *PurePosixPath(name).parts[1:]])


def fetch(session: Session, workdir: str, pattern: str, spool: BinaryIO, how: Fetching) -> list[tuple[str, int, int]]:
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
        if data.offset + len(data.payload) > how.most:
            text = f"{session.node}: what matches `{pattern}` has over {how.most} bytes"
            failed.append(RefusedError(text, hint=f"`{how.limit}` allows more"))
            session.close()
            return
        try:
            spool.write(data.payload)
            how.told(len(data.payload))
        except (OSError, ValueError) as error:  # ValueError: nobody waits for it any more, the spool is closed
            failed.append(error if isinstance(error, OSError) else OSError(str(error)))

    stream = session.new_stream(take)
    request: command_types.FetchArguments = {
        "workdir": workdir,
        "pattern": pattern,
        "stream": stream,
        "links": how.links,
    }
    if how.of is not None:
        request["of"] = how.of
    try:
        answer = _fetched(session, request, how.cancelled)
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


def _fetched(
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


def _refuse_unasked(node: str, pattern: str, name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\0" in name:
        raise AgentError(node, f"it names a file outside its folder: {name!r}")
    if not asked_for(pattern, "/".join(parts)):
        raise AgentError(node, f"it sends a file that `{pattern}` does not ask for: {name!r}")


def _inside(target: Path, name: str) -> Path:
    path = target.joinpath(*PurePosixPath(name).parts)
    if not path.parent.resolve().is_relative_to(target.resolve()):
        raise RefusedError(f"{path.parent} leads out of {target}", hint="remove the symbolic link")
    return path


def _place(path: Path, spool: BinaryIO, size: int, mode: int) -> None:
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
