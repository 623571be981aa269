"""The JSON Schema of cluster files for editors, made from the section fields.

It is draft-07, because yaml-language-server reads no newer one. A variable may fill in each value, so the schema
allows `${env:NAME}` too for each value that is not text.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from clusterctl.config.sections.section_fields import CLUSTER_FILE, CONTROLLER_LOSS, DEFAULTS, HOST, RESULTS, SYNC
from clusterctl.config.sections.section_validation import build_validator

_VARIABLE = {"type": "string", "pattern": r"\$\{env:"}
_EXTENSION: dict[str, Any] = {"^x-": {}}


def build_schema() -> dict[str, Any]:
    """Return the schema as JSON data."""
    sections = (CLUSTER_FILE, DEFAULTS, HOST, SYNC, RESULTS, CONTROLLER_LOSS)
    made: dict[str, Any]
    _, made = TypeAdapter.json_schemas(
        [(section.title, "validation", build_validator(section)) for section in sections]
    )
    definitions = {name: _convert_to_draft7(part) for name, part in made["$defs"].items()}
    root: dict[str, Any] = definitions.pop("ClusterFile")
    _describe(root["properties"], "hosts", _hosts_schema())
    _describe(root["properties"], "sync", {"anyOf": [{"const": "none"}, _ref("SyncModel")]})
    patterns = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    _describe(root["properties"], "results", {"anyOf": [*patterns, _ref("ResultsModel")]})
    loss = {"anyOf": [{"const": "keep"}, _ref("ControllerLossModel")]}
    _describe(root["properties"], "on_controller_loss", loss)
    head: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "clusterctl cluster file"}
    return head | root | {"definitions": dict(sorted(definitions.items()))}


def render_schema() -> str:
    """Return the text of `docs/cluster.schema.json`."""
    return json.dumps(build_schema(), indent=2, ensure_ascii=False) + "\n"


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{name}"}


def _hosts_schema() -> dict[str, Any]:
    gpus = _ref("DefaultsModel/properties/gpus")
    keyed = {"anyOf": [gpus, _ref("DefaultsModel"), {"type": "null"}]}
    item = {"anyOf": [{"type": "string"}, _ref("HostModel")]}
    argv = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    sources = [{"const": "slurm"}, _single_key_schema("file", {"type": "string"}), _single_key_schema("command", argv)]
    return {
        "anyOf": [
            {"type": "string", "title": "hosts and ranges, separated by commas"},
            _single_key_schema("from", {"anyOf": sources}) | {"title": "hosts from elsewhere"},
            {"type": "object", "title": "host or range: GPUs", "minProperties": 1, "additionalProperties": keyed},
            {"type": "array", "title": "list of hosts", "minItems": 1, "items": item},
        ]
    }


def _single_key_schema(key: str, shape: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: shape}, "required": [key], "additionalProperties": False}


def _describe(properties: dict[str, Any], key: str, shape: dict[str, Any]) -> None:
    properties[key] = {**shape, **{k: v for k, v in properties[key].items() if k in ("description", "examples")}}


def _convert_to_draft7(part: Any) -> Any:
    """Convert a part of a 2020-12 schema to draft-07."""
    if isinstance(part, list):
        return [_convert_to_draft7(item) for item in part]
    if not isinstance(part, dict):
        return part
    result = {key: _convert_member(key, value) for key, value in part.items() if not _is_unwanted(key, value)}
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
    """Convert a member: names of properties are not keywords, and their values may be empty or a variable."""
    if key != "properties" or not isinstance(value, dict):
        return _convert_to_draft7(value)
    return {name: _allow_variables(_convert_to_draft7(child)) for name, child in value.items()}


def _is_unwanted(key: str, value: Any) -> bool:
    return (key == "default" and value is None) or (key == "title" and isinstance(value, str))


def _wrap_reference(result: dict[str, Any], reference: str) -> dict[str, Any]:
    """Wrap a `$ref` into an `allOf`: in draft-07 it would hide the members beside it."""
    del result["$ref"]
    target = {"$ref": reference.replace("#/$defs/", "#/definitions/")}
    return {"allOf": [target], **result} if result else target


def _allow_empty(shape: dict[str, Any]) -> dict[str, Any]:
    """Allow a key without a value, which equals a missing key."""
    words, choices = _split_choices(shape)
    if len(choices) == 1 and set(choices[0]) == {"type"} and isinstance(choices[0]["type"], str):
        return {"type": [choices[0]["type"], "null"], **words}
    return {"anyOf": [*choices, {"type": "null"}], **words} if choices != [{}] else shape


def _split_choices(shape: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split a shape into its documentation and the forms that it allows."""
    words = {key: value for key, value in shape.items() if key in ("description", "examples")}
    rest = {key: value for key, value in shape.items() if key not in words}
    return words, rest["anyOf"] if set(rest) == {"anyOf"} else rest["allOf"] if set(rest) == {"allOf"} else [rest]


def _allow_variables(shape: dict[str, Any]) -> dict[str, Any]:
    """Allow `${env:NAME}` for numbers, words and booleans."""
    words, choices = _split_choices(shape)
    scalars = {"integer", "number", "boolean"}
    wanting = any(choice.get("type") in scalars or "enum" in choice or "const" in choice for choice in choices)
    if wanting:
        return {"anyOf": [*choices, _VARIABLE], **words}
    return shape
