"""Code to one node: what it lacks of a manifest, and nothing else."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import CHUNK_BYTES, Command
from clusterctl.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from clusterctl.run.code import ContentStore, Manifest
    from clusterctl.session import Session

_SYNC_SECONDS = 1800.0


def push(
    session: Session,
    workdir: str,
    manifest: Manifest,
    store: ContentStore,
    *,
    run: str | None,
    say: Callable[[str], None],
) -> tuple[int, int]:
    """Make a node's workdir hold what the manifest names; return how many files and bytes were sent.

    Args:
        session: With the node.
        workdir: On the node; `~` is its own home.
        manifest: What must be there.
        store: Has the content.
        run: For whom; a workdir that another live run uses is not touched.
        say: Takes what the node is doing.

    Raises:
        RefusedError: Another run uses the workdir.
        NodeError: The node could not, or was lost.
    """
    say("comparing files")
    listing = {path: list(entry) for path, entry in manifest.files.items()}
    asked = {"workdir": workdir, "files": listing, "run": run}
    need: list[str] = session.call(Command.MANIFEST, asked, timeout=_SYNC_SECONDS)["need"]
    if need:
        say(f"receiving {len(need)} files")
        files = [[path, *manifest.files[path]] for path in need]
        stream = session.new_stream()
        answer = session.call_async(Command.RECEIVE, {"workdir": workdir, "files": files, "stream": stream})
        offset = 0
        for chunk in _contents(store, [manifest.files[path][2] for path in need]):
            session.send_data(stream, offset, chunk)
            offset += len(chunk)
        _answered(session.node, answer, _SYNC_SECONDS)
    return len(need), sum(manifest.files[path][0] for path in need)


def _answered(node: str, answer: Future[dict[str, Any]], timeout: float) -> dict[str, Any]:
    try:
        return answer.result(timeout)
    except FutureTimeoutError as error:
        raise AgentError(node, f"no answer within {timeout:g} s") from error


def _contents(store: ContentStore, digests: Sequence[str]) -> Iterator[bytes]:
    for digest in digests:
        with store.path(digest).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
