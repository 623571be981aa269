"""Files of one node's workdir to the head."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.errors import AgentError, NodeError, RefusedError
from clusterctl.run.nodes.asked import asked_for

if TYPE_CHECKING:
    from clusterctl.agent.protocol.frames import Data
    from clusterctl.session.conversation import Session

# Only a bound: a node that goes silent ends the session long before.
_FETCH_SECONDS = 24 * 3600.0
MOST_BYTES = 10 << 30
"""Of the files of one node, where nobody says otherwise."""


def pull(
    session: Session, workdir: str, pattern: str, target: Path, *, most: int = MOST_BYTES
) -> tuple[list[str], int]:
    """Fetch the files of a node that match; return their names, relative to `target`, and their bytes in all.

    Files that are there already are replaced, each at once and whole.

    Args:
        session: With the node.
        workdir: On the node; the pattern begins there.
        pattern: Such as `ckpt/**`.
        target: Folder on the head; made if there is anything to put into it.
        most: Bytes that all of them may have.

    Raises:
        RefusedError: The head cannot write them, or there are more.
        NodeError: The node could not send them, or sent one that was not asked for; nothing was written then.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent) as spool:
            files = _fetch(session, workdir, pattern, spool, most)
            for name, _, _ in files:
                _refuse_unasked(session.node, pattern, name)
            spool.seek(0)
            for name, size, mode in files:
                _place(_inside(target, name), spool, size, mode)
    except OSError as error:
        raise RefusedError(f"{target} cannot be written: {error.strerror or error}") from error
    return [name for name, _, _ in files], sum(size for _, size, _ in files)


def _fetch(session: Session, workdir: str, pattern: str, spool: BinaryIO, most: int) -> list[tuple[str, int, int]]:
    failed: list[OSError | RefusedError] = []

    def take(data: Data) -> None:
        # Runs on the session's reading thread, which an error of ours must not end.
        if failed:
            return
        if data.offset != spool.tell():
            raise FrameError(f"byte {data.offset} of the files comes where {spool.tell()} is due")
        if data.offset + len(data.payload) > most:
            text = f"{session.node}: what matches `{pattern}` has over {most} bytes"
            failed.append(RefusedError(text, hint="`--max-size` allows more"))
            session.close()
            return
        try:
            spool.write(data.payload)
        except OSError as error:
            failed.append(error)

    stream = session.new_stream(take)
    asked: dict[str, Any] = {"workdir": workdir, "pattern": pattern, "stream": stream}
    try:
        answer = session.call(Command.FETCH, asked, timeout=_FETCH_SECONDS)
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
        left = size
        while left and (chunk := spool.read(min(left, 1024 * 1024))):
            file.write(chunk)
            left -= len(chunk)
    temporary = Path(file.name)
    # The node does not decide who may change files of the head.
    temporary.chmod(0o600 | (mode & 0o755))
    shutil.move(temporary, path)
