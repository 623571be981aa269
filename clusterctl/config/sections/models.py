"""What people write in a cluster file, one model a section; the JSON Schema is made of these.

A field that is left out keeps the default of its namesake in `clusterctl.config.spec`; so the models hold none. Short
forms are made long before validation (`clusterctl.config.sections.normal`), so that one mistake gives one message.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from clusterctl.config import units, words
from clusterctl.config.wrong import WrongValueError, shown


def _positive(value: object) -> float:
    seconds = units.duration(value)
    if seconds <= 0:
        raise WrongValueError("must be more than 0")
    return seconds


def _duration_or_none(value: object) -> float | None:
    return None if value == "none" else _positive(value)


def _duration_or_auto(value: object) -> float | None:
    return None if value == "auto" else _positive(value)


def _size_or_none(value: object) -> int | None:
    return None if value == "none" else _positive_size(value)


def _positive_size(value: object) -> int:
    count = units.size(value)
    if count <= 0:
        raise WrongValueError("must be more than 0")
    return count


def _count(value: object, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongValueError(f"must be {what}, not {shown(value)}")
    if not least <= value <= _MAX_DEVICES:
        raise WrongValueError(f"must be between {least} and {_MAX_DEVICES}, not {shown(value)}")
    return value


def _gpus(value: object) -> int | list[int] | None:
    if value == "auto":
        return None
    if not isinstance(value, list):
        return _count(value, "a count, a list of indices, or `auto`", 0)
    indices = [_count(item, "a list of device indices", 0) for item in value]
    if not indices:
        raise WrongValueError("an empty list of devices", "write `gpus: 0` for none")
    if len(set(indices)) < len(indices):
        raise WrongValueError("lists a device twice")
    return indices


def _workers(value: object) -> int | None:
    return None if value == "auto" else _count(value, "a count or `auto`", 1)


def _port_or_auto(value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongValueError(f"must be a port or `auto`, not {shown(value)}")
    if not 1 <= value <= 65535:
        raise WrongValueError("must be a port from 1 to 65535")
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _command(value: object) -> object:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    raise WrongValueError("must be a shell command, or a list of program and arguments")


_MAX_DEVICES = 1024

_DURATION: dict[str, Any] = {
    "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": units.DURATION_PATTERN}]
}
_SIZE: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": units.SIZE_PATTERN}]
}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": _MAX_DEVICES}
_WORD: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_CAUSE: dict[str, Any] = {"enum": ["crash", "stall", "node_lost", "unhealthy"]}
_TEXT: dict[str, Any] = {"type": ["string", "number", "boolean"]}


def _or(schema: dict[str, Any], word: str) -> WithJsonSchema:
    choices = schema.get("anyOf", [schema])
    return WithJsonSchema({"anyOf": [*choices, {"const": word}]})


Duration = Annotated[float, PlainValidator(units.duration), WithJsonSchema(_DURATION)]
PositiveDuration = Annotated[float, PlainValidator(_positive), WithJsonSchema(_DURATION)]
DurationOrNone = Annotated[float | None, PlainValidator(_duration_or_none), _or(_DURATION, "none")]
DurationOrAuto = Annotated[float | None, PlainValidator(_duration_or_auto), _or(_DURATION, "auto")]
Size = Annotated[int, PlainValidator(_positive_size), WithJsonSchema(_SIZE)]
SizeOrZero = Annotated[int, PlainValidator(units.size), WithJsonSchema(_SIZE)]
SizeOrNone = Annotated[int | None, PlainValidator(_size_or_none), _or(_SIZE, "none")]
Port = Annotated[int, Field(ge=1, le=65535)]
PortOrAuto = Annotated[
    int | None,
    PlainValidator(_port_or_auto),
    _or({"type": "integer", "minimum": 1, "maximum": 65535}, "auto"),
]
Gpus = Annotated[
    Any,
    PlainValidator(_gpus),
    _or({"anyOf": [_COUNT, {"type": "array", "minItems": 1, "uniqueItems": True, "items": _COUNT}]}, "auto"),
]
Workers = Annotated[int | None, PlainValidator(_workers), _or(_COUNT | {"minimum": 1}, "auto")]
Texts = Annotated[list[str], BeforeValidator(_as_list), WithJsonSchema(_WORD)]
Args = Annotated[list[str], WithJsonSchema({"type": "array", "items": _TEXT})]
Env = Annotated[dict[str, str], WithJsonSchema({"type": "object", "additionalProperties": _TEXT})]
Command = Annotated[
    Any,
    PlainValidator(_command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT}]}),
]
SshWord = Annotated[str, BeforeValidator(words.argument)]
SshUser = Annotated[str, BeforeValidator(words.user)]
SshHops = Annotated[str, BeforeValidator(words.hops)]
SshFile = Annotated[str, BeforeValidator(words.path)]
SshFiles = Annotated[list[SshFile], BeforeValidator(_as_list), WithJsonSchema(_WORD)]


def _f(description: str, *examples: Any, **more: Any) -> Any:
    return Field(default=None, description=description, examples=list(examples), **more)


class Section(BaseModel):
    """What all sections have in common: unknown keys are mistakes, `"8"` is not a number."""

    # A section that a file does not have is never built: that is half of the time to start.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class DefaultsModel(Section):
    """Keys that a host may have, for all hosts; a host's own win."""

    address: SshWord = _f("What SSH connects to. Default: `host`, as ssh resolves it.", "203.0.113.9")
    internal_ip: SshWord = _f("Address that workers meet on. Default: found by route.", "10.0.0.9")
    user: SshUser = _f("User to log in as. Default: what `ssh -G host` says.", "ubuntu")
    port: Port = _f("Port of sshd. Default: what `ssh -G host` says.", 22, 2222)
    identity_file: SshFile = _f("Private key. Default: what `ssh -G host` says.", "~/.ssh/id_ed25519")
    proxy_jump: SshHops = _f("Hosts to connect through, as for ssh's ProxyJump.", "bastion.example.com")
    gpus: Gpus = _f("GPUs: a count, a list of indices, or `auto` for all there are (default).", 8, [0, 2], "auto")
    workers: Workers = _f("Training processes. Default: one a GPU, or 1 without any.", 2)
    python: str = _f("Python that runs the workers. Default: found on the node, shown in the plan.", ".venv/bin/python")
    workdir: str = _f("Folder of the code on the node. Default: one of clusterctl's own.", "~/work/llm")
    env: Env = _f("Environment of this host's workers, merged over `env`.", {"NCCL_IB_HCA": "mlx5_0"})
    role: Literal["worker", "spare"] = _f("`spare` waits to replace a lost node. Default: `worker`.", "spare")
    transport: Literal["ssh", "local"] = _f("`local` starts processes here, without SSH. Default: `ssh`.", "local")


