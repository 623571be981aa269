"""Sections of a cluster file and their fields, built from the annotations of `clusterctl.config.spec`.

Validation, the resolved file, the JSON Schema and the tables of keys use them.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from clusterctl.config import spec
from clusterctl.config.field_types import Env, FieldType, KeyInfo, PositiveDuration, Texts

_PLAIN_TYPE = FieldType()
_DESCRIBED_KEY = re.compile(r"\n {8}(\w+): (.*(?:\n {12}.*)*)")
"""An entry of the section `Attributes` of a docstring."""


@dataclass(frozen=True, eq=False, repr=False)
class SectionField:
    """A key of a section.

    Attributes:
        summary: A sentence. With `(default)` it names the default itself; else the default is appended.
        type: What the spec holds, without `None`; a `Section` for a mapping with keys of its own.
        default: What the spec holds without the key, `None` for nothing; `MISSING` where only the file can say it.
    """

    name: str
    summary: str
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
        """The effect of a missing key in words; empty for none."""
        if self.key.unset_text or self.default is MISSING:
            return self.key.unset_text
        written = self.format_value(self.default)
        if written is None or isinstance(written, list):
            return ", ".join(written or ())
        if isinstance(written, bool):
            return str(written).lower()
        return f"`{written}`" if self.default is None or isinstance(self.default, Enum) else str(written)

    @property
    def description(self) -> str:
        """The summary of the key, with its default."""
        text = self.default_text
        return f"{self.summary} Default: {text}." if text and "(default)" not in self.summary else self.summary

    def format_value(self, value: Any) -> Any:
        """Return a value of the spec in the form of a cluster file; `None` for a missing key."""
        if self.kind.unparse is not None:
            return self.kind.unparse(value)
        if isinstance(self.type, Section) and value is not None:
            return self.type.format_value(value)
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
    keys: dict[str, SectionField]
    spec: Any = dict

    def format_value(self, spec: Any) -> dict[str, Any]:
        """Return a part of the spec in the form of a cluster file."""
        values = {name: key.format_value(getattr(spec, name)) for name, key in self.keys.items()}
        return {name: value for name, value in values.items() if value is not None}


def split_annotation(hint: Any) -> tuple[Any, FieldType]:
    """Split an annotation into its type, without `None`, and its `FieldType`."""
    if get_origin(hint) is Annotated:
        annotation, below = split_annotation(hint.__origin__)
        return annotation, next((part for part in hint.__metadata__ if isinstance(part, FieldType)), below)
    if get_origin(hint) in (Union, UnionType):
        some = [part for part in get_args(hint) if part is not NoneType]
        return split_annotation(some[0]) if len(some) == 1 else (hint, _PLAIN_TYPE)
    has_keys: bool = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return build_section(hint) if has_keys else hint, _PLAIN_TYPE


@cache
def build_section(annotation: Any) -> Section:
    """Return the section of a class of the spec; the docstring of the class describes the section and its keys."""
    doc = annotation.__doc__ or ""
    summaries = {name: " ".join(text.split()) for name, text in _DESCRIBED_KEY.findall(doc)}
    keys = {}
    for field in dataclasses.fields(annotation):
        key = next((part for part in getattr(field.type, "__metadata__", ()) if isinstance(part, KeyInfo)), None)
        if key is not None:
            default = field.default if field.default_factory is MISSING else None
            summary = summaries.get(field.name, "")
            keys[field.name] = SectionField(field.name, summary, *split_annotation(field.type), key, default)
    return Section(annotation.__name__.replace("Spec", "Model"), doc.partition("\n")[0], keys, annotation)


def _build_host_sections() -> tuple[Section, Section]:
    alone = build_section(spec.HostSpec)
    shared = {name: key for name, key in alone.keys.items() if name != "host"}
    about = "Keys that a host may have, for all hosts; a host's own win."
    return Section("DefaultsModel", about, shared), dataclasses.replace(alone, keys=shared | alone.keys)


def _build_field(
    name: str, hint: Any, about: str, *examples: Any, unset_text: str = "", default: Any = None
) -> SectionField:
    return SectionField(name, about, *split_annotation(hint), KeyInfo(*examples, unset_text=unset_text), default)


DEFAULTS, HOST = _build_host_sections()
SYNC = build_section(spec.SyncSpec)
RESULTS = build_section(spec.ResultsSpec)

SECRET = Section(
    "SecretModel",
    "Where a secret's value comes from: exactly one of the two.",
    {
        "env": _build_field("env", str, "Environment variable here, where clusterctl is started.", "HF_TOKEN"),
        "file": _build_field("file", str, "File here that holds the value.", "~/.secrets/hf"),
    },
)
CONTROLLER_LOSS = Section(
    "ControllerLossModel",
    "What nodes do when no controller is heard.",
    {
        "stop_after": _build_field(
            "stop_after", PositiveDuration, "Stop the run after this silence.", "10m", default=MISSING
        )
    },
)

SECTIONS: dict[str, Section] = {
    "defaults": DEFAULTS,
    "ssh": build_section(spec.SshSpec),
    "network": build_section(spec.NetworkSpec),
    "job": build_section(spec.JobSpec),
    "restart": build_section(spec.RestartSpec),
    "stall": build_section(spec.StallSpec),
    "health": build_section(spec.HealthSpec),
    "logs": build_section(spec.LogsSpec),
}
"""Sections that are a mapping and nothing else."""


def _build_section_field(name: str, about: str, *examples: Any) -> SectionField:
    return SectionField(name, about, SECTIONS[name], _PLAIN_TYPE, KeyInfo(*examples))


_TOP = (
    _build_field("version", Literal[1], "Version of the format.", 1, default=MISSING),
    _build_field("name", str, "Name of runs.", "llm-pretrain", unset_text="the file's folder"),
    _build_field(
        "hosts",
        Annotated[Any, FieldType(syntax="text, mapping or list")],
        "Machines, in order of node rank: text, a mapping of host to GPUs, or a list.",
        *("gpu[01-04]", {"gpu[01-02]": 8}, [{"host": "gpu01", "gpus": 8}]),
        default=MISSING,
    ),
    _build_section_field("defaults", "Keys for all hosts.", {"user": "ubuntu", "gpus": 8}),
    _build_section_field("ssh", "How connections are opened.", {"connect_timeout": "10s"}),
    _build_section_field("network", "How workers meet.", {"interface": "eth1"}),
    _build_field(
        "sync",
        Annotated[Any, FieldType(syntax="mapping or `none`")],
        "Which code goes to the nodes, or `none`.",
        {"exclude": ["data/"]},
        "none",
    ),
    _build_field("env", Env, "Environment of all workers.", {"HF_HOME": "/scratch/hf"}),
    _build_field("env_file", Texts, "Files of NAME=value lines; `env` wins over them.", [".env"]),
    _build_field(
        "secrets",
        dict[str, SECRET],  # type: ignore[valid-type]
        "Values that are never shown nor stored.",
        {"HF_TOKEN": {"env": "HF_TOKEN"}, "KEY": {"file": "~/.key"}},
    ),
    _build_section_field("job", "What each worker runs.", {"script": "train.py", "args": ["--epochs", 3]}),
    _build_field(
        "results",
        Annotated[Any, FieldType(syntax="text, list of texts, or mapping")],
        "What is fetched from the nodes at the end of a run.",
        *(["ckpt/best*", "metrics.json"], {"patterns": ["ckpt/best*"], "when": "always"}),
    ),
    _build_section_field("restart", "When a run is tried again.", {"max_restarts": 3}),
    _build_field(
        "on_controller_loss",
        Annotated[Any, FieldType(syntax="`keep` or mapping")],
        "`keep` the run (default), or stop it after a time.",
        "keep",
        {"stop_after": "10m"},
    ),
    _build_section_field("stall", "When a run counts as stalled.", {"timeout": "15m", "action": "restart"}),
    _build_section_field("health", "How findings are weighed.", {"ignore": ["host.governor"]}),
    _build_section_field("logs", "Bounds of output files.", {"max_size": "10GiB"}),
)

CLUSTER_FILE = Section(
    "ClusterFile",
    "A clusterctl cluster file: machines, and what to run on them.",
    {key.name: key for key in _TOP},
)
