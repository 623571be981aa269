"""Code to one node: what it lacks of a manifest, and nothing else."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import listing
from clusterctl.agent.protocol.commands import Command
from clusterctl.agent.protocol.frames import CHUNK_BYTES
from clusterctl.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from clusterctl.run.nodes.code import ContentStore, Manifest
    from clusterctl.session.conversation import Session

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
        self.listing = listing.encode(self.entries)


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
    asked = {"workdir": workdir, "run": run, "stream": manifest, "size": len(parcel.listing)}
    answer = session.call_async(Command.MANIFEST, asked)
    session.send_data(manifest, 0, parcel.listing)
    need = [parcel.entries[number] for number in _answered(session.node, answer)["need"]]
    if need:
        say(f"receiving {len(need)} files")
        stream = session.new_stream()
        answer = session.call_async(Command.RECEIVE, {"manifest": manifest, "stream": stream})
        offset, deadline = 0, time.monotonic() + _SYNC_SECONDS
        for chunk in _contents(parcel.store, [digest for *_, digest in need]):
            if answer.done():
                break  # with an error: more of it would help nobody
            if time.monotonic() > deadline + offset / _LEAST_BYTES_A_SECOND:
                raise AgentError(session.node, f"it has taken {offset} bytes of the code and is too slow")
            session.send_data(stream, offset, chunk)
            offset += len(chunk)
        _answered(session.node, answer)
    return len(need), sum(size for _, size, _, _ in need)


def _answered(node: str, answer: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return answer.result(_SYNC_SECONDS)
    except FutureTimeoutError as error:
        raise AgentError(node, f"no answer within {_SYNC_SECONDS:g} s") from error


def _contents(store: ContentStore, digests: Sequence[str]) -> Iterator[bytes]:
    for digest in digests:
        with store.path(digest).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
