"""The sections of a cluster file and their keys, as `clusterctl.config.spec` declares them.

Pydantic's models, what is written back, the JSON Schema and the page of keys are all made of these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from clusterctl.config import spec
from clusterctl.config.field_types import Env, FieldType, KeyInfo, PositiveDuration, Texts

_PLAIN = FieldType()


@dataclass(frozen=True, eq=False, repr=False)
class Declared:
    """A key of a section.

    Attributes:
        type: What the spec holds, without `None`; a `Section` for a mapping with keys of its own.
        default: What the spec holds without the key, `None` for nothing; `MISSING` where only the file can say it.
    """

    name: str
    type: Any
    kind: FieldType
    key: KeyInfo
    default: Any = None

    @property
    def required(self) -> bool:
        """Whether a file must have it."""
        return self.default is MISSING and not self.key.unset_text

    @property
    def default_text(self) -> str:
        """What holds without the key, in words; empty for nothing at all."""
        if self.key.unset_text or self.default is MISSING:
            return self.key.unset_text
        written = self.written(self.default)
        if written is None or isinstance(written, list):
            return ", ".join(written or ())
        if isinstance(written, bool):
            return str(written).lower()
        return f"`{written}`" if self.default is None or isinstance(self.default, Enum) else str(written)

    @property
    def description(self) -> str:
        """What is said of it, with its default."""
        text = self.default_text
        return (
            f"{self.key.summary} Default: {text}." if text and "(default)" not in self.key.summary else self.key.summary
        )

    def written(self, value: Any) -> Any:
        """Write a value of the spec as a cluster file has it; `None` for a key that is left out."""
        if self.kind.unparse is not None:
            return self.kind.unparse(value)
        if isinstance(self.type, Section) and value is not None:
            return self.type.written(value)
        if isinstance(value, Enum):
            return value.value
        return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


@dataclass(frozen=True, eq=False, repr=False)
class Section:
    """A mapping of a cluster file.

    Attributes:
        title: What the JSON Schema calls it.
        spec: The class that its values are for, unless they are taken one by one.
    """

    title: str
    summary: str
    keys: dict[str, Declared]
    spec: Any = dict

    def written(self, spec: Any) -> dict[str, Any]:
        """Write a part of the spec as a cluster file has it."""
        values = {name: key.written(getattr(spec, name)) for name, key in self.keys.items()}
        return {name: value for name, value in values.items() if value is not None}


def apart(hint: Any) -> tuple[Any, FieldType]:
    """Part an annotation into its type, without `None`, and its kind."""
    if get_origin(hint) is Annotated:
        of, below = apart(hint.__origin__)
        return of, next((part for part in hint.__metadata__ if isinstance(part, FieldType)), below)
    if get_origin(hint) in (Union, UnionType):
        some = [part for part in get_args(hint) if part is not NoneType]
        return apart(some[0]) if len(some) == 1 else (hint, _PLAIN)
    has_keys: bool = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return section_of(hint) if has_keys else hint, _PLAIN


@cache
def section_of(of: Any) -> Section:
    """Give the section of which a class of the spec is made."""
    keys = {}
    for field in dataclasses.fields(of):
        key = next((part for part in getattr(field.type, "__metadata__", ()) if isinstance(part, KeyInfo)), None)
        if key is not None:
            default = field.default if field.default_factory is MISSING else None
            keys[field.name] = Declared(field.name, *apart(field.type), key, default)
    return Section(of.__name__.replace("Spec", "Model"), str(of.__doc__).partition("\n")[0], keys, of)


def _host() -> tuple[Section, Section]:
    alone = section_of(spec.HostSpec)
    shared = {name: key for name, key in alone.keys.items() if name != "host"}
    about = "Keys that a host may have, for all hosts; a host's own win."
    return Section("DefaultsModel", about, shared), dataclasses.replace(alone, keys=shared | alone.keys)


def _key(name: str, hint: Any, about: str, *examples: Any, unset_text: str = "", default: Any = None) -> Declared:
    return Declared(name, *apart(hint), KeyInfo(about, *examples, unset_text=unset_text), default)


DEFAULTS, HOST = _host()
SYNC = section_of(spec.SyncSpec)
RESULTS = section_of(spec.ResultsSpec)

SECRET = Section(
    "SecretModel",
    "Where a secret's value comes from: exactly one of the two.",
    {
        "env": _key("env", str, "Environment variable here, where clusterctl is started.", "HF_TOKEN"),
        "file": _key("file", str, "File here that holds the value.", "~/.secrets/hf"),
    },
)
CONTROLLER_LOSS = Section(
    "ControllerLossModel",
    "What nodes do when no controller is heard.",
    {"stop_after": _key("stop_after", PositiveDuration, "Stop the run after this silence.", "10m", default=MISSING)},
)

SECTIONS: dict[str, Section] = {
    "defaults": DEFAULTS,
    "ssh": section_of(spec.SshSpec),
    "network": section_of(spec.NetworkSpec),
    "job": section_of(spec.JobSpec),
    "restart": section_of(spec.RestartSpec),
    "stall": section_of(spec.StallSpec),
    "health": section_of(spec.HealthSpec),
    "logs": section_of(spec.LogsSpec),
}
"""Sections that are a mapping and nothing else."""


def _section(name: str, about: str, *examples: Any) -> Declared:
    return Declared(name, SECTIONS[name], _PLAIN, KeyInfo(about, *examples))


_TOP = (
    _key("version", Literal[1], "Version of the format.", 1, default=MISSING),
    _key("name", str, "Name of runs.", "llm-pretrain", unset_text="the file's folder"),
    _key(
        "hosts",
        Annotated[Any, FieldType(syntax="text, mapping or list")],
        "Machines, in order of node rank: text, a mapping of host to GPUs, or a list.",
        *("gpu[01-04]", {"gpu[01-02]": 8}, [{"host": "gpu01", "gpus": 8}]),
        default=MISSING,
    ),
    _section("defaults", "Keys for all hosts.", {"user": "ubuntu", "gpus": 8}),
    _section("ssh", "How connections are opened.", {"connect_timeout": "10s"}),
    _section("network", "How workers meet.", {"interface": "eth1"}),
    _key(
        "sync",
        Annotated[Any, FieldType(syntax="mapping or `none`")],
        "Which code goes to the nodes, or `none`.",
        {"exclude": ["data/"]},
        "none",
    ),
    _key("env", Env, "Environment of all workers.", {"HF_HOME": "/scratch/hf"}),
    _key("env_file", Texts, "Files of NAME=value lines; `env` wins over them.", [".env"]),
    _key(
        "secrets",
        dict[str, SECRET],  # type: ignore[valid-type]
        "Values that are never shown nor stored.",
        {"HF_TOKEN": {"env": "HF_TOKEN"}, "KEY": {"file": "~/.key"}},
    ),
    _section("job", "What each worker runs.", {"script": "train.py", "args": ["--epochs", 3]}),
    _key(
        "results",
        Annotated[Any, FieldType(syntax="text, list of texts, or mapping")],
        "What is fetched from the nodes at the end of a run.",
        *(["ckpt/best*", "metrics.json"], {"patterns": ["ckpt/best*"], "when": "always"}),
    ),
    _section("restart", "When a run is tried again.", {"max_restarts": 3}),
    _key(
        "on_controller_loss",
        Annotated[Any, FieldType(syntax="`keep` or mapping")],
        "`keep` the run (default), or stop it after a time.",
        "keep",
        {"stop_after": "10m"},
    ),
    _section("stall", "When a run counts as stalled.", {"timeout": "15m", "action": "restart"}),
    _section("health", "How findings are weighed.", {"ignore": ["host.governor"]}),
    _section("logs", "Bounds of output files.", {"max_size": "10GiB"}),
)

CLUSTER_FILE = Section(
    "ClusterFile",
    "A clusterctl cluster file: machines, and what to run on them.",
    {key.name: key for key in _TOP},
)
