"""The spec: a parsed cluster file with expanded ranges, and with all defaults that do not depend on a node.

Each key of a section is declared only here. The field of a key has the type, the default and the examples; the
docstring of the class describes the key. `clusterctl.config.sections`, `clusterctl config`, the JSON Schema and the
tables of docs/cluster-file.md use these declarations at run time. A field without `KeyDocs` is not a key of the file.
Durations are in seconds, sizes in bytes. `dump_spec` returns the JSON that each run stores for a controller that adopts
the run.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from clusterctl.config.field_types import (
    Args,
    AvoidedNodes,
    Command,
    ConnectionCount,
    Duration,
    DurationOrAuto,
    DurationOrNone,
    Env,
    ExitCodes,
    FieldType,
    Gpus,
    IdleAction,
    Interface,
    Interpreter,
    KeyDocs,
    MessageCount,
    MessageEvents,
    NodeCount,
    NodeCounts,
    Port,
    PortOrAuto,
    PositiveDuration,
    PythonVersion,
    RestartCauses,
    RestartCount,
    ResultsFetchCondition,
    ResumePolicy,
    SecretSource,
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
    """What a host does in a run: work, or wait to replace another host."""

    WORKER = "worker"
    SPARE = "spare"


class TransportKind(str, Enum):
    """How clusterctl reaches a host."""

    SSH = "ssh"
    LOCAL = "local"


class Framework(str, Enum):
    """The framework that determines which environment variables workers get."""

    AUTO = "auto"
    TORCH = "torch"
    KERAS = "keras"
    TENSORFLOW = "tensorflow"
    JAX = "jax"
    NONE = "none"


_SSH_DEFAULT = "value of `ssh -G host`"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A host, or a range of equal hosts.

    In the spec, ranges are expanded and `defaults` are merged. `None` means that the node determines the value.

    Attributes:
        name: Name of the node: `host`, or `host.N` if the file lists a local host more than once.
        job_role: The role of `job.roles` that runs on the host (`clusterctl.plan.roles` chooses it); "" without roles.
        host: Host name, ssh alias or range.
        address: Address for SSH connections.
        internal_ip: Address for the network between workers.
        user: User for the login.
        port: Port of sshd.
        identity_file: Private key.
        proxy_jump: Jump hosts, as in ProxyJump of ssh.
        gpus: GPUs to use: a count, a list of indices, or `auto` for all (default).
        workers: Number of training processes.
        python: Python that runs the workers.
        workdir: Folder of the code on the node.
        env: Environment variables of this host's workers; they win over `env` of the file.
        role: `worker` runs workers; `spare` waits to replace a lost node.
        transport: `ssh`; `local` starts processes on the head; `command` is a command that opens a shell on the host.
    """

    name: str
    job_role: str = ""
    host: Annotated[str, KeyDocs("gpu01", "gpu[01-04,07]")]
    address: Annotated[SshWord | None, KeyDocs("203.0.113.9", unset_text="`host`, as ssh resolves it")] = None
    internal_ip: Annotated[SshWord | None, KeyDocs("10.0.0.9", unset_text="found by the route between nodes")] = None
    user: Annotated[SshUser | None, KeyDocs("ubuntu", unset_text=_SSH_DEFAULT)] = None
    port: Annotated[Port | None, KeyDocs(22, 2222, unset_text=_SSH_DEFAULT)] = None
    identity_file: Annotated[SshFile | None, KeyDocs("~/.ssh/id_ed25519", unset_text=_SSH_DEFAULT)] = None
    proxy_jump: Annotated[SshHops | None, KeyDocs("bastion.example.com")] = None
    gpus: Annotated[Gpus, KeyDocs(8, [0, 2], "auto")] = None
    workers: Annotated[Workers, KeyDocs(2, unset_text="one for each GPU, 1 without GPUs")] = None
    python: Annotated[Interpreter | None, KeyDocs(".venv/bin/python", unset_text="chosen on the node")] = None
    workdir: Annotated[str | None, KeyDocs("~/work/llm", unset_text="chosen by clusterctl")] = None
    env: Annotated[Env, KeyDocs({"NCCL_IB_HCA": "mlx5_0"})] = field(default_factory=dict)
    role: Annotated[Role, KeyDocs("spare")] = Role.WORKER
    transport: Annotated[
        TransportKind | tuple[str, ...],
        build_transport_type(TransportKind),
        KeyDocs("local", {"command": ["docker", "exec", "-i", "{host}", "/bin/sh"]}),
    ] = TransportKind.SSH


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSpec:
    """How clusterctl opens SSH connections.

    Attributes:
        client: SSH client: `openssh` is your `ssh` program; `auto` uses `openssh` if the built-in client cannot log in.
        host_keys: Unknown host keys: `strict` refuses them, `accept-new` accepts and stores them.
        known_hosts: Files with known host keys, in addition to those of ssh_config.
        connect_timeout: Time limit for opening a connection.
        parallel: Largest number of connections that are opened at the same time.
    """

    client: Annotated[Literal["auto", "builtin", "openssh"], KeyDocs("openssh")] = "auto"
    host_keys: Annotated[Literal["strict", "accept-new"] | None, KeyDocs("strict", unset_text="`strict`")] = None
    known_hosts: Annotated[SshFiles, KeyDocs(["known_hosts"])] = ()
    connect_timeout: Annotated[PositiveDuration, KeyDocs("10s")] = 10.0
    parallel: Annotated[ConnectionCount, KeyDocs(64)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The network between workers.

    Attributes:
        interface: Network interface on every node; `auto` (default) is the interface of the route between nodes.
        master_port: Port on rank 0 at which workers meet; `auto` (default) takes a free port for each attempt.
        node_lost_after: A node counts as lost if the controller hears nothing from it for this time.
    """

    interface: Annotated[Interface, KeyDocs("auto", "eth1")] = None
    master_port: Annotated[PortOrAuto, KeyDocs("auto", 29500)] = None
    node_lost_after: Annotated[PositiveDuration, KeyDocs("2m")] = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSpec:
    """The code that is copied to the nodes.

    `sync: none` is `None` in the spec. `source` is an absolute path in the spec.

    Attributes:
        source: Folder to copy, relative to the cluster file.
        exclude: Patterns of files not to copy, as in .gitignore; they win over every .gitignore.
        max_size: `up` refuses to copy more than this size.
    """

    source: Annotated[str, KeyDocs(".", "src", unset_text="folder of the cluster file")]
    exclude: Annotated[Texts, KeyDocs(["data/", "*.ckpt"])] = ()
    max_size: Annotated[Size, KeyDocs("500MiB")] = 500 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """The container in whose files the workers run: one for each node and run. Processes and network are the node's.

    Attributes:
        image: Name of the image; for apptainer also a file on the nodes.
        runtime: The program that starts containers; `auto` is the first of docker, podman, apptainer that answers.
        args: More options for `docker run`, `podman run` or `apptainer exec`; limits of resources have no effect.
        mounts: Folders of the node that the container shows, too, such as `/data` or `~/sets:/data:ro`.
    """

    image: Annotated[str, KeyDocs("nvcr.io/nvidia/pytorch:26.09-py3")]
    runtime: Annotated[Literal["docker", "podman", "apptainer", "auto"], KeyDocs("podman")] = "auto"
    args: Annotated[Args, KeyDocs(["--security-opt", "seccomp=unconfined"])] = ()
    mounts: Annotated[Texts, KeyDocs(["/data"])] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """The Python environment of the workers, made once on each node: from `uv` or `venv`, or the image of `container`.

    `uv` and `venv` are absolute paths in the spec.

    Attributes:
        uv: Folder with `uv.lock` or `requirements.txt`, or a requirements file.
        extras: Optional dependencies of the project in `uv.lock` to install, too.
        venv: A virtual environment, or conda environment, of the head to copy to the nodes.
        container: A container image.
        python: Version of Python.
        fetch: Who downloads: `head` for all nodes, each `node`, or `auto`: nodes that can.
        max_size: Largest size of all environments and packages on a node; the oldest unused ones are removed.
    """

    uv: Annotated[str | None, KeyDocs(".", "requirements.txt")] = None
    extras: Annotated[Texts, KeyDocs(["cu126"])] = ()
    venv: Annotated[str | None, KeyDocs(".venv")] = None
    python: Annotated[
        PythonVersion | None, KeyDocs("3.11", unset_text="the version in `.python-version`, or the head's")
    ] = None
    container: Annotated[ContainerSpec | None, KeyDocs({"image": "nvcr.io/nvidia/pytorch:26.09-py3"})] = None
    fetch: Annotated[
        Literal["head", "node", "auto"] | None, KeyDocs("node", unset_text="`head`; with `container` `auto`")
    ] = None
    max_size: Annotated[Size, KeyDocs("100GiB")] = 50 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """The job's checkpoints.

    Attributes:
        pattern: Glob pattern of checkpoints: absolute, from `~` on the node, or relative to the workdir.
        shared: Whether the checkpoints lie on storage that all nodes share.
        resume: Checkpoints to resume from: `this run` (default): only checkpoints of this run; `any`: also older ones,
            already in the first attempt; `never`: none.
    """

    pattern: Annotated[str | None, KeyDocs("ckpt/step-*")] = None
    shared: Annotated[bool, KeyDocs(True)] = False
    resume: Annotated[ResumePolicy, KeyDocs("any")] = ResumePolicy.THIS_RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySpec:
    """When the roles that need a role may start: the port accepts a connection, and the output has the text.

    Attributes:
        port: Port of the server on the first node of the role; it must be free before the start.
        http: Path on this port that must answer a GET with a status below 400.
        output: Text that a line of the role's first rank must contain.
        within: Time limit after the start of the role.
    """

    port: Annotated[Port | None, KeyDocs(8000)] = None
    http: Annotated[str | None, KeyDocs("/health")] = None
    output: Annotated[str | None, KeyDocs("startup complete")] = None
    within: Annotated[PositiveDuration, KeyDocs("20m")] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A part of the job with nodes of its own: exactly one of `script`, `module`, `command`.

    Attributes:
        script: Python file, as `job.script`.
        module: Python module, as `job.module`.
        command: Text for bash or a list, as `job.command`.
        args: Arguments of the program.
        nodes: Number of nodes; one role without `nodes` and `hosts` takes all others.
        hosts: Names of its nodes, in place of `nodes`.
        workers: Number of processes on each node, in place of that of the hosts.
        env: Environment variables of the role; they win over `env` of the file.
        needs: Roles that must be ready before this role starts. They are stopped when all other roles have ended.
        ready: When the roles that need this one may start; by default as soon as its processes have started.
    """

    script: Annotated[str | None, KeyDocs("train.py")] = None
    module: Annotated[str | None, KeyDocs("llm.train")] = None
    command: Annotated[Command, KeyDocs("./serve.sh", ["./serve", "--fast"])] = None
    args: Annotated[Args, KeyDocs(["--epochs", 3])] = ()
    nodes: Annotated[NodeCount | None, KeyDocs(1)] = None
    hosts: Annotated[Texts, KeyDocs(["gpu04"])] = ()
    workers: Annotated[Workers, KeyDocs(1, unset_text="as the hosts say")] = None
    env: Annotated[Env, KeyDocs({"VLLM_LOGGING_LEVEL": "INFO"})] = field(default_factory=dict)
    needs: Annotated[Texts, KeyDocs(["server"])] = ()
    ready: Annotated[ReadySpec | None, KeyDocs({"port": 8000, "http": "/health"})] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The program of the workers: exactly one of `script`, `module`, `command`, `roles`.

    Attributes:
        script: Python file, relative to `sync.source`; an absolute path is a path on the nodes.
        module: Python module to run as with `python -m`.
        command: Text for bash that ends at the first failing command, or a list: program and arguments.
        args: Arguments of the program; `up` appends its arguments after `--`.
        roles: Several programs on different nodes of one run, by name.
        nodes: Number of hosts that run workers: the reachable, healthy and free ones first, in the order of the file.
            The others become spares. `A..B` needs A hosts and uses up to B.
        setup: Text for bash that runs once on each node before all workers; it runs again if the text changes.
        setup_limit: Time limit of `setup`.
        cache: Whether compiled code and downloads are kept on a disk of each node between runs; `node` keeps them.
        prologue: Text for bash that runs before each worker; if one of its commands fails, the worker fails.
        framework: Framework whose environment variables the workers get.
        start_method: `spawn` starts a Python for each worker; `fork` and `auto` fork a node's workers from one process.
        preload: Installed libraries to import once before workers are forked; your own code is not allowed.
        inject: Whether clusterctl observes progress inside the worker processes.
        grace: Time between stop signal and SIGKILL.
        stop_signal: Signal that asks workers to end; `SIGINT` raises KeyboardInterrupt in Python.
        finish_grace: Time limit without activity after some ranks have ended.
        max_duration: Time limit of the run.
        checkpoint: The job's checkpoints.
    """

    script: Annotated[str | None, KeyDocs("train.py")] = None
    module: Annotated[str | None, KeyDocs("llm.train")] = None
    command: Annotated[Command, KeyDocs("./run.sh", ["./train", "--fast"])] = None
    args: Annotated[Args, KeyDocs(["--epochs", 3])] = ()
    roles: Annotated[
        dict[str, RoleSpec],
        KeyDocs({"trainer": {"script": "train.py", "needs": ["server"]}, "server": {"command": "./serve", "nodes": 1}}),
    ] = field(default_factory=dict)
    nodes: Annotated[NodeCounts | None, KeyDocs(2, "2..4", unset_text="all hosts that are not spares")] = None
    setup: Annotated[str | None, KeyDocs("make -C csrc")] = None
    setup_limit: Annotated[PositiveDuration, KeyDocs("1h")] = 1800.0
    cache: Annotated[
        Literal["node", "none"] | None, KeyDocs("node", "none", unset_text="`node` with `environment`")
    ] = None
    prologue: Annotated[str | None, KeyDocs("module load cuda")] = None
    framework: Annotated[Framework, KeyDocs("torch")] = Framework.AUTO
    start_method: Annotated[StartMethod, KeyDocs("fork")] = StartMethod.SPAWN
    preload: Annotated[Texts | None, KeyDocs(["torch", "keras"], unset_text="the libraries of `job.framework`")] = None
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
        max_restarts: Largest number of attempts after the first one.
        on: Failures that cause a new attempt.
        backoff: Pause before the first restart; the pause doubles with each restart up to 5m.
        window: Only restarts within this last period count towards `max_restarts`.
        never_codes: Exit codes after which the run ends without a restart.
        avoid: Nodes that are taken last as spares and by `job.nodes`, such as machines that failed twice in a week.
    """

    max_restarts: Annotated[RestartCount, KeyDocs(3)] = 0
    on: Annotated[RestartCauses, KeyDocs(["crash", "node_lost"])] = (
        "crash",
        "stall",
        "node_lost",
    )
    backoff: Annotated[Duration, KeyDocs("10s", 0)] = 10.0
    backoff_max: float = 300.0
    window: Annotated[DurationOrNone, KeyDocs("6h", "none", unset_text="`none`: all restarts count")] = None
    never_codes: Annotated[ExitCodes, KeyDocs([2, 78])] = ()
    avoid: Annotated[AvoidedNodes, KeyDocs("repeat_offenders")] = AvoidedNodes.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSpec:
    """When a run counts as stalled, and how clusterctl reacts.

    Attributes:
        timeout: A run is stalled after this time without activity.
        startup_timeout: A run is stalled after this time without activity before the first training step.
        busy_timeout: A run in which some ranks wait for others in a collective is stalled after this time without
            progress, even if the others print or compute.
        action: Reaction to a stall.
        watch: Glob patterns of files relative to the workdir; a growing file counts as activity.
    """

    timeout: Annotated[DurationOrAuto, KeyDocs("15m", "auto", unset_text="`auto`: 8m with NCCL, otherwise 25m")] = None
    startup_timeout: Annotated[PositiveDuration, KeyDocs("40m")] = 1500.0
    busy_timeout: Annotated[
        DurationOrAuto,
        KeyDocs("1h", "auto", unset_text="`auto`: 3 × `timeout`, at most the larger of `timeout` and its default"),
    ] = None
    action: Annotated[StallAction, KeyDocs("restart")] = StallAction.REPORT
    watch: Annotated[Texts, KeyDocs(["ckpt/**"])] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSpec:
    """When the GPUs of a run count as idle, and how clusterctl reacts.

    Attributes:
        after: A run is idle if none of its GPUs has done anything for this time; `none`: clusterctl does not watch.
        action: Reaction to an idle run.
    """

    after: Annotated[DurationOrNone, KeyDocs("30m", "none")] = None
    action: Annotated[IdleAction, KeyDocs("end")] = IdleAction.REPORT


MIN_IDLE_SAMPLES = 4
"""The fewest samples of GPUs in the time after which a run counts as idle."""
SAMPLING_INTERVAL_KEY = "during.interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSpec:
    """Settings of health checks; docs/health.md lists the checks.

    Attributes:
        expect: Required properties of the nodes, such as the GPU model.
        ignore: Checks to ignore on all nodes, or on one node as `check@node`.
        severity: Severity of the findings of a check, in place of its default.
        required: Checks for which the result UNKNOWN counts as FAIL.
        thresholds: Limits of a check, in place of its defaults.
        deep: When `up` also measures the nodes under load: `before_start`, or `nightly` if the last deep check of the
            nodes is older than a day.
    """

    expect: Annotated[dict[str, Any], KeyDocs({"gpu_model": "NVIDIA H100*", "driver": "570.*"})] = field(
        default_factory=dict
    )
    ignore: Annotated[Texts, KeyDocs(["host.governor"])] = ()
    severity: Annotated[Severities, KeyDocs({"xid.31": "ignore"})] = field(default_factory=dict)
    required: Annotated[Texts, KeyDocs(["gpu.count"])] = ()
    thresholds: Annotated[dict[str, float], KeyDocs({"host.disk.warn": 20})] = field(default_factory=dict)
    deep: Annotated[
        Literal["before_start", "nightly"] | None, KeyDocs("before_start", "nightly", unset_text="never")
    ] = None

    @property
    def sampling_interval(self) -> float:
        """Seconds between two samples of GPUs and machine during a run; 0 if no samples are taken."""
        return float(self.thresholds.get(SAMPLING_INTERVAL_KEY, 15.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsSpec:
    """Size limits of the workers' output files on the nodes.

    Attributes:
        max_size: Largest size of an output file; beyond it, the oldest bytes that the head already has are dropped.
        reserve: Disk space that each output file reserves in advance.
    """

    max_size: Annotated[SizeOrNone, KeyDocs("10GiB", "none")] = None
    reserve: Annotated[SizeOrZero, KeyDocs("64MiB")] = 64 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsSpec:
    """Files that the controller fetches from the nodes at the end of a run. `to` is an absolute path in the spec.

    Attributes:
        patterns: Glob patterns of files and folders, relative to the workdir.
        to: Local target folder, relative to the cluster file; each run gets a subfolder.
        when: `success` fetches after a successful run only, `always` after every run.
        max_size: Largest total size of the files of one node.
    """

    patterns: Annotated[Texts, KeyDocs(["ckpt/best*", "metrics.json"])]
    to: Annotated[str, KeyDocs("~/results", unset_text="`results`")]
    when: Annotated[ResultsFetchCondition, KeyDocs("always")] = ResultsFetchCondition.SUCCESS
    max_size: Annotated[Size, KeyDocs("10GiB")] = 10 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSpec:
    """The source of a secret's value: exactly one of `env` and `file`.

    Attributes:
        env: Environment variable of the head.
        file: File on the head that contains the value.
    """

    env: Annotated[str | None, KeyDocs("HF_TOKEN")] = None
    file: Annotated[str | None, KeyDocs("~/.secrets/hf")] = None


_ADDRESS = KeyDocs({"file": "~/.secrets/hook"}, {"env": "HOOK_URL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySpec:
    """Where the controller sends messages about a run. A URL is a secret, so the file names only its source.

    Attributes:
        on: Events that cause a message.
        slack: Incoming webhook of Slack.
        discord: Webhook of a channel of Discord.
        teams: Webhook of a workflow of Microsoft Teams.
        ntfy: Topic of an ntfy server, such as `https://ntfy.sh/TOPIC`.
        webhook: URL that gets each message as a JSON object.
        apprise: URL of any service of apprise, which `pip install apprise` installs.
        command: Program of the head and its arguments; it starts in the folder of the cluster file.
        max_per_minute: Largest number of messages a minute for each target. Start, failure and end are never left out.
    """

    on: Annotated[MessageEvents, KeyDocs(["failure", "end"])] = ("start", "failure", "stall", "restart", "node", "end")
    slack: Annotated[Annotated[SecretSpec, SecretSource] | None, _ADDRESS] = None
    discord: Annotated[Annotated[SecretSpec, SecretSource] | None, _ADDRESS] = None
    teams: Annotated[Annotated[SecretSpec, SecretSource] | None, _ADDRESS] = None
    ntfy: Annotated[Annotated[SecretSpec, SecretSource] | None, _ADDRESS] = None
    webhook: Annotated[Annotated[SecretSpec, SecretSource] | None, _ADDRESS] = None
    apprise: Annotated[Annotated[SecretSpec, SecretSource] | None, _ADDRESS] = None
    command: Annotated[Args, KeyDocs(["./tell.sh", "--urgent"])] = ()
    max_per_minute: Annotated[MessageCount, KeyDocs(10)] = 10

    @property
    def addresses(self) -> dict[str, SecretSpec]:
        """The sources of the URLs, by key."""
        keys = ("slack", "discord", "teams", "ntfy", "webhook", "apprise")
        return {key: source for key in keys if (source := getattr(self, key)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLossSpec:
    """What nodes do if they lose the controller.

    Attributes:
        stop_after: A node that hears nothing from a controller for this time stops its workers.
    """

    stop_after: Annotated[PositiveDuration, KeyDocs("10m")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A clusterctl cluster file: machines and the job to run on them.

    In the spec, `hosts` also contains the spares. `secrets` maps names to values; the head never shows the values nor
    writes them to disk. `path` is the absolute path of the (first) cluster file. `min_nodes` is the number of nodes
    that suffices to start a run (`up --min-nodes`, or the lower number of `job.nodes`); `None` means all.

    Attributes:
        name: Name of the runs of this file.
        hosts: Machines in order of node rank: a text, a mapping from host to GPUs, or a list.
        ssh: How clusterctl opens SSH connections.
        network: The network between workers.
        sync: Code to copy to the nodes, or `none`.
        environment: The Python environment that clusterctl makes on each node.
        env: Environment variables of all workers.
        secrets: Environment variables whose values clusterctl never shows or stores.
        job: The program of the workers.
        results: Files to fetch from the nodes at the end of a run.
        restart: When clusterctl starts a new attempt of a run.
        on_controller_loss: What nodes do without a controller: `keep` the run (default), or stop it after `stop_after`.
        stall: When a run counts as stalled.
        idle: What clusterctl does with a run whose GPUs do nothing.
        health: Settings of health checks.
        logs: Size limits of output files.
        notify: Where the controller sends messages about a run.
    """

    name: Annotated[str, KeyDocs("llm-pretrain", unset_text="name of the file's folder")]
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
        KeyDocs({"exclude": ["data/"]}, "none", unset_text="folder of the cluster file"),
    ] = None
    environment: Annotated[
        EnvironmentSpec | None, KeyDocs({"uv": "."}, unset_text="the nodes have their own Python")
    ] = None
    env: Annotated[Env, KeyDocs({"HF_HOME": "/scratch/hf"})] = field(default_factory=dict)
    secrets: Annotated[dict[str, str], KeyDocs({"HF_TOKEN": {"env": "HF_TOKEN"}, "KEY": {"file": "~/.key"}})] = field(
        default_factory=dict
    )
    job: Annotated[
        JobSpec | None,
        KeyDocs({"script": "train.py", "args": ["--epochs", 3]}, unset_text="options of `up`, such as `--script`"),
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
    idle: Annotated[IdleSpec, KeyDocs({"after": "30m", "action": "end"})] = field(default_factory=IdleSpec)
    health: Annotated[HealthSpec, KeyDocs({"ignore": ["host.governor"]})] = field(default_factory=HealthSpec)
    logs: Annotated[LogsSpec, KeyDocs({"max_size": "10GiB"})] = field(default_factory=LogsSpec)
    notify: Annotated[NotifySpec, KeyDocs({"slack": {"env": "SLACK_URL"}})] = field(default_factory=NotifySpec)
    min_nodes: int | None = None

    @property
    def stop_after_controller_loss(self) -> float | None:
        """Seconds without a controller after which nodes stop the run; `None` means never."""
        return None if self.on_controller_loss is None else self.on_controller_loss.stop_after

    @property
    def worker_hosts(self) -> tuple[HostSpec, ...]:
        """Hosts that run workers from the start, in order of node rank."""
        return tuple(h for h in self.hosts if h.role is Role.WORKER)

    @property
    def spare_hosts(self) -> tuple[HostSpec, ...]:
        """Hosts that wait to replace a lost or unhealthy node."""
        return tuple(h for h in self.hosts if h.role is Role.SPARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOnlySpec:
    """Keys of a cluster file that are not part of `ClusterSpec`.

    Attributes:
        version: Version of the file format.
        env_file: Files with lines NAME=value; `env` wins over them.
    """

    version: Annotated[Literal[1], KeyDocs(1)]
    env_file: Annotated[Texts, KeyDocs([".env"])] = ()


def dump_spec(spec: ClusterSpec) -> str:
    """Return a spec as one line of JSON. The JSON contains the names of secrets, with empty values."""
    public = replace(spec, secrets=dict.fromkeys(spec.secrets, ""))
    return json.dumps(asdict(public), separators=(",", ":"))


def load_spec(text: str) -> ClusterSpec:
    """Parse the JSON of `dump_spec`; missing keys get their defaults.

    Raises:
        ValueError: The text is not the JSON of a spec.
    """
    return _build_type_adapter().validate_json(text)


@cache
def _build_type_adapter() -> "TypeAdapter[ClusterSpec]":
    from pydantic import TypeAdapter

    return TypeAdapter(ClusterSpec)
