"""The spec: a parsed cluster file, with every default that needs no node filled in, and every range expanded.

Each key of a section is declared here and nowhere else: its type, its default and its examples as an annotation, its
sentence in the docstring of the class. The validation of files (`clusterctl.config.sections`), `clusterctl config`, the
JSON Schema and the tables of docs/cluster-file.md are made from these declarations, so the annotations are evaluated. A
field without a `KeyDocs` is not a key of the file. Durations are in seconds, sizes in bytes. `dump_spec` returns the
JSON that is stored with the run, for an adopting controller.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from clusterctl.config.field_types import (
    Args,
    Command,
    ConnectionCount,
    Duration,
    DurationOrAuto,
    DurationOrNone,
    Env,
    ExitCodes,
    FieldType,
    Gpus,
    Interface,
    Interpreter,
    KeyDocs,
    Port,
    PortOrAuto,
    PositiveDuration,
    RestartCauses,
    RestartCount,
    ResultsFetchCondition,
    ResumePolicy,
    Severities,
    Size,
    SizeOrNone,
    SizeOrZero,
    SshFile,
    SshFiles,
    SshHops,
    SshUser,
    SshWord,
    StallAction,
    StartMethod,
    StopSignal,
    Texts,
    Workers,
    build_transport_type,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class Role(str, Enum):
    """The role of a host."""

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


_SSH_DEFAULT = "what `ssh -G host` says"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A host, or a range of hosts that are alike.

    Here ranges are expanded and defaults are merged. `None` stands for what is found when the host is reached.

    Attributes:
        name: The node's name: the host, or `host.N` if a local host is listed more than once.
        host: Host, ssh alias or range.
        address: Address that SSH connects to.
        internal_ip: Address that workers meet on.
        user: User to log in as.
        port: Port of sshd.
        identity_file: Private key.
        proxy_jump: Hosts to connect through, as for ssh's ProxyJump.
        gpus: GPUs: a count, a list of indices, or `auto` for all (default).
        workers: Training processes.
        python: Python that runs the workers.
        workdir: Folder of the code on the node.
        env: Environment of this host's workers, merged over `env`.
        role: `spare` waits to replace a lost node.
        transport: `local` starts processes on the head, without SSH; `command` opens a shell on the host.
    """

    name: str
    host: Annotated[str, KeyDocs("gpu01", "gpu[01-04,07]")]
    address: Annotated[SshWord | None, KeyDocs("203.0.113.9", unset_text="`host`, as ssh resolves it")] = None
    internal_ip: Annotated[SshWord | None, KeyDocs("10.0.0.9", unset_text="found by route")] = None
    user: Annotated[SshUser | None, KeyDocs("ubuntu", unset_text=_SSH_DEFAULT)] = None
    port: Annotated[Port | None, KeyDocs(22, 2222, unset_text=_SSH_DEFAULT)] = None
    identity_file: Annotated[SshFile | None, KeyDocs("~/.ssh/id_ed25519", unset_text=_SSH_DEFAULT)] = None
    proxy_jump: Annotated[SshHops | None, KeyDocs("bastion.example.com")] = None
    gpus: Annotated[Gpus, KeyDocs(8, [0, 2], "auto")] = None
    workers: Annotated[Workers, KeyDocs(2, unset_text="one a GPU, or 1 without any")] = None
    python: Annotated[
        Interpreter | None, KeyDocs(".venv/bin/python", unset_text="found on the node, shown in the plan")
    ] = None
    workdir: Annotated[str | None, KeyDocs("~/work/llm", unset_text="one of clusterctl's own")] = None
    env: Annotated[Env, KeyDocs({"NCCL_IB_HCA": "mlx5_0"})] = field(default_factory=dict)
    role: Annotated[Role, KeyDocs("spare")] = Role.WORKER
    transport: Annotated[
        TransportKind | tuple[str, ...],
        build_transport_type(TransportKind),
        KeyDocs("local", {"command": ["docker", "exec", "-i", "{host}", "/bin/sh"]}),
    ] = TransportKind.SSH


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSpec:
    """How connections are opened.

    Attributes:
        client: SSH client: `openssh` is your own `ssh`; `auto` uses it if the built-in client cannot log in.
        host_keys: Whether unknown host keys are refused or accepted.
        known_hosts: Files of known host keys, read beside the user's own.
        connect_timeout: Longest wait for a connection.
        parallel: Connections opened at once.
    """

    client: Annotated[Literal["auto", "builtin", "openssh"], KeyDocs("openssh")] = "auto"
    host_keys: Annotated[Literal["strict", "accept-new"] | None, KeyDocs("strict", unset_text="`strict`")] = None
    known_hosts: Annotated[SshFiles, KeyDocs(["known_hosts"])] = ()
    connect_timeout: Annotated[PositiveDuration, KeyDocs("10s")] = 10.0
    parallel: Annotated[ConnectionCount, KeyDocs(64)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """How workers meet.

    Attributes:
        interface: Network interface on every node, or `auto` (default): the one that routes.
        master_port: Port of rank 0, or `auto` (default): fresh for each attempt.
        node_lost_after: Silence after which a node counts as lost.
    """

    interface: Annotated[Interface, KeyDocs("auto", "eth1")] = None
    master_port: Annotated[PortOrAuto, KeyDocs("auto", 29500)] = None
    node_lost_after: Annotated[PositiveDuration, KeyDocs("2m")] = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSpec:
    """Which code goes to the nodes.

    `None` in its place is `sync: none`. Here `source` is absolute.

    Attributes:
        source: Folder to send, relative to the cluster file.
        exclude: Patterns to leave out, as in .gitignore; they win over every .gitignore.
        max_size: Largest size to send; a larger folder is refused.
    """

    source: Annotated[str, KeyDocs(".", "src", unset_text="the file's own")]
    exclude: Annotated[Texts, KeyDocs(["data/", "*.ckpt"])] = ()
    max_size: Annotated[Size, KeyDocs("500MiB")] = 500 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Where checkpoints appear.

    Attributes:
        pattern: Glob of checkpoints, relative to the workdir.
        shared: Whether all nodes see the same files.
        resume: Which checkpoints an attempt resumes from: those of `this run` (default), `any`, also in the first
            attempt, or `never`.
    """

    pattern: Annotated[str | None, KeyDocs("ckpt/step-*")] = None
    shared: Annotated[bool, KeyDocs(True)] = False
    resume: Annotated[ResumePolicy, KeyDocs("any")] = ResumePolicy.THIS_RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What each worker runs: exactly one of `script`, `module`, `command`.

    Attributes:
        script: Python file, relative to the synced folder; an absolute path names a file of the nodes.
        module: Python module, as for `python -m`.
        command: A text for bash, which ends if one of its commands fails; or program and arguments (list).
        args: Arguments; those after `--` of `up` are appended.
        prologue: Text for bash that runs before each worker; the worker ends if a command of the text fails.
        framework: Framework whose environment variables workers get.
        start_method: `spawn` starts each worker afresh; `fork` and `auto` fork the workers from one process per node.
        preload: Installed libraries that a node imports once if it forks its workers; never your own code.
        inject: Whether clusterctl observes progress from inside the workers.
        grace: Time between the stop signal and SIGKILL.
        stop_signal: Signal that asks workers to end; `SIGINT` raises KeyboardInterrupt in Python.
        finish_grace: Longest wait without activity once some ranks have ended.
        max_duration: Longest duration of the run.
        checkpoint: Where checkpoints appear.
    """

    script: Annotated[str | None, KeyDocs("train.py")] = None
    module: Annotated[str | None, KeyDocs("llm.train")] = None
    command: Annotated[Command, KeyDocs("./run.sh", ["./train", "--fast"])] = None
    args: Annotated[Args, KeyDocs(["--epochs", 3])] = ()
    prologue: Annotated[str | None, KeyDocs("module load cuda")] = None
    framework: Annotated[Framework, KeyDocs("torch")] = Framework.AUTO
    start_method: Annotated[StartMethod, KeyDocs("fork")] = StartMethod.SPAWN
    preload: Annotated[Texts | None, KeyDocs(["torch", "keras"], unset_text="those of `job.framework`")] = None
    inject: Annotated[bool, KeyDocs(False)] = True
    grace: Annotated[Duration, KeyDocs("10s")] = 10.0
    stop_signal: Annotated[StopSignal, KeyDocs("SIGINT")] = "SIGTERM"
    finish_grace: Annotated[Duration, KeyDocs("5m")] = 300.0
    max_duration: Annotated[DurationOrNone, KeyDocs("72h", "none")] = None
    checkpoint: Annotated[CheckpointSpec, KeyDocs({"pattern": "ckpt/step-*", "shared": True})] = field(
        default_factory=CheckpointSpec
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSpec:
    """When clusterctl starts a new attempt of a run.

    Attributes:
        max_restarts: Attempts after the first.
        on: Failures that cause a new attempt.
        backoff: Pause before the first restart, doubled up to 5m.
        window: Period in which restarts count.
        never_codes: Exit codes that end the run at once.
    """

    max_restarts: Annotated[RestartCount, KeyDocs(3)] = 0
    on: Annotated[RestartCauses, KeyDocs(["crash", "node_lost"])] = (
        "crash",
        "stall",
        "node_lost",
    )
    backoff: Annotated[Duration, KeyDocs("10s", 0)] = 10.0
    backoff_max: float = 300.0
    window: Annotated[DurationOrNone, KeyDocs("6h", "none", unset_text="`none`, all of them")] = None
    never_codes: Annotated[ExitCodes, KeyDocs([2, 78])] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSpec:
    """When a run counts as stalled, and what happens then.

    Attributes:
        timeout: Time without activity after which a run is stalled.
        startup_timeout: The same, before the first step.
        busy_timeout: Time without progress after which a run is stalled although some ranks print or compute, if
            others wait for them in a collective.
        action: Reaction to a stalled run.
        watch: Globs of files whose growth is activity, relative to the workdir.
    """

    timeout: Annotated[DurationOrAuto, KeyDocs("15m", "auto", unset_text="`auto`, 8m with NCCL and 25m else")] = None
    startup_timeout: Annotated[PositiveDuration, KeyDocs("40m")] = 1500.0
    busy_timeout: Annotated[
        DurationOrAuto,
        KeyDocs("1h", "auto", unset_text="`auto`, 3 × `timeout`, at most its default or `timeout` itself"),
    ] = None
    action: Annotated[StallAction, KeyDocs("restart")] = StallAction.REPORT
    watch: Annotated[Texts, KeyDocs(["ckpt/**"])] = ()


SAMPLING_INTERVAL_KEY = "during.interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSpec:
    """The severity of findings; docs/health.md lists the checks.

    Attributes:
        expect: Properties that nodes must have.
        ignore: Checks to ignore, everywhere or `check@node`.
        severity: Severity of a check's findings, in place of its own.
        required: Checks whose UNKNOWN counts as FAIL.
        thresholds: Limits of a check, in place of its own.
    """

    expect: Annotated[dict[str, Any], KeyDocs({"gpu_model": "NVIDIA H100*", "driver": "570.*"})] = field(
        default_factory=dict
    )
    ignore: Annotated[Texts, KeyDocs(["host.governor"])] = ()
    severity: Annotated[Severities, KeyDocs({"xid.31": "ignore"})] = field(default_factory=dict)
    required: Annotated[Texts, KeyDocs(["gpu.count"])] = ()
    thresholds: Annotated[dict[str, float], KeyDocs({"host.disk.warn": 20})] = field(default_factory=dict)

    @property
    def sampling_interval(self) -> float:
        """Seconds between two samples of GPUs and machine during a run; 0 for none."""
        return float(self.thresholds.get(SAMPLING_INTERVAL_KEY, 15.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsSpec:
    """Bounds of workers' output files on the nodes.

    Attributes:
        max_size: Longest output file; older replicated bytes go first.
        reserve: Disk space reserved for output.
    """

    max_size: Annotated[SizeOrNone, KeyDocs("10GiB", "none")] = None
    reserve: Annotated[SizeOrZero, KeyDocs("64MiB")] = 64 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsSpec:
    """Files that the controller fetches from the nodes at the end of a run. Here `to` is absolute.

    Attributes:
        patterns: Files and folders, relative to the workdir.
        to: Folder with a subfolder for each run, relative to the cluster file.
        when: Ends of a run after which files are fetched.
        max_size: Largest size that a node may send.
    """

    patterns: Annotated[Texts, KeyDocs(["ckpt/best*", "metrics.json"])]
    to: Annotated[str, KeyDocs("~/results", unset_text="`results`, beside the file")]
    when: Annotated[ResultsFetchCondition, KeyDocs("always")] = ResultsFetchCondition.SUCCESS
    max_size: Annotated[Size, KeyDocs("10GiB")] = 10 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSpec:
    """The source of a secret's value: exactly one of the two.

    Attributes:
        env: Environment variable of the head.
        file: File on the head with the value.
    """

    env: Annotated[str | None, KeyDocs("HF_TOKEN")] = None
    file: Annotated[str | None, KeyDocs("~/.secrets/hf")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLossSpec:
    """What nodes do without a controller.

    Attributes:
        stop_after: Stop the run after this silence.
    """

    stop_after: Annotated[PositiveDuration, KeyDocs("10m")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A clusterctl cluster file: machines, and what to run on them.

    Here `hosts` has all hosts in order of node rank, with the spares. `secrets` has their values, which are never
    written to disk by the head and never shown. `path` is the absolute path of the (first) cluster file. `min_nodes` is
    the number of workers with which a run may begin (`up --min-nodes`); `None` stands for all.

    Attributes:
        name: Name of the runs.
        hosts: Machines, in order of node rank: text, a mapping of host to GPUs, or a list.
        ssh: How connections are opened.
        network: How workers meet.
        sync: Which code goes to the nodes, or `none`.
        env: Environment of all workers.
        secrets: Values that clusterctl never shows or stores.
        job: What each worker runs.
        results: Files to fetch from the nodes at the end of a run.
        restart: When clusterctl starts a new attempt of a run.
        on_controller_loss: `keep` the run (default), or stop it after a time.
        stall: When a run counts as stalled.
        health: The severity of findings.
        logs: Bounds of output files.
    """

    name: Annotated[str, KeyDocs("llm-pretrain", unset_text="the file's folder")]
    path: str
    hosts: Annotated[
        tuple[HostSpec, ...],
        FieldType(syntax="text, mapping or list"),
        KeyDocs("gpu[01-04]", {"gpu[01-02]": 8}, [{"host": "gpu01", "gpus": 8}]),
    ]
    ssh: Annotated[SshSpec, KeyDocs({"connect_timeout": "10s"})] = field(default_factory=SshSpec)
    network: Annotated[NetworkSpec, KeyDocs({"interface": "eth1"})] = field(default_factory=NetworkSpec)
    sync: Annotated[
        SyncSpec | None,
        FieldType(none_word="none"),
        KeyDocs({"exclude": ["data/"]}, "none", unset_text="the file's folder"),
    ] = None
    env: Annotated[Env, KeyDocs({"HF_HOME": "/scratch/hf"})] = field(default_factory=dict)
    secrets: Annotated[dict[str, str], KeyDocs({"HF_TOKEN": {"env": "HF_TOKEN"}, "KEY": {"file": "~/.key"}})] = field(
        default_factory=dict
    )
    job: Annotated[
        JobSpec | None,
        KeyDocs(
            {"script": "train.py", "args": ["--epochs", 3]}, unset_text="what `--script` and the like of `up` name"
        ),
    ]
    results: Annotated[
        ResultsSpec | None,
        FieldType(syntax="text, list of texts, or mapping"),
        KeyDocs(["ckpt/best*", "metrics.json"], {"patterns": ["ckpt/best*"], "when": "always"}),
    ] = None
    restart: Annotated[RestartSpec, KeyDocs({"max_restarts": 3})] = field(default_factory=RestartSpec)
    on_controller_loss: Annotated[
        ControllerLossSpec | None, FieldType(none_word="keep"), KeyDocs("keep", {"stop_after": "10m"})
    ] = None
    stall: Annotated[StallSpec, KeyDocs({"timeout": "15m", "action": "restart"})] = field(default_factory=StallSpec)
    health: Annotated[HealthSpec, KeyDocs({"ignore": ["host.governor"]})] = field(default_factory=HealthSpec)
    logs: Annotated[LogsSpec, KeyDocs({"max_size": "10GiB"})] = field(default_factory=LogsSpec)
    min_nodes: int | None = None

    @property
    def stop_after_controller_loss(self) -> float | None:
        """Seconds without a controller after which nodes stop the run; `None` keeps it."""
        return None if self.on_controller_loss is None else self.on_controller_loss.stop_after

    @property
    def worker_hosts(self) -> tuple[HostSpec, ...]:
        """Hosts that take part from the start, in order of node rank."""
        return tuple(h for h in self.hosts if h.role is Role.WORKER)

    @property
    def spare_hosts(self) -> tuple[HostSpec, ...]:
        """Hosts that wait to replace a lost or unhealthy node."""
        return tuple(h for h in self.hosts if h.role is Role.SPARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOnlySpec:
    """Keys of a cluster file that the spec does not hold.

    Attributes:
        version: Version of the format.
        env_file: Files of NAME=value lines; `env` wins over them.
    """

    version: Annotated[Literal[1], KeyDocs(1)]
    env_file: Annotated[Texts, KeyDocs([".env"])] = ()


def dump_spec(spec: ClusterSpec) -> str:
    """Return a spec as one line of JSON; it keeps the names of secrets, with empty values."""
    public = replace(spec, secrets=dict.fromkeys(spec.secrets, ""))
    return json.dumps(asdict(public), separators=(",", ":"))


def load_spec(text: str) -> ClusterSpec:
    """Return the spec that this or an earlier version dumped; missing keys have their defaults.

    Raises:
        ValueError: The text is not a stored spec.
    """
    return _adapter().validate_json(text)


@cache
def _adapter() -> "TypeAdapter[ClusterSpec]":
    from pydantic import TypeAdapter

    return TypeAdapter(ClusterSpec)
