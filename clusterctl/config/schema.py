"""The JSON Schema of cluster files for editors, and the tables of keys in docs/cluster-file.md.

The schema is draft-07, because yaml-language-server reads no newer version. A number, word or boolean may also be
`${env:NAME}`. `python -m clusterctl.config.schema docs/cluster-file.md` updates the tables.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter

from clusterctl.config.field_types import FieldType
from clusterctl.config.sections.section_declarations import (
    CLUSTER_FILE,
    HOST,
    MAPPINGS,
    SECTIONS,
    Section,
    SectionField,
    find_entry_section,
    split_annotation,
)
from clusterctl.config.sections.section_validation import build_validator

_VARIABLE = {"type": "string", "pattern": r"\$\{env:"}
_EXTENSION: dict[str, Any] = {"^x-": {}}


def build_schema() -> dict[str, Any]:
    """Return the JSON Schema as a dict."""
    made: dict[str, Any]
    _, made = TypeAdapter.json_schemas(
        [(section.title, "validation", build_validator(section)) for section in (CLUSTER_FILE, HOST)]
    )
    definitions = {name: _convert_to_draft7(part) for name, part in made["$defs"].items()}
    root: dict[str, Any] = definitions.pop("ClusterFile")
    _replace_schema(root["properties"], "hosts", _build_hosts_schema())
    patterns = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    _replace_schema(root["properties"], "results", {"anyOf": [*patterns, _ref("ResultsModel")]})
    head: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "clusterctl cluster file"}
    return head | root | {"definitions": dict(sorted(definitions.items()))}


def render_schema() -> str:
    """Return the text of `docs/cluster.schema.json`."""
    return json.dumps(build_schema(), indent=2, ensure_ascii=False) + "\n"


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{name}"}


def _build_hosts_schema() -> dict[str, Any]:
    gpus = _ref("DefaultsModel/properties/gpus")
    keyed = {"anyOf": [gpus, _ref("DefaultsModel"), {"type": "null"}]}
    item = {"anyOf": [{"type": "string"}, _ref("HostModel")]}
    argv = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    sources = [
        {"const": "slurm"},
        _build_single_key_schema("file", {"type": "string"}),
        _build_single_key_schema("command", argv),
    ]
    return {
        "anyOf": [
            {"type": "string", "title": "hosts and ranges separated by commas"},
            _build_single_key_schema("from", {"anyOf": sources}) | {"title": "hosts from Slurm, a file or a command"},
            {"type": "object", "title": "host or range: GPUs", "minProperties": 1, "additionalProperties": keyed},
            {"type": "array", "title": "list of hosts", "minItems": 1, "items": item},
        ]
    }


def _build_single_key_schema(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": False}


def _replace_schema(properties: dict[str, Any], key: str, schema: dict[str, Any]) -> None:
    properties[key] = {**schema, **{k: v for k, v in properties[key].items() if k in ("description", "examples")}}


def _convert_to_draft7(part: Any) -> Any:
    """Convert a part of a JSON Schema from version 2020-12 to draft-07."""
    if isinstance(part, list):
        return [_convert_to_draft7(item) for item in part]
    if not isinstance(part, dict):
        return part
    result = {
        key: _convert_member(key, value)
        for key, value in part.items()
        if not (key == "default" and value is None) and not (key == "title" and isinstance(value, str))
    }
    reference = result.get("$ref")
    if isinstance(reference, str):
        return _wrap_reference(result, reference)
    if result.get("additionalProperties") is False and "properties" in result:
        result["patternProperties"] = _EXTENSION
        required = result.get("required", ())
        fields = result["properties"].items()
        result["properties"] = {n: field if n in required else _allow_empty(field) for n, field in fields}
    return result


def _convert_member(key: str, value: Any) -> Any:
    """Convert a member of a schema. Values of the keys in `properties` may be variables."""
    if key != "properties" or not isinstance(value, dict):
        return _convert_to_draft7(value)
    return {name: _allow_variables(_convert_to_draft7(child)) for name, child in value.items()}


def _wrap_reference(result: dict[str, Any], reference: str) -> dict[str, Any]:
    """Wrap a `$ref` into an `allOf`, because draft-07 ignores all members beside a `$ref`."""
    del result["$ref"]
    target = {"$ref": reference.replace("#/$defs/", "#/definitions/")}
    return {"allOf": [target], **result} if result else target


def _allow_empty(schema: dict[str, Any]) -> dict[str, Any]:
    """Let a schema also allow an empty value, which has the same meaning as a missing key."""
    words, choices = _split_choices(schema)
    if len(choices) == 1 and set(choices[0]) == {"type"} and isinstance(choices[0]["type"], str):
        return {"type": [choices[0]["type"], "null"], **words}
    return {"anyOf": [*choices, {"type": "null"}], **words} if choices != [{}] else schema


def _split_choices(schema: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split the JSON Schema of a value into its documentation and its list of alternatives."""
    words = {key: value for key, value in schema.items() if key in ("description", "examples")}
    rest = {key: value for key, value in schema.items() if key not in words}
    return words, rest["anyOf"] if set(rest) == {"anyOf"} else rest["allOf"] if set(rest) == {"allOf"} else [rest]


