"""The larger requests of a run to a node, as dataclasses, and the reasons for which a run is stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from clusterctl.agent.protocol.frames import INITIAL_CREDIT_BYTES


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
    """Make one node ready for one attempt. Repeating it for the same attempt answers the same.

    Attributes:
        ports: TCP ports to hold until the run's end; 0 for any free one, which is held until the next attempt.
        gpus: Device indices that the run claims on this node; empty for none.
        ranks: Ranks whose output files get reserved space.
        reserve: Bytes reserved beyond the end of each output file.
        max_size: Bytes after which the oldest replicated output is punched out; `None` for never.
        grace: Seconds between the stop signal and SIGKILL when the node stops by itself.
        stop_signal: Name of the signal that asks workers to end.
        stop_after: Seconds without a controller's frame after which the node stops the run; `None` for never.
        workdir: Folder of the code, already there; made if it is missing.
        code_hash: Of the manifest that was synced; refused where the workdir is not like it. `None` without a sync.
        python: What the user named, or `None`; the answer names the interpreter to use.
        python_hint: A path to try first where the user named none (the head's own interpreter).
        script: A file that has to be there, relative to the workdir; `None` where nothing is known of one.
        sample_seconds: Interval of activity samples.
        health_seconds: Interval of GPU and host samples; 0 turns them off.
        forked: Wire form of `Forked`; `None` where every worker starts anew.
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
class Forked:
    """How the ranks of a node are forked from one process that has imported once; see `job.start_method`.

    Attributes:
        argv: What each of them runs, the interpreter first.
        env: What all of them have in their environment, but for what only a rank is told.
        preload: Installed modules to import; `None` for torch, or numpy where there is no torch.
        secrets: Names of variables whose values come with the start.
        inject: Put our `sitecustomize` first on PYTHONPATH.
        keep: It may be wanted again, for another attempt.
        demanded: The user wants to know where it is not done.
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
    """One worker of an attempt. `argv` is executed as it is, after `prologue` (run by bash) where there is one."""

    rank: int
    local_rank: int
    argv: list[str]
    env: dict[str, str]
    prologue: str | None = None


@dataclass(frozen=True)
class Start:
    """Start the workers of a prepared attempt; all of the node at once.

    Attributes:
        workers: Wire form of `WorkerStart`.
        secrets: Merged over each worker's environment; kept on a tmpfs (0600) only while `keep_secrets`.
        keep_secrets: A later attempt may need them again.
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
    """Stop the attempt: stop signal and SIGCONT to every group, `grace` seconds, SIGKILL, sweep until empty twice.

    Repeating it may shorten the grace, never lengthen it. `reason` is one of `StopReason`.
    """

    run: str
    node: str
    grace: float
    reason: str


@dataclass(frozen=True)
class Follow:
    """Send the journal after `seq`, and each file of the run from its cursor (bytes; 0 where none is named).

    Of attempts before number `whole` everything was received: nothing of their files is sent. Where little is new of
    files, it may wait until `pace` seconds after what was sent before it: one message instead of many.
    """

    run: str
    node: str
    seq: int
    cursors: dict[str, int] = field(default_factory=dict)
    credit: int = INITIAL_CREDIT_BYTES
    complete_before: int = 0
    pace: float = 0.0
