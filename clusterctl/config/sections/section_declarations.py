"""The sections of a cluster file and their keys, built from the annotations in `clusterctl.config.spec`.

The validation, the resolved file, the JSON Schema and the tables of keys use these sections.
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
"""Matches an entry below `Attributes:` in a docstring."""


@dataclass(frozen=True, eq=False, repr=False)
class SectionField:
    """A key of a section.

    Attributes:
        summary: A sentence about the key. If the sentence contains `(default)`, `description` does not append the
            default.
        type: Type of the value in the spec, without `None`; a `Section` if the value is a mapping with declared keys.
        default: Value in the spec if the key is missing; `MISSING` if the spec has no default.
    """

    name: str
    summary: str
    type: Any
    field_type: FieldType
    docs: KeyDocs
    default: Any = None

    @property
    def required(self) -> bool:
        """Whether a cluster file must contain the key."""
        return self.default is MISSING and not self.docs.unset_text

    @property
    def default_text(self) -> str:
        """The effect of a missing key, in words; empty if a missing key has no effect."""
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
        """The summary of the key and its default."""
        text = self.default_text
        return f"{self.summary} Default: {text}." if text and "(default)" not in self.summary else self.summary

    def format_value(self, value: Any) -> Any:
        """Convert a value of the spec to its form in a cluster file; `None` means that the key is left out."""
        if self.field_type.unparse is not None:
            return self.field_type.unparse(value)
        if isinstance(self.type, Section):
            return self.type.format_value(value) if value is not None else self.field_type.none_word or None
        if isinstance(value, Enum):
            return value.value
        entries = find_entry_section(self.type)
        if entries is not None and isinstance(value, dict):
            has_keys = {name: isinstance(each, entries.spec) for name, each in value.items()}
            return {name: entries.format_value(each) if has_keys[name] else each for name, each in value.items()}
        return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


@dataclass(frozen=True, eq=False, repr=False)
class Section:
    """A mapping in a cluster file with declared keys.

    Attributes:
        title: Name of the section in the JSON Schema.
        spec: Class of the section in the spec; `dict` if the section has none.
    """

    title: str
    summary: str
    keys: dict[str, SectionField]
    spec: Any = dict

    def format_value(self, spec: Any) -> dict[str, Any]:
        """Convert an object of the spec to the mapping of a cluster file."""
        values = {name: key.format_value(getattr(spec, name)) for name, key in self.keys.items()}
        return {name: value for name, value in values.items() if value is not None}


def split_annotation(hint: Any) -> tuple[Any, FieldType]:
    """Return the type of an annotation, without `None`, and its `FieldType`."""
    if get_origin(hint) is Annotated:
        annotation, below = split_annotation(hint.__origin__)
        return annotation, next((part for part in hint.__metadata__ if isinstance(part, FieldType)), below)
    if get_origin(hint) in (Union, UnionType):
        members = [part for part in get_args(hint) if part is not NoneType]
        return split_annotation(members[0]) if len(members) == 1 else (hint, _PLAIN_TYPE)
    has_keys: bool = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return build_section(hint) if has_keys else hint, _PLAIN_TYPE


def find_entry_section(annotation: Any) -> Section | None:
    """Return the section of each value of a mapping such as `job.roles`; `None` for any other type."""
    section = split_annotation(get_args(annotation)[1])[0] if get_origin(annotation) is dict else None
    return section if isinstance(section, Section) else None


@cache
def build_section(annotation: Any) -> Section:
    """Build the section of a spec class. The docstring of the class describes the section and its keys."""
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
    "Keys for all hosts; a key of a host itself wins.",
    {name: key for name, key in HOST.keys.items() if name != "host"},
)
SECRET = build_section(spec.SecretSpec)


def _build_cluster_file() -> Section:
    file, keys = build_section(spec.ClusterSpec), build_section(spec.FileOnlySpec).keys
    example = KeyDocs({"user": "ubuntu", "gpus": 8})
    defaults = SectionField("defaults", "Keys that apply to all hosts.", DEFAULTS, _PLAIN_TYPE, example)
    secrets = dataclasses.replace(file.keys["secrets"], type=dict[str, SECRET])  # type: ignore[valid-type]
    return Section("ClusterFile", file.summary, {**keys, **file.keys, "defaults": defaults, "secrets": secrets})


CLUSTER_FILE = _build_cluster_file()
SECTIONS: dict[str, Section] = {
    name: key.type for name, key in CLUSTER_FILE.keys.items() if isinstance(key.type, Section)
}
"""All top-level keys whose value is a mapping with declared keys, by name."""
MAPPINGS = {name: section for name, section in SECTIONS.items() if CLUSTER_FILE.keys[name].field_type is _PLAIN_TYPE}
"""The sections that cannot be a word such as `none` or a list."""
