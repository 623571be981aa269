"""What the user asked for, after parsing: every default that needs no node filled in, every range expanded.

The spec is plain data. It is stored with the run as JSON (`pydantic.TypeAdapter(ClusterSpec)` reads it back), so an
adopting controller knows exactly what the run was started with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


class Role(str, Enum):
    """What a host is for."""

    WORKER = "worker"
    SPARE = "spare"


class TransportKind(str, Enum):
    """How a host is reached."""

    SSH = "ssh"
    LOCAL = "local"


class Framework(str, Enum):
    """Whose conventions a worker's environment follows."""

    AUTO = "auto"
    TORCH = "torch"
    KERAS = "keras"
    TENSORFLOW = "tensorflow"
    JAX = "jax"
    NONE = "none"


class Launcher(str, Enum):
    """Who starts the workers on a node."""

    DIRECT = "direct"
    TORCHRUN = "torchrun"


class StallAction(str, Enum):
    """What happens to a run that is confirmed as stalled."""

    REPORT = "report"
    STOP = "stop"
    RESTART = "restart"


class Resume(str, Enum):
    """Which checkpoints an attempt may go on from."""

    NEVER = "never"
    THIS_RUN = "this run"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One host of the cluster file, ranges expanded and defaults merged.

    Attributes:
        name: The node's name: the host, or `host.N` where one local host is listed more than once.
        host: What the user wrote (one host of a range); an ssh_config alias is fine.
        address: What SSH connects to; `None` means `host`, as `ssh -G` resolves it.
        internal_ip: What workers meet on; `None` means found by route.
        gpus: A count, indices, or `None` for what the node turns out to have.
        workers: Workers to start; `None` means one a GPU, or 1 where there is none.
        python: Interpreter for workers; `None` means found on the node.
        workdir: Where the code lies on the node; the default is filled in where a cluster file is read.
    """

    name: str
    host: str
    address: str | None = None
    internal_ip: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    gpus: int | tuple[int, ...] | None = None
    workers: int | None = None
    python: str | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    role: Role = Role.WORKER
    transport: TransportKind = TransportKind.SSH


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSpec:
    """How connections are opened. Durations in seconds."""

    host_keys: Literal["strict", "accept-new"] | None = None
    known_hosts: tuple[str, ...] = ()
    connect_timeout: float = 10.0
    parallel: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """How workers meet. `None` means found on the nodes; durations in seconds."""

    interface: str | None = None
    master_port: int | None = None
    node_lost_after: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSpec:
    """Which code goes to the nodes; `None` in its place is `sync: none`. `source` is absolute; `max_size` in bytes."""

    source: str
    exclude: tuple[str, ...] = ()
    max_size: int = 500 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where checkpoints appear, and which of them count. `pattern` is a glob relative to the workdir."""

    pattern: str | None = None
    shared: bool = False
    resume: Resume = Resume.THIS_RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What each worker runs: exactly one of `script`, `module`, `command`. Durations in seconds."""

    script: str | None = None
    module: str | None = None
    command: str | tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    prologue: str | None = None
    framework: Framework = Framework.AUTO
    launcher: Launcher = Launcher.DIRECT
    inject: bool = True
    grace: float = 10.0
    finish_grace: float = 300.0
    max_duration: float | None = None
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSpec:
    """When a new attempt is made. `on` holds of crash, stall, node_lost, unhealthy; durations in seconds."""

    max_restarts: int = 0
    on: tuple[str, ...] = ("crash", "stall", "node_lost")
    backoff: float = 10.0
    backoff_max: float = 300.0
    window: float | None = None
    never_codes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSpec:
    """When a run is stalled, in seconds; `timeout` is `None` for the default ceiling (8m with NCCL, else 25m)."""

    timeout: float | None = None
    startup_timeout: float = 1500.0
    action: StallAction = StallAction.REPORT
    watch: tuple[str, ...] = ()


INTERVAL_KEY = "during.interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSpec:
    """How findings are weighed (`docs/health.md`)."""

    expect: dict[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    severity: dict[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    thresholds: dict[str, float] = field(default_factory=dict)

    @property
    def interval(self) -> float:
        """Seconds between two looks at GPUs and machine during a run; 0 for none."""
        return float(self.thresholds.get(INTERVAL_KEY, 15.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsSpec:
    """Bounds of output files, in bytes. `max_size` is `None` for unbounded."""

    max_size: int | None = None
    reserve: int = 64 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A whole cluster file.

    Attributes:
        name: Of the file, or its folder.
        path: Absolute path of the (first) cluster file; for messages and for "the run of this file".
        hosts: In order of node rank; spares among them.
        env: For every worker; `hosts[].env` is merged over it. Secrets are not in it.
        secrets: Name to value. Never written to disk by the head, never shown.
        stop_after: Seconds after which nodes stop the run when no controller is heard; `None` keeps it.
    """

    name: str
    path: str
    hosts: tuple[HostSpec, ...]
    job: JobSpec | None
    ssh: SshSpec = field(default_factory=SshSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    sync: SyncSpec | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    restart: RestartSpec = field(default_factory=RestartSpec)
    stall: StallSpec = field(default_factory=StallSpec)
    health: HealthSpec = field(default_factory=HealthSpec)
    logs: LogsSpec = field(default_factory=LogsSpec)
    stop_after: float | None = None

    @property
    def workers(self) -> tuple[HostSpec, ...]:
        """Hosts that take part from the start, in order of node rank."""
        return tuple(h for h in self.hosts if h.role is Role.WORKER)

    @property
    def spares(self) -> tuple[HostSpec, ...]:
        """Hosts that wait to replace a lost or unhealthy node."""
        return tuple(h for h in self.hosts if h.role is Role.SPARE)
