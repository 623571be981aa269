"""Types of the values in a cluster file: how each one is parsed, written back and described.

`clusterctl.config.spec` assigns a type to each key. This module does not need pydantic, so the spec is cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

from clusterctl.config import value_parsers
from clusterctl.config.value_parsers import COMMAND_HINT, InvalidValueError, describe_value

Converter = Callable[[object], Any]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FieldType:
    """How values of a type are written in a cluster file.

    Attributes:
        syntax: What people write, for the tables of keys; empty if the type says it.
        parse: Makes a value from what was written, in place of a check of the type.
        before_validation: Checks or converts what was written, before the check of the type.
        after_validation: Converts a value of the right type.
        unparse: Returns what a cluster file would contain for a value.
        schema: JSON Schema for editors; `None` for the one of the type.
        limits: The smallest and the largest number.
        choices: The accepted words.
        none_word: The word that a file has in place of a section, for `None`.
        scalars_as_text: Whether scalars stay text: `1e-3` stays `1e-3`, `yes` stays `yes`.
    """

    syntax: str = ""
    parse: Converter | None = None
    before_validation: Converter | None = None
    after_validation: Converter | None = None
    unparse: Callable[[Any], Any] | None = None
    schema: dict[str, Any] | None = None
    limits: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()
    none_word: str = ""
    scalars_as_text: bool = False


class StartMethod(str, Enum):
    """How a node starts its workers."""

    SPAWN = "spawn"
    FORK = "fork"
    AUTO = "auto"


class StallAction(str, Enum):
    """The reaction to a confirmed stall."""

    REPORT = "report"
    STOP = "stop"
    RESTART = "restart"


class ResumePolicy(str, Enum):
    """Which checkpoints an attempt may resume from."""

    NEVER = "never"
    THIS_RUN = "this run"
    ANY = "any"


class ResultsFetchCondition(str, Enum):
    """The outcomes of a run after which results are fetched."""

    SUCCESS = "success"
    ALWAYS = "always"


class KeyDocs:
    """Documentation of a key, besides its sentence in the docstring of its class.

    Attributes:
        examples: Values as a person may write them.
        unset_text: What holds without the key, if the default does not say it.
    """

    __slots__ = ("examples", "unset_text")

    def __init__(self, *examples: Any, unset_text: str = "") -> None:
        self.examples, self.unset_text = examples, unset_text


def _parse(field_type: FieldType, value: object) -> Any:
    assert field_type.parse is not None
    return field_type.parse(value)


def _require_positive(field_type: FieldType) -> FieldType:
    def parse(value: object) -> Any:
        number = _parse(field_type, value)
        if number <= 0:
            raise InvalidValueError("must be more than 0")
        return number

    return replace(field_type, syntax=field_type.syntax.removesuffix(" or 0"), parse=parse)


def _accept_word(field_type: FieldType, word: str) -> FieldType:
    """Accept a word in place of `None`."""
    form = field_type.schema or {}
    return replace(
        field_type,
        syntax=f"{field_type.syntax}{',' if ',' in field_type.syntax else ''} or `{word}`",
        parse=lambda value: None if value == word else _parse(field_type, value),
        unparse=lambda value: word if value is None else field_type.unparse(value) if field_type.unparse else value,
        schema={"anyOf": [*form.get("anyOf", [form]), {"const": word}]},
    )


_MAX_DEVICES = 1024


def _parse_count(value: object, expected: str, minimum: int, maximum: int = _MAX_DEVICES) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError(f"must be {expected}, not {describe_value(value)}")
    if not minimum <= value <= maximum:
        raise InvalidValueError(f"must be between {minimum} and {maximum}, not {describe_value(value)}")
    return value


def _parse_gpus(value: object) -> int | tuple[int, ...]:
    if not isinstance(value, list):
        return _parse_count(value, "a count, a list of indices, or `auto`", 0)
    indices = tuple(_parse_count(item, "a list of device indices", 0) for item in value)
    if not indices:
        raise InvalidValueError("an empty list of devices", "write `gpus: 0` for none")
    if len(set(indices)) < len(indices):
        raise InvalidValueError("lists a device twice")
    return indices


def _parse_command(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and "\r" in value:
        raise InvalidValueError("has the line ends of Windows, at which bash fails", "take the `\\r` out of the text")
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and None in value:
        # The interpolation has already reported it.
        return ()
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise InvalidValueError("must be a shell command, or a list of program and arguments")


def _check_interpreter(value: object) -> object:
    """Refuse folders, and commands that only a shell could run."""
    words = value.split() if isinstance(value, str) else []
    if any("/" not in word for word in words[1:]) or words[:1] in (["source"], ["."]):
        hint = "name its interpreter, such as `.venv/bin/python`; `job.command` runs a command"
        raise InvalidValueError(f"{describe_value(value)} is a command, not the path of one program", hint)
    if isinstance(value, str) and value.endswith("/"):
        hint = f"name the interpreter in it: `{value}bin/python`"
        raise InvalidValueError(f"{describe_value(value)} is a folder", hint)
    return value


def build_transport_type(enum: type[Enum]) -> FieldType:
    """Return the type of a transport: a word of the enum, or a command as a list of words."""
    by_word = {word.value: word for word in enum}

    def parse(value: object) -> Any:
        if isinstance(value, str) and value in by_word:
            return by_word[value]
        if isinstance(value, dict) and [*value] == ["command"]:
            return value_parsers.parse_transport_command(value["command"])
        raise InvalidValueError(
            f"must be {', '.join(f'`{word}`' for word in by_word)} or a mapping with the key `command`", COMMAND_HINT
        )

    argv = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    keyed = {"type": "object", "properties": {"command": argv}, "required": ["command"], "additionalProperties": False}
    return FieldType(
        syntax=", ".join(f"`{word}`" for word in by_word) + " or `command:` with a list",
        parse=parse,
        unparse=lambda value: {"command": [*value]} if isinstance(value, tuple) else value.value,
        schema={"anyOf": [{"enum": [*by_word]}, keyed]},
    )


def _wrap_in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _convert_tuple_to_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_COUNT_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": _MAX_DEVICES}
_SCALAR_SCHEMA: dict[str, Any] = {"type": ["string", "number", "boolean"]}
_CAUSES = ("crash", "stall", "node_lost", "unhealthy")
_PORT_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}


def _item_or_list_schema(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [item, {"type": "array", "items": item}]}


def _build_quantity_type(
    noun: str, json_type: str, pattern: str, parse: Converter, unparse: Callable[[Any], str]
) -> FieldType:
    forms = [{"type": json_type, "minimum": 0}, {"type": "string", "pattern": pattern}]
    return FieldType(syntax=f"{noun} or 0", parse=parse, unparse=unparse, schema={"anyOf": forms})


_DURATION = _build_quantity_type(
    "duration",
    "number",
    value_parsers.DURATION_PATTERN,
    value_parsers.parse_duration,
    value_parsers.format_exact_duration,
)
_SIZE = _build_quantity_type(
    "size", "integer", value_parsers.SIZE_PATTERN, value_parsers.parse_size, value_parsers.format_exact_size
)
_INDICES_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "uniqueItems": True, "items": _COUNT_SCHEMA}
_GPUS = FieldType(
    syntax="count, list of indices",
    parse=_parse_gpus,
    unparse=_convert_tuple_to_list,
    schema={"anyOf": [_COUNT_SCHEMA, _INDICES_SCHEMA]},
)
_WORKERS = FieldType(
    syntax="count",
    parse=lambda value: _parse_count(value, "a count or `auto`", 1),
    schema=_COUNT_SCHEMA | {"minimum": 1},
)

Duration = Annotated[float, _DURATION]
PositiveDuration = Annotated[float, _require_positive(_DURATION)]
DurationOrNone = Annotated[float | None, _accept_word(_require_positive(_DURATION), "none")]
DurationOrAuto = Annotated[float | None, _accept_word(_require_positive(_DURATION), "auto")]
Size = Annotated[int, _require_positive(_SIZE)]
SizeOrZero = Annotated[int, _SIZE]
SizeOrNone = Annotated[int | None, _accept_word(_require_positive(_SIZE), "none")]
Port = Annotated[int, FieldType(limits=(1, 65535))]
PortOrAuto = Annotated[
    int | None,
    _accept_word(
        FieldType(
            syntax="port", parse=lambda value: _parse_count(value, "a port or `auto`", 1, 65535), schema=_PORT_SCHEMA
        ),
        "auto",
    ),
]
Gpus = Annotated[int | tuple[int, ...] | None, _accept_word(_GPUS, "auto")]
Workers = Annotated[int | None, _accept_word(_WORKERS, "auto")]
Interface = Annotated[
    str | None,
    FieldType(
        syntax="name or `auto`",
        after_validation=lambda name: None if name == "auto" else name,
        unparse=lambda name: name or "auto",
    ),
]
ConnectionCount = Annotated[int, FieldType(limits=(1, 1024))]
RestartCount = Annotated[int, FieldType(limits=(0, 1000))]
ExitCodes = tuple[Annotated[int, FieldType(limits=(0, 255))], ...]
Texts = Annotated[
    tuple[str, ...],
    FieldType(
        syntax="text or list of texts", before_validation=_wrap_in_list, schema=_item_or_list_schema({"type": "string"})
    ),
]
Args = Annotated[
    tuple[str, ...], FieldType(syntax="list", schema={"type": "array", "items": _SCALAR_SCHEMA}, scalars_as_text=True)
]
Env = Annotated[
    dict[str, str],
    FieldType(
        syntax="mapping", schema={"type": "object", "additionalProperties": _SCALAR_SCHEMA}, scalars_as_text=True
    ),
]
Command = Annotated[
    str | tuple[str, ...] | None,
    FieldType(
        syntax="text or list",
        parse=_parse_command,
        unparse=_convert_tuple_to_list,
        schema={"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _SCALAR_SCHEMA}]},
        scalars_as_text=True,
    ),
]
RestartCauses = Annotated[
    tuple[Annotated[str, FieldType(choices=_CAUSES)], ...],
    FieldType(before_validation=_wrap_in_list, schema=_item_or_list_schema({"enum": [*_CAUSES]})),
]
StopSignal = Annotated[str, FieldType(choices=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"))]
Severities = dict[str, Annotated[str, FieldType(choices=("fail", "warn", "ignore"))]]
Interpreter = Annotated[str, FieldType(before_validation=_check_interpreter)]
SshWord = Annotated[str, FieldType(before_validation=value_parsers.check_ssh_argument)]
SshUser = Annotated[str, FieldType(before_validation=value_parsers.check_user_name)]
SshHops = Annotated[str, FieldType(syntax="hosts, with `,` between", before_validation=value_parsers.check_proxy_jump)]
SshFile = Annotated[str, FieldType(syntax="file", before_validation=value_parsers.check_ssh_path)]
SshFiles = Annotated[
    tuple[SshFile, ...],
    FieldType(
        syntax="file or list of files", before_validation=_wrap_in_list, schema=_item_or_list_schema({"type": "string"})
    ),
]
