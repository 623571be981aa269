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
from typing import Annotated, Any, Union, get_args, get_origin

from clusterctl.config import spec
from clusterctl.config.field_types import FieldType, KeyDocs

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
    field_type: FieldType
    docs: KeyDocs
    default: Any = None

    @property
    def required(self) -> bool:
        """Whether a file must have it."""
        return self.default is MISSING and not self.docs.unset_text

    @property
    def default_text(self) -> str:
        """The effect of a missing key in words; empty for none."""
        if self.docs.unset_text or self.default is MISSING:
            return self.docs.unset_text
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
        if self.field_type.unparse is not None:
            return self.field_type.unparse(value)
        if isinstance(self.type, Section):
            return self.type.format_value(value) if value is not None else self.field_type.none_word or None
        if isinstance(value, Enum):
            return value.value
        return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


@dataclass(frozen=True, eq=False, repr=False)
class Section:
    """A mapping of a cluster file.

    Attributes:
        title: What the JSON Schema calls it.
        spec: The class that is made of the values, unless each value is used separately.
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
        key = next((part for part in getattr(field.type, "__metadata__", ()) if isinstance(part, KeyDocs)), None)
        if key is not None:
            default = field.default if field.default_factory is MISSING else None
            summary = summaries.get(field.name, "")
            keys[field.name] = SectionField(field.name, summary, *split_annotation(field.type), key, default)
    return Section(annotation.__name__.replace("Spec", "Model"), doc.partition("\n")[0], keys, annotation)


HOST = build_section(spec.HostSpec)
DEFAULTS = Section(
    "DefaultsModel",
    "Keys that a host may have, for all hosts; a host's own win.",
    {name: key for name, key in HOST.keys.items() if name != "host"},
)
SECRET = build_section(spec.SecretSpec)


def _build_cluster_file() -> Section:
    file, keys = build_section(spec.ClusterSpec), build_section(spec.FileOnlySpec).keys
    example = KeyDocs({"user": "ubuntu", "gpus": 8})
    defaults = SectionField("defaults", "Keys for all hosts.", DEFAULTS, _PLAIN_TYPE, example)
    secrets = dataclasses.replace(file.keys["secrets"], type=dict[str, SECRET])  # type: ignore[valid-type]
    return Section("ClusterFile", file.summary, {**keys, **file.keys, "defaults": defaults, "secrets": secrets})


CLUSTER_FILE = _build_cluster_file()
SECTIONS: dict[str, Section] = {
    name: key.type for name, key in CLUSTER_FILE.keys.items() if isinstance(key.type, Section)
}
"""All keys of a cluster file that are a mapping with keys of its own."""
MAPPINGS = {name: section for name, section in SECTIONS.items() if CLUSTER_FILE.keys[name].field_type is _PLAIN_TYPE}
"""Sections that are a mapping and nothing else."""