def _allow_variables(schema: dict[str, Any]) -> dict[str, Any]:
    """Let the schema of a number, a word or a boolean also allow `${env:NAME}`."""
    words, choices = _split_choices(schema)
    scalars = {"integer", "number", "boolean"}
    takes_variables = any(choice.get("type") in scalars or "enum" in choice or "const" in choice for choice in choices)
    if takes_variables:
        return {"anyOf": [*choices, _VARIABLE], **words}
    return schema


_TABLE = re.compile(r"(<!-- keys: (.*?) -->\n)(?:\|.*\n)*")
_HEAD = "| key | value | default | |\n|---|---|---|---|\n"


def fill_key_tables(page: str) -> str:
    """Return the text of docs/cluster-file.md with updated tables of keys."""
    keys = dict(list_keys())

    def render_table(mark: re.Match[str]) -> str:
        rows = [
            _format_row(path, key) for glob in mark[2].split() for path, key in keys.items() if fnmatchcase(path, glob)
        ]
        return mark[1] + _HEAD + "".join(rows)

    return _TABLE.sub(render_table, page)


def list_keys() -> Iterator[tuple[str, SectionField]]:
    """Yield the path and the field of each key whose value is not a section."""
    yield from ((name, key) for name, key in CLUSTER_FILE.keys.items() if name == "defaults" or name not in MAPPINGS)
    for path, section in ({"hosts[]": HOST} | SECTIONS).items():
        if path != "defaults":
            yield from _list_keys_below(f"{path}.", section)


def _list_keys_below(path: str, section: Section) -> Iterator[tuple[str, SectionField]]:
    for name, key in section.keys.items():
        if isinstance(key.type, Section):
            yield from _list_keys_below(f"{path}{name}.", key.type)
        else:
            yield path + name, key
            each = find_entry_section(key.type)
            if each is not None:
                yield from _list_keys_below(f"{path}{name}.NAME.", each)


def _format_row(path: str, key: SectionField) -> str:
    default = "required" if key.required else key.default_text
    name, values = path.removeprefix("hosts[]."), _describe_values(key.type, key.field_type)
    return f"| `{name}` | {values} | {default} | {key.summary} |\n"


def _describe_values(annotation: Any, field_type: FieldType) -> str:
    """Return the accepted values of a type in words."""
    if field_type.none_word:
        return f"mapping or `{field_type.none_word}`"
    is_enum = isinstance(annotation, type) and issubclass(annotation, Enum)
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    words = field_type.choices or (tuple(word.value for word in annotation) if is_enum else choices)
    if field_type.syntax or words:
        return field_type.syntax or ", ".join(f"`{word}`" for word in words)
    if field_type.limits is not None:
        return f"{field_type.limits[0]} to {field_type.limits[1]}"
    if get_origin(annotation) is tuple:
        return f"list of {_describe_values(*split_annotation(get_args(annotation)[0]))}"
    if get_origin(annotation) is dict:
        return f"mapping to {_describe_values(*split_annotation(get_args(annotation)[1]))}".removesuffix(" to mapping")
    return {str: "text", bool: "`true`, `false`", float: "numbers"}.get(annotation, "mapping")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(fill_key_tables(target.read_text(encoding="utf-8")), encoding="utf-8")