class HostModel(DefaultsModel):
    """A host, or a range of hosts that are alike."""

    host: str = Field(description="Host, ssh alias or range.", examples=["gpu01", "gpu[01-04,07]"])


class SshModel(Section):
    """How connections are opened."""

    host_keys: Literal["strict", "accept-new"] = _f("What to do with an unknown host key. Default: `strict`.", "strict")
    known_hosts: SshFiles = _f("Files of known host keys, read beside the user's own.", ["known_hosts"])
    connect_timeout: PositiveDuration = _f("Longest wait for a connection. Default: 10s.", "10s")
    parallel: int = _f("Connections opened at once. Default: 64.", 64, ge=1, le=1024)


class NetworkModel(Section):
    """How workers meet."""

    interface: str = _f("Network interface on every node, or `auto` (default): the one that routes.", "auto", "eth1")
    master_port: PortOrAuto = _f("Port of rank 0, or `auto` (default): fresh for each attempt.", "auto", 29500)
    node_lost_after: PositiveDuration = _f("Silence after which a node counts as lost. Default: 2m.", "2m")


class SyncModel(Section):
    """Which code goes to the nodes."""

    source: str = _f("Folder to send, relative to the cluster file. Default: the file's own.", ".", "src")
    exclude: Texts = _f("Patterns to leave out, as in .gitignore; they have the last word.", ["data/", "*.ckpt"])
    max_size: Size = _f("Refuse to send more than this. Default: 500MiB.", "500MiB")


class SecretModel(Section):
    """Where a secret's value comes from: exactly one of the two."""

    env: str = _f("Environment variable here, where clusterctl is started.", "HF_TOKEN")
    file: str = _f("File here that holds the value.", "~/.secrets/hf")


class CheckpointModel(Section):
    """Where checkpoints appear."""

    pattern: str = _f("Glob of checkpoints, relative to the workdir.", "ckpt/step-*")
    shared: bool = _f("Whether all nodes see the same files. Default: false.", True)
    resume: Literal["never", "this run", "any"] = _f(
        "Whose checkpoints are gone on from: those that appeared in `this run` (default), `any`, also at the start, "
        "or `never`.",
        "any",
    )


class JobModel(Section):
    """What each worker runs: exactly one of `script`, `module`, `command`."""

    script: str = _f("Python file, relative to the synced folder.", "train.py")
    module: str = _f("Python module, as for `python -m`.", "llm.train")
    command: Command = _f("A shell command (text), or program and arguments (list).", "./run.sh", ["./train", "--fast"])
    args: Args = _f("Arguments; those after `--` of `up` are appended.", ["--epochs", 3])
    prologue: str = _f("Shell text that bash runs before each worker.", "module load cuda")
    framework: Literal["auto", "torch", "keras", "tensorflow", "jax", "none"] = _f(
        "Whose environment variables workers get. Default: `auto`.", "torch"
    )
    launcher: Literal["direct", "torchrun"] = _f("Who starts the workers of a node. Default: `direct`.", "direct")
    inject: bool = _f("Whether progress is watched from inside the workers. Default: true.", False)
    grace: Duration = _f("Time between SIGTERM and SIGKILL. Default: 10s.", "10s")
    finish_grace: Duration = _f("Longest wait without activity once some ranks have ended. Default: 5m.", "5m")
    max_duration: DurationOrNone = _f("Longest duration of the run. Default: `none`.", "72h", "none")
    checkpoint: CheckpointModel = _f("Where checkpoints appear.", {"pattern": "ckpt/step-*", "shared": True})


