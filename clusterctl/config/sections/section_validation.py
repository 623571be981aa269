"""Validation of a section with pydantic; each error is reported at its position in the file.

The pydantic types have no defaults: a missing key keeps the default of the spec. Sections are normalized first, so that
one mistake gives one error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails
from typing_extensions import NotRequired, TypedDict

from clusterctl.config.field_types import FieldType
from clusterctl.config.sections.section_declarations import (
    CLUSTER_FILE,
    HOST,
    SECTIONS,
    Section,
    SectionField,
    find_entry_section,
    split_annotation,
)
from clusterctl.config.text.tree import KeyPath, Problems, TreeNode, format_path
from clusterctl.config.value_parsers import describe_value
from clusterctl.suggestion import find_similar

# Unknown keys are errors, and the text `"8"` is not accepted as a number.
_STRICT = ConfigDict(extra="forbid", strict=True)


@cache
def build_validator(section: Section) -> TypeAdapter[dict[str, Any]]:
    """Return the validator of a section. Validators are built at first use, because building is slow."""
    return TypeAdapter(_build_typed_dict(section))


@cache
def _build_typed_dict(section: Section) -> Any:
    # `Any` hides the call of `TypedDict` from mypy, which accepts only a literal dict as argument.
    typed_dict: Any = TypedDict
    made = typed_dict(section.title, {name: _build_field_annotation(key) for name, key in section.keys.items()})
    made.__doc__, made.__pydantic_config__ = section.summary, _STRICT
    return made


def _build_field_annotation(key: SectionField) -> Any:
    field_info = Field(description=key.description, examples=list(key.docs.examples))
    checked: Any = Annotated[_annotate_converters(key.type, key.field_type), field_info]
    return checked if key.required else NotRequired[checked]


def _annotate_converters(annotation: Any, field_type: FieldType) -> Any:
    checked = (
        _convert_annotation(annotation, field_type)
        if field_type.parse is None
        else Annotated[Any, PlainValidator(field_type.parse)]
    )
    if field_type.before_check is not None:
        checked = Annotated[checked, BeforeValidator(field_type.before_check)]
    if field_type.after_check is not None:
        checked = Annotated[checked, AfterValidator(field_type.after_check)]
    return checked if field_type.schema is None else Annotated[checked, WithJsonSchema(field_type.schema)]


def _convert_annotation(annotation: Any, field_type: FieldType) -> Any:
    """Convert a type of the spec to the pydantic type of the value in the file."""
    if isinstance(annotation, Section):
        typed_dict = _build_typed_dict(annotation)
        section: Any = Annotated[typed_dict, AfterValidator(lambda values: annotation.spec(**values))]
        return section | Literal[field_type.none_word] if field_type.none_word else section
    if field_type.choices:
        return Literal[field_type.choices]
    if field_type.limits is not None:
        return Annotated[int, Field(ge=field_type.limits[0], le=field_type.limits[1])]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Annotated[Literal[tuple(word.value for word in annotation)], AfterValidator(annotation)]
    if get_origin(annotation) is tuple:
        items: Any = _annotate_converters(*split_annotation(get_args(annotation)[0]))
        return Annotated[list[items], AfterValidator(_convert_to_tuple)]
    if get_origin(annotation) is dict:
        values: Any = _annotate_converters(*split_annotation(get_args(annotation)[1]))
        return dict[str, values]
    return annotation


def _convert_to_tuple(items: list[Any]) -> tuple[Any, ...]:
    # Pydantic inspects the signature of a validator, which takes 5 ms for the class `tuple`.
    return tuple(items)


def normalize_section(node: TreeNode, section: Section) -> TreeNode:
    """Remove known keys without a value, and convert scalars to text in keys that need it, such as `env`."""
    if not isinstance(node.value, dict):
        return node
    entries: dict[str, TreeNode] = {}
    for key, child in node.value.items():
        field = section.keys.get(key)
        if field is None:
            entries[key] = child
        elif child.value is not None:
            below = normalize_section(child, field.type) if isinstance(field.type, Section) else child
            each = find_entry_section(field.type)
            if each is not None and isinstance(child.value, dict):
                below = child.replace_entries({name: normalize_section(one, each) for name, one in child.value.items()})
            keep = _keep_scalar_as_text if field.type is str else keep_scalars_as_text
            entries[key] = keep(child) if field.field_type.scalars_as_text else below
    return node.replace_entries(entries)


def keep_scalars_as_text(node: TreeNode) -> TreeNode:
    """Return a mapping or list with its scalars as text: the number `1e-3` becomes the text `1e-3`."""
    if isinstance(node.value, dict):
        return node.replace_entries({key: _keep_scalar_as_text(child) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return TreeNode([_keep_scalar_as_text(child) for child in node.value], node.mark)
    return node


def _keep_scalar_as_text(node: TreeNode) -> TreeNode:
    if node.raw is None or node.value is None:
        return node
    return TreeNode(node.raw, node.mark, raw=node.raw, quoted=node.quoted)


# Keys of other tools, each with the key of a cluster file that has the same meaning.
_ALIASES = {
    "cmd": "command",
    "command_args": "args",
    "entrypoint": "script",
    "envs": "env",
    "environment": "env",
    "gpu": "gpus",
    "hostname": "host",
    "identity": "identity_file",
    "ip": "address",
    "key_file": "identity_file",
    "node": "host",
    "nodes": "hosts",
    "nproc_per_node": "workers",
    "private_key": "identity_file",
    "processes": "workers",
    "run": "command",
    "slots": "gpus",
    "ssh_key": "identity_file",
    "ssh_port": "port",
    "ssh_private_key": "identity_file",
    "ssh_user": "user",
    "username": "user",
    "working_dir": "workdir",
}
_HINTS = {
    "conda": "make the environment with conda on this machine: `environment: {venv: ~/miniforge3/envs/llm}` copies it "
    "to the nodes",
}
"""Hints for keys that no cluster file has."""


def validate_section(section: Section, node: TreeNode, path: KeyPath, report: Problems) -> dict[str, Any] | None:
    """Return the values of a section for the spec; on errors, report them and return `None`."""
    shaped = normalize_section(node, section)
    try:
        return build_validator(section).validate_python(shaped.to_plain_value())
    except ValidationError as error:
        details = error.errors(include_url=False)
        meant = _list_intended_keys(details, section)
        for detail in details:
            if detail["type"] != "missing" or (detail["loc"][:-1], detail["loc"][-1]) not in meant:
                _report_error(detail, shaped, path, section, report)
        return None


def _list_intended_keys(details: Iterable[ErrorDetails], section: Section) -> set[tuple[KeyPath, int | str]]:
    """Return the known keys that the file probably contains misspelt, because they are not reported as missing too."""
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    return {
        (loc[:-1], near)
        for loc in unknown
        if (near := find_similar_key(str(loc[-1]), _list_fields_at(section, loc[:-1])))
    }


def _report_error(detail: ErrorDetails, root: TreeNode, path: KeyPath, section: Section, report: Problems) -> None:
    loc = detail["loc"]
    parent, node, inner = _find_node(root, loc)
    kind = detail["type"]
    if kind == "extra_forbidden":
        key = str(loc[-1])
        fields = _list_fields_at(section, loc[:-1])
        report.add(parent.key_mark(key), f"{format_path((*path, *loc))}: unknown key", suggest_key(key, fields))
    elif kind == "missing":
        at = parent.key_mark(loc[-2]) if len(loc) > 1 else node.mark
        report.add(at, f"{format_path((*path, *loc[:-1]))}: the key `{loc[-1]}` is missing")
    elif node.value is not None or node.raw is not None:
        # For a node without value and text, interpolation has already reported an error.
        text, hint = _describe_error(detail, node, str(loc[-1]) if loc else "")
        report.add(node.mark, f"{format_path((*path, *inner))}: {text}", hint)


def _find_node(root: TreeNode, loc: tuple[int | str, ...]) -> tuple[TreeNode, TreeNode, KeyPath]:
    """Return the parent node, the node and the path of a pydantic error; there may be no node at `loc`."""
    parent = node = root
    inner: list[int | str] = []
    for part in loc:
        below = node.child(part)
        if below is None:
            # The key is missing, so return the mapping that lacks the key.
            return node, node, tuple(inner)
        parent, node = node, below
        inner.append(part)
    return parent, node, tuple(inner)


def _list_fields_at(section: Section, loc: tuple[int | str, ...]) -> Iterable[str]:
    for part in loc:
        field = section.keys.get(str(part))
        if field is not None:
            section = field.type if isinstance(field.type, Section) else find_entry_section(field.type) or section
    return section.keys


def suggest_key(key: str, fields: Iterable[str]) -> str | None:
    """Return a hint for an unknown key: a similar key, or the section of the key."""
    names = list(fields)
    if key in _HINTS:
        return _HINTS[key]
    meant = find_similar_key(key, names)
    if meant is not None:
        return f"did you mean `{meant}`?"
    sections = {"job": SECTIONS["job"], "hosts[]": HOST, "defaults": SECTIONS["defaults"]} | SECTIONS
    homes = [f"`{name}`" for name, home in sections.items() if key in home.keys][:2]
    if key in CLUSTER_FILE.keys:
        homes.append("the top level, without indentation")
    if homes:
        return f"`{key}` is a key of {' or '.join(homes)}"
    return f"known keys: {', '.join(names)}" if len(names) <= 16 else None


def find_similar_key(key: str, fields: Iterable[str]) -> str | None:
    """Return the known key that is most similar to an unknown key, or `None`."""
    names, word = list(fields), key.lower().replace("-", "_")
    alias = _ALIASES.get(word)
    if alias in names:
        return alias
    completions = [name for name in names if len(word) >= 3 and name.startswith(word)]
    if len(completions) == 1:
        return completions[0]
    return find_similar(word, names, 0.65)


def _describe_error(detail: ErrorDetails, node: TreeNode, key: str) -> tuple[str, str | None]:
    kind = detail["type"]
    if node.value is None and kind in _TYPES:
        return "has no value", _suggest_type_fix(kind, node, key)
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind == "value_error":
        error = context["error"]
        return str(error), getattr(error, "hint", None)
    if kind == "literal_error":
        return _describe_choices(str(context["expected"]), node)
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind]} {next(iter(context.values()))}, not {describe_value(node.value)}", None
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {describe_value(node.value)}", _suggest_type_fix(kind, node, key)
    return str(detail["msg"]), None


_LIMITS = {"greater_than_equal": "at least", "less_than_equal": "at most", "greater_than": "more than"}
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "`true` or `false`",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _describe_choices(expected: str, node: TreeNode) -> tuple[str, str | None]:
    words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    shown_words = " or ".join(filter(None, [", ".join(f"`{w}`" for w in words[:-1]), f"`{words[-1]}`"]))
    close = find_similar(str(node.value).lower(), words, 0.5)
    return f"must be {shown_words}, not {describe_value(node.value)}", f"did you mean `{close}`?" if close else None


def _suggest_type_fix(kind: str, node: TreeNode, key: str) -> str | None:
    raw = node.raw or ""
    if kind == "string_type":
        if node.value is None:
            return 'write `""` for empty text'
        return f'put it in quotes: "{raw}"' if node.raw is not None else None
    if kind in ("int_type", "float_type") and node.quoted and raw.strip().isdigit():
        return "remove the quotes"
    if kind == "bool_type" and raw.lower() in ("yes", "on", "no", "off"):
        return f"write `{'true' if raw.lower() in ('yes', 'on') else 'false'}`"
    if kind == "list_type" and isinstance(node.value, str):
        return f"write `{key}: [{', '.join(map(json.dumps, raw.split()))}]`"
    if kind == "list_type" and node.raw is not None:
        return f"write `{key}: [{raw}]`"
    if kind == "dict_type" and key == "env" and isinstance(node.value, list):
        return "write `NAME: value` lines, without `- `"
    return None
