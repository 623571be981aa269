"""The larger requests to a node: those of a run as dataclasses, and the file list of a sync or copy."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from clusterctl.agent.protocol.command_messages import ErrorKind, RequestError
from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES, FrameError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


class StopReason(str, Enum):
    """Who or what asked for the end of an attempt."""

    PEER_FAILED = "peer_failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    FENCE = "fence"
    NODE_LOST = "node_lost"
    START_FAILED = "start_failed"
    RESTART = "restart"
    UNHEALTHY = "unhealthy"
    PORT_TAKEN = "port_taken"


@dataclass(frozen=True)
class Prepare:
    """Prepare a node for one attempt. Repeating it for the same attempt gives the same answer.

    Attributes:
        ports: TCP ports to reserve until the run's end; 0 for any free one, which is reserved until the next attempt.
        gpus: Device indices that the run claims on this node; empty for none.
        ranks: Ranks whose output files get reserved space.
        reserve: Bytes reserved beyond the end of each output file.
        max_size: Size of an output file above which its oldest replicated bytes are discarded; `None` for no limit.
        grace: Seconds between the stop signal and SIGKILL when the node stops by itself.
        stop_signal: Name of the signal that asks workers to end.
        stop_after: Seconds without a controller's frame after which the node stops the run; `None` for never.
        workdir: The folder of the code; made if it is missing.
        code_hash: The hash of the synced manifest; a workdir with another hash is refused. `None` without a sync.
        python: The interpreter that the user named, or `None`; the answer names the interpreter to use.
        python_hint: The path that the node tries first if the user named none (the head's own interpreter).
        script: A file that must exist, relative to the workdir; `None` if unknown.
        sample_seconds: Interval of activity samples.
        health_seconds: Interval of GPU and host samples; 0 turns them off.
        forked: JSON form of `ForkPlan`; `None` if every worker starts a new interpreter.
    """

    run: str
    node: str
    attempt: int
    workdir: str
    name: str = ""
    ports: list[int] = field(default_factory=list)
    gpus: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    reserve: int = 64 * 1024 * 1024
    max_size: int | None = None
    grace: float = 10.0
    stop_signal: str = "SIGTERM"
    stop_after: float | None = None
    python: str | None = None
    python_hint: str | None = None
    script: str | None = None
    sample_seconds: float = 2.0
    health_seconds: float = 15.0
    watch: list[str] = field(default_factory=list)
    code_hash: str | None = None
    forked: dict[str, Any] | None = None


@dataclass(frozen=True)
class ForkPlan:
    """How the ranks of a node are forked from one process that has imported modules; see `job.start_method`.

    Attributes:
        argv: The command of every rank, the interpreter first.
        env: The environment that all ranks share, without the variables of a single rank.
        preload: Installed modules to import; `None` for torch, or numpy if there is no torch.
        secrets: Names of variables whose values come with the start.
        inject: Put our `sitecustomize` first on PYTHONPATH.
        keep: The process may be needed for another attempt.
        demanded: The user asked for forking, so a note explains why ranks are not forked.
    """

    argv: list[str]
    env: dict[str, str]
    preload: list[str] | None = None
    secrets: list[str] = field(default_factory=list)
    inject: bool = True
    keep: bool = False
    demanded: bool = True


@dataclass(frozen=True)
class WorkerStart:
    """One worker of an attempt: `argv` is executed as it is, after `prologue` (run by bash) if there is one."""

    rank: int
    local_rank: int
    argv: list[str]
    env: dict[str, str]
    prologue: str | None = None


@dataclass(frozen=True)
class Start:
    """Start the workers of a prepared attempt; all of the node at once.

    Attributes:
        workers: JSON form of `WorkerStart`.
        secrets: Added to the environment of each worker; stored on a tmpfs (0600) only if `keep_secrets`.
        keep_secrets: A later attempt may need the secrets again.
        inject: Put our `sitecustomize` first on PYTHONPATH.
    """

    run: str
    node: str
    attempt: int
    workers: list[dict[str, Any]]
    secrets: dict[str, str] = field(default_factory=dict)
    keep_secrets: bool = False
    inject: bool = True


@dataclass(frozen=True)
class Stop:
    """Stop the attempt: stop signal and SIGCONT to every group, then SIGKILL after `grace` seconds.

    The node kills until two searches in a row find no process. Repeating the request may shorten the grace, never
    lengthen it. `reason` is a `StopReason`.
    """

    run: str
    node: str
    grace: float
    reason: str


@dataclass(frozen=True)
class Follow:
    """Send the journal after `seq`, and each file of the run from its cursor (bytes; 0 without a cursor).

    The controller has all files of attempts before number `complete_before`, so nothing of them is sent. A little new
    output may wait until `pace` seconds after the last, so that one message carries it instead of many.
    """

    run: str
    node: str
    seq: int
    cursors: dict[str, int] = field(default_factory=dict)
    credit: int = INITIAL_CREDIT_BYTES
    complete_before: int = 0
    pace: float = 0.0


@cache
def _names(cls: type) -> frozenset[str]:
    # Cached, because it is called for every line of a journal.
    return frozenset(f.name for f in fields(cls))


def parse_dataclass(cls: type[T], value: dict[str, Any]) -> T:
    """Return a dataclass from the JSON object of a peer. Unknown fields are ignored.

    Raises:
        FrameError: A required field is missing.
    """
    names = _names(cls)  # type: ignore[arg-type]
    try:
        return cls(**{name: value[name] for name in names if name in value})
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error


LINK_MODE = 0o120777
"""The mode of a symbolic link in a list; the content of the link is its target, inside the folder."""

FOLDER_MODE = 0o040777
"""The mode of an empty folder in a list: its size is 0, its hash that of no bytes. Its content on a node may stay."""


def encode_file_list(entries: Iterable[tuple[str, int, int, str]]) -> bytes:
    """Return the compressed bytes of a file list: path, size, permission bits and SHA-256 of each file.

    Both sides refer to the files by their place in the list. A hundred thousand files take 16 MB of JSON, which is more
    than a frame holds.
    """
    text = json.dumps(list(entries), separators=(",", ":"), ensure_ascii=False)
    # Half of the list are hashes, which no level compresses.
    return zlib.compress(text.encode("utf-8", "surrogateescape"), 1)


def decode_file_list(data: bytes) -> list[list[Any]]:
    """Return the entries of an encoded file list.

    Raises:
        RequestError: The bytes are not a file list.
    """
    try:
        entries = json.loads(zlib.decompress(data).decode("utf-8", "surrogateescape"))
        return [[str(path), int(size), int(mode), str(digest)] for path, size, mode, digest in entries]
    except (zlib.error, ValueError, TypeError) as error:
        raise RequestError(ErrorKind.BAD_REQUEST, f"not a list of files: {error}") from error
