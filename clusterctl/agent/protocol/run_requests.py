"""The arguments of the requests that prepare, start, stop and follow an attempt, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES, FrameError

T = TypeVar("T")


class StopReason(str, Enum):
    """The reason for the end of an attempt."""

    PEER_FAILED = "peer_failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    IDLE = "idle"
    FENCE = "fence"
    NODE_LOST = "node_lost"
    START_FAILED = "start_failed"
    RESTART = "restart"
    UNHEALTHY = "unhealthy"
    PORT_TAKEN = "port_taken"
    ROLES_DONE = "roles_done"


@dataclass(frozen=True)
class PrepareArguments:
    """The arguments of a request that prepares a node for one attempt.

    A repeated request for the same attempt gets the same answer.

    Attributes:
        ports: The TCP ports that the node reserves until the run's end. For port 0 the node chooses a free port, and
            reserves this port until the next attempt.
        server_ports: The TCP ports of the servers of a role. They must be free, and the node does not reserve them.
        gpus: The device indices of the GPUs that the run claims on this node.
        ranks: The ranks for whose output files the node reserves space.
        reserve: The bytes that the node reserves beyond the end of each output file.
        max_size: The size of an output file above which the node discards the oldest replicated bytes; `None` for no
            limit.
        grace: The seconds between the stop signal and SIGKILL if the node stops the attempt by itself.
        stop_signal: The name of the signal that asks workers to end.
        stop_after: The seconds without a frame of a controller after which the node stops the run; `None` for never.
        workdir: The folder of the code. The node creates a missing folder.
        code_hash: The hash of the synced code; the node refuses a workdir with another hash. `None` without a sync.
        python: The interpreter that the user has named, or `None`. The answer names the interpreter that is used.
        python_hint: The interpreter that the node tries first if `python` is `None`: the path of the head's own Python.
        script: A file that must exist, relative to the workdir; `None` if the script is unknown.
        sample_seconds: The interval of activity samples.
        health_seconds: The interval of GPU and host samples; 0 means no samples.
        watch: The patterns of the files whose changes count as progress.
        forked: The JSON form of `ForkSettings`; `None` if every worker starts a new interpreter.
        head: The host name of the head, which `who` shows to all users of the node.
        container: The container in whose files the workers run (`command_payload_types.Container`), or `None`.
    """

    run: str
    node: str
    attempt: int
    workdir: str
    name: str = ""
    ports: list[int] = field(default_factory=list)
    server_ports: list[int] = field(default_factory=list)
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
    head: str = ""
    container: dict[str, Any] | None = None


@dataclass(frozen=True)
class ForkSettings:
    """The settings of the forkserver of a node; see `job.start_method`.

    Attributes:
        argv: The command of every rank, with the interpreter first.
        env: The variables that have the same value for all ranks.
        preload: The installed modules that the forkserver imports; `None` for torch, or numpy if torch is missing.
        secrets: The names of the variables whose values arrive with the start request.
        inject: Whether clusterctl's `sitecustomize` comes first on PYTHONPATH.
        keep: Whether a later attempt may need the forkserver.
        demanded: Whether the user asked for forking. In this case a note explains why ranks are not forked.
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
    """The command and environment of one worker. If `prologue` is given, bash runs it before the command."""

    rank: int
    local_rank: int
    argv: list[str]
    env: dict[str, str]
    prologue: str | None = None


@dataclass(frozen=True)
class StartArguments:
    """The arguments of a request that starts all workers of a node for a prepared attempt.

    Attributes:
        workers: The JSON form of a `WorkerStart` for each worker.
        secrets: Variables that are added to the environment of each worker.
        keep_secrets: Whether a later attempt may need the secrets. If so, the node stores the secrets on a tmpfs (mode
            0600).
        inject: Whether clusterctl's `sitecustomize` comes first on PYTHONPATH.
    """

    run: str
    node: str
    attempt: int
    workers: list[dict[str, Any]]
    secrets: dict[str, str] = field(default_factory=dict)
    keep_secrets: bool = False
    inject: bool = True


@dataclass(frozen=True)
class StopArguments:
    """The arguments of a request that stops the attempt. `reason` is a `StopReason`.

    The node sends the stop signal and SIGCONT to every process group, and SIGKILL after `grace` seconds. The node
    repeats SIGKILL until two searches in a row find no process. A repeated request may shorten the grace, but never
    lengthen it.
    """

    run: str
    node: str
    grace: float
    reason: str


@dataclass(frozen=True)
class FollowArguments:
    """The arguments of a request for the journal after event `seq`, and for the files of the run.

    The node sends each file from the file's cursor on. A cursor is an offset in bytes. A file without a cursor is sent
    from offset 0. The node sends no data of attempts below `complete_before`, because the controller has all this data.
    The node may delay a small amount of new output for up to `pace` seconds, so that fewer messages are necessary.
    """

    run: str
    node: str
    seq: int
    cursors: dict[str, int] = field(default_factory=dict)
    credit: int = INITIAL_CREDIT_BYTES
    complete_before: int = 0
    pace: float = 0.0


@cache
def _list_field_names(cls: type) -> frozenset[str]:
    # The result is cached, because readers parse every line of a journal.
    return frozenset(f.name for f in fields(cls))


def parse_dataclass(cls: type[T], value: dict[str, Any]) -> T:
    """Return an instance of `cls` with the values of a JSON object. Unknown fields are ignored.

    Raises:
        FrameError: A required field is missing.
    """
    names = _list_field_names(cls)  # type: ignore[arg-type]
    try:
        return cls(**{name: value[name] for name in names if name in value})
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error