class RestartModel(Section):
    """When a run is tried again."""

    max_restarts: int = _f("Attempts after the first. Default: 0.", 3, ge=0, le=1000)
    on: Annotated[
        list[Literal["crash", "stall", "node_lost", "unhealthy"]],
        BeforeValidator(_as_list),
        WithJsonSchema({"anyOf": [_CAUSE, {"type": "array", "items": _CAUSE}]}),
    ] = _f("What calls for a new attempt. Default: crash, stall, node_lost.", ["crash", "node_lost"])
    backoff: Duration = _f("Pause before the first restart, doubled up to 5m. Default: 10s.", "10s", 0)
    window: DurationOrNone = _f("Count only the restarts of this time. Default: `none`, all of them.", "6h", "none")
    never_codes: list[Annotated[int, Field(ge=0, le=255)]] = _f("Exit codes that end the run at once.", [2, 78])


class ControllerLossModel(Section):
    """What nodes do when no controller is heard."""

    stop_after: PositiveDuration = Field(description="Stop the run after this silence.", examples=["10m"])


class StallModel(Section):
    """When a run counts as stalled, and what happens then."""

    timeout: DurationOrAuto = _f("Time without activity. Default: `auto`, 8m with NCCL and 25m else.", "15m", "auto")
    startup_timeout: PositiveDuration = _f("The same, before the first step. Default: 25m.", "40m")
    action: Literal["report", "stop", "restart"] = _f("What to do with a stalled run. Default: `report`.", "restart")
    watch: Texts = _f("Globs of files whose growth is activity, relative to the workdir.", ["ckpt/**"])


class HealthModel(Section):
    """How findings are weighed; checks are listed in docs/health.md."""

    expect: dict[str, Any] = _f("What nodes must have.", {"gpu_model": "NVIDIA H100*", "driver": "570.*"})
    ignore: Texts = _f("Checks to ignore, everywhere or `check@node`.", ["host.governor"])
    severity: dict[str, Literal["fail", "warn", "ignore"]] = _f("Other weight for a check.", {"xid.31": "ignore"})
    required: Texts = _f("Checks that fail where they cannot look.", ["gpu.count"])
    thresholds: dict[str, float] = _f("Other limits for a check.", {"host.disk.warn": 20})


class LogsModel(Section):
    """Bounds of workers' output files on the nodes."""

    max_size: SizeOrNone = _f("Longest output file; older replicated bytes go first. Default: `none`.", "10GiB", "none")
    reserve: SizeOrZero = _f("Disk space kept free for output. Default: 64MiB.", "64MiB")


SECTIONS: dict[str, type[Section]] = {
    "defaults": DefaultsModel,
    "ssh": SshModel,
    "network": NetworkModel,
    "job": JobModel,
    "restart": RestartModel,
    "stall": StallModel,
    "health": HealthModel,
    "logs": LogsModel,
}
"""Sections that are a mapping and nothing else."""

_ENV_EXAMPLE = {"HF_HOME": "/scratch/hf"}


class ClusterFile(BaseModel):
    """A clusterctl cluster file: machines, and what to run on them."""

    # The parts are validated one by one; this one is for the schema, and would double the time to start.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    version: Literal[1] = Field(description="Version of the format.", examples=[1])
    name: str = _f("Name of runs. Default: the file's folder.", "llm-pretrain")
    hosts: Any = Field(
        description="Machines, in order of node rank: text, a mapping of host to GPUs, or a list.",
        examples=["gpu[01-04]", {"gpu[01-02]": 8}, [{"host": "gpu01", "gpus": 8}]],
    )
    defaults: DefaultsModel = _f("Keys for all hosts.", {"user": "ubuntu", "gpus": 8})
    ssh: SshModel = _f("How connections are opened.", {"connect_timeout": "10s"})
    network: NetworkModel = _f("How workers meet.", {"interface": "eth1"})
    sync: Any = _f("Which code goes to the nodes, or `none`.", {"exclude": ["data/"]}, "none")
    env: Env = _f("Environment of all workers.", _ENV_EXAMPLE)
    env_file: Texts = _f("Files of NAME=value lines; `env` wins over them.", [".env"])
    secrets: dict[str, SecretModel] = _f(
        "Values that are never shown nor stored.", {"HF_TOKEN": {"env": "HF_TOKEN"}, "KEY": {"file": "~/.key"}}
    )
    job: JobModel = _f("What each worker runs.", {"script": "train.py", "args": ["--epochs", 3]})
    restart: RestartModel = _f("When a run is tried again.", {"max_restarts": 3})
    on_controller_loss: Any = _f("`keep` the run (default), or stop it after a time.", "keep", {"stop_after": "10m"})
    stall: StallModel = _f("When a run counts as stalled.", {"timeout": "15m", "action": "restart"})
    health: HealthModel = _f("How findings are weighed.", {"ignore": ["host.governor"]})
    logs: LogsModel = _f("Bounds of output files.", {"max_size": "10GiB"})
