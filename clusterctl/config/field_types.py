"""Types of the values in a cluster file. A type describes how to parse, write and document its values.

`clusterctl.config.spec` assigns a type to each key. This module does not import pydantic, so the spec loads fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

from clusterctl.config import value_parsers
from clusterctl.config.value_parsers import (
    COMMAND_HINT,
    DURATION_PATTERN,
    SIZE_PATTERN,
    InvalidValueError,
    describe_value,
    format_exact_duration,
    format_exact_size,
    parse_duration,
    parse_size,
)

Converter = Callable[[object], Any]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FieldType:
    """A type of values, and the conversion of its values between cluster file and spec.

    Attributes:
        syntax: The accepted values in words, for the tables of keys; empty if the Python type determines them.
        parse: A function that converts the value of the file to the value of the spec, in place of pydantic.
        before_check: A function that checks or converts the value of the file before pydantic checks its type.
        after_check: A function that converts the value after pydantic has checked its type.
        unparse: A function that converts a value of the spec back to the value of a file.
        schema: JSON Schema for editors; with `None`, pydantic makes it from the Python type.
        limits: The smallest and the largest accepted number.
        choices: The accepted words; empty for any text.
        none_word: A word that a file may have in place of a section; it means `None`.
        scalars_as_text: Whether scalars become text as written: the number `1e-3` becomes the text `1e-3`.
    """

    syntax: str = ""
    parse: Converter | None = None
    before_check: Converter | None = None
    after_check: Converter | None = None
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


class IdleAction(str, Enum):
    """The reaction to a run whose GPUs are idle."""

    REPORT = "report"
    END = "end"


class AvoidedNodes(str, Enum):
    """The nodes that a run takes last."""

    NONE = "none"
    REPEAT_OFFENDERS = "repeat_offenders"


class ResumePolicy(str, Enum):
    """The checkpoints from which an attempt may resume."""

    NEVER = "never"
    THIS_RUN = "this run"
    ANY = "any"


class ResultsFetchCondition(str, Enum):
    """The outcomes of a run after which results are fetched."""

    SUCCESS = "success"
    ALWAYS = "always"


class KeyDocs:
    """Documentation of a key that the docstring of its class does not contain.

    Attributes:
        examples: Valid values.
        unset_text: The effect of a missing key in words, if the default value does not show it.
    """

    __slots__ = ("examples", "unset_text")

    def __init__(self, *examples: Any, unset_text: str = "") -> None:
        self.examples, self.unset_text = examples, unset_text


def _parse_value(field_type: FieldType, value: object) -> Any:
    assert field_type.parse is not None
    return field_type.parse(value)


def _require_positive(field_type: FieldType) -> FieldType:
    def parse(value: object) -> Any:
        number = _parse_value(field_type, value)
        if number <= 0:
            raise InvalidValueError("must be more than 0")
        return number

    return replace(field_type, syntax=field_type.syntax.removesuffix(" or 0"), parse=parse)


def _accept_word(field_type: FieldType, word: str) -> FieldType:
    """Return a type that also accepts a word, which means `None`."""
    form = field_type.schema or {}
    return replace(
        field_type,
        syntax=f"{field_type.syntax}{',' if ',' in field_type.syntax else ''} or `{word}`",
        parse=lambda value: None if value == word else _parse_value(field_type, value),
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


def _parse_node_counts(value: object) -> tuple[int, int]:
    words = value.split("..") if isinstance(value, str) else []
    if len(words) == 2 and all(word.isdecimal() for word in words):
        lowest, highest = (_parse_count(int(word), "a number of nodes", 1) for word in words)
        if lowest > highest:
            raise InvalidValueError(f"{describe_value(value)} has its larger number first", f"`{highest}..{lowest}`")
        return lowest, highest
    count = _parse_count(value, "a number of nodes, or a range such as `2..4`", 1)
    return count, count


def _parse_gpus(value: object) -> int | tuple[int, ...]:
    if not isinstance(value, list):
        return _parse_count(value, "a count, a list of indices, or `auto`", 0)
    indices = tuple(_parse_count(item, "a list of device indices", 0) for item in value)
    if not indices:
        raise InvalidValueError("must not be an empty list", "write `gpus: 0` for no GPU")
    if len(set(indices)) < len(indices):
        raise InvalidValueError("contains a device twice")
    return indices


def _parse_command(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and "\r" in value:
        raise InvalidValueError("has Windows line ends, which bash does not accept", "remove each `\\r` from the text")
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and None in value:
        # Interpolation has already reported an error of this item.
        return ()
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise InvalidValueError("must be a shell command as text, or a list of program and arguments")


def _check_interpreter(value: object) -> object:
    """Raise an error if the value is a folder, or a command line instead of one program."""
    words = value.split() if isinstance(value, str) else []
    if any("/" not in word for word in words[1:]) or words[:1] in (["source"], ["."]):
        hint = "write the path of a Python, such as `.venv/bin/python`; a command line belongs in `job.command`"
        raise InvalidValueError(f"{describe_value(value)} is a command, not the path of one program", hint)
    if isinstance(value, str) and value.endswith("/"):
        hint = f"write the path of its interpreter: `{value}bin/python`"
        raise InvalidValueError(f"{describe_value(value)} is a folder", hint)
    return value


def _check_secret_source(value: object) -> object:
    """Raise an error, which does not contain the value, unless the value is a mapping with one key."""
    if not isinstance(value, dict):
        hint = "write `{env: NAME}` or `{file: PATH}`; a cluster file must not contain secrets"
        raise InvalidValueError("must be a mapping, not the value itself", hint)
    if len(value) != 1:
        raise InvalidValueError("needs exactly one of `env`, `file`")
    return value


def _check_python_version(value: object) -> object:
    """Raise an error if the value is not a minor version of Python 3."""
    if not isinstance(value, str) or not re.fullmatch(r"3\.\d{1,2}", value):
        hint = "the path of a Python on the nodes is `python` of a host, or of `defaults` for all hosts"
        raise InvalidValueError(f"{describe_value(value)} is not a version such as `3.11`", hint)
    return value


def build_transport_type(enum: type[Enum]) -> FieldType:
    """Return the type of a transport: a word of `enum`, or a mapping whose `command` is a list of words."""
    by_word = {word.value: word for word in enum}

    def parse(value: object) -> Any:
        if isinstance(value, str) and value in by_word:
            return by_word[value]
        if isinstance(value, dict) and [*value] == ["command"]:
            return value_parsers.parse_transport_command(value["command"])
        raise InvalidValueError(
            f"must be {', '.join(f'`{word}`' for word in by_word)} or a mapping with the key `command`", COMMAND_HINT
        )

    argv = {"type": "array", "minItems": 1, "items": _TEXT_SCHEMA}
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


_TEXT_SCHEMA: dict[str, Any] = {"type": "string"}
_COUNT_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": _MAX_DEVICES}
_SCALAR_SCHEMA: dict[str, Any] = {"type": ["string", "number", "boolean"]}
_MESSAGE_EVENTS = ("start", "failure", "stall", "restart", "node", "end")
_CAUSES = ("crash", "stall", "node_lost", "unhealthy")
_PORT_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}


def _item_or_list_schema(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [item, {"type": "array", "items": item}]}


def _build_quantity_type(noun: str, json_type: str, pattern: str, parse: Converter, unparse: Any) -> FieldType:
    forms = [{"type": json_type, "minimum": 0}, {"type": "string", "pattern": pattern}]
    return FieldType(syntax=f"{noun} or 0", parse=parse, unparse=unparse, schema={"anyOf": forms})


_DURATION = _build_quantity_type("duration", "number", DURATION_PATTERN, parse_duration, format_exact_duration)
_SIZE = _build_quantity_type("size", "integer", SIZE_PATTERN, parse_size, format_exact_size)
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
_NODE_COUNTS = FieldType(
    syntax="count, or `A..B`",
    parse=_parse_node_counts,
    unparse=lambda counts: counts and (counts[0] if counts[0] == counts[1] else f"{counts[0]}..{counts[1]}"),
    schema={"anyOf": [_COUNT_SCHEMA | {"minimum": 1}, {"type": "string", "pattern": r"^[0-9]+\.\.[0-9]+$"}]},
)
_PORT = FieldType(
    syntax="port", parse=lambda value: _parse_count(value, "a port or `auto`", 1, 65535), schema=_PORT_SCHEMA
)

Duration = Annotated[float, _DURATION]
PositiveDuration = Annotated[float, _require_positive(_DURATION)]
DurationOrNone = Annotated[float | None, _accept_word(_require_positive(_DURATION), "none")]
DurationOrAuto = Annotated[float | None, _accept_word(_require_positive(_DURATION), "auto")]
Size = Annotated[int, _require_positive(_SIZE)]
SizeOrZero = Annotated[int, _SIZE]
SizeOrNone = Annotated[int | None, _accept_word(_require_positive(_SIZE), "none")]
Port = Annotated[int, FieldType(limits=(1, 65535))]
PortOrAuto = Annotated[int | None, _accept_word(_PORT, "auto")]
Gpus = Annotated[int | tuple[int, ...] | None, _accept_word(_GPUS, "auto")]
NodeCounts = Annotated[tuple[int, int], _NODE_COUNTS]
Workers = Annotated[int | None, _accept_word(_WORKERS, "auto")]
_INTERFACE = FieldType(
    syntax="name or `auto`",
    after_check=lambda name: None if name == "auto" else name,
    unparse=lambda name: name or "auto",
)
Interface = Annotated[str | None, _INTERFACE]
NodeCount = Annotated[int, FieldType(limits=(1, 1024))]
ConnectionCount = Annotated[int, FieldType(limits=(1, 1024))]
RestartCount = Annotated[int, FieldType(limits=(0, 1000))]
ExitCodes = tuple[Annotated[int, FieldType(limits=(0, 255))], ...]
Texts = Annotated[
    tuple[str, ...],
    FieldType(syntax="text or list of texts", before_check=_wrap_in_list, schema=_item_or_list_schema(_TEXT_SCHEMA)),
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
        schema={"anyOf": [_TEXT_SCHEMA, {"type": "array", "minItems": 1, "items": _SCALAR_SCHEMA}]},
        scalars_as_text=True,
    ),
]


def _build_words_type(words: tuple[str, ...]) -> FieldType:
    return FieldType(before_check=_wrap_in_list, schema=_item_or_list_schema({"enum": [*words]}))


RestartCauses = Annotated[tuple[Annotated[str, FieldType(choices=_CAUSES)], ...], _build_words_type(_CAUSES)]
MessageEvents = Annotated[
    tuple[Annotated[str, FieldType(choices=_MESSAGE_EVENTS)], ...], _build_words_type(_MESSAGE_EVENTS)
]
MessageCount = Annotated[int, FieldType(limits=(1, 1000))]
SecretSource = FieldType(syntax="`{env: NAME}` or `{file: PATH}`", before_check=_check_secret_source)
StopSignal = Annotated[str, FieldType(choices=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"))]
Severities = dict[str, Annotated[str, FieldType(choices=("fail", "warn", "ignore"))]]
Interpreter = Annotated[str, FieldType(before_check=_check_interpreter)]
PythonVersion = Annotated[
    str,
    FieldType(
        syntax="version",
        before_check=_check_python_version,
        schema={"anyOf": [_TEXT_SCHEMA, {"type": "number"}]},
        scalars_as_text=True,
    ),
]
SshWord = Annotated[str, FieldType(before_check=value_parsers.check_ssh_argument)]
SshUser = Annotated[str, FieldType(before_check=value_parsers.check_user_name)]
SshHops = Annotated[str, FieldType(syntax="hosts separated by commas", before_check=value_parsers.check_proxy_jump)]
SshFile = Annotated[str, FieldType(syntax="file", before_check=value_parsers.check_ssh_path)]
SshFiles = Annotated[
    tuple[SshFile, ...],
    FieldType(syntax="file or list of files", before_check=_wrap_in_list, schema=_item_or_list_schema(_TEXT_SCHEMA)),
]
