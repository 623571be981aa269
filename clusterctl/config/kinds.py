"""How people write the values of a cluster file: what each kind of them is read by, written back by, and called.

`clusterctl.config.spec` says of each key which kind it is. Nothing here needs pydantic, so that the spec costs little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

from clusterctl.config import units, words
from clusterctl.config.words import COMMAND_HINT
from clusterctl.config.wrong import WrongValueError, shown

Check = Callable[[object], Any]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Kind:
    """What a type alone does not say of how its values are written.

    Attributes:
        words: What people write, for the page of keys; empty for what the type says.
        parse: Makes a value of what was written, instead of a check of the type.
        before: Looks at what was written before the type is checked.
        after: Makes a value of what has the right type.
        show: Writes a value back.
        schema: The shape for editors; `None` for that of the type.
        limits: The least and the greatest number.
        choices: The words that there are.
        as_written: Whether scalars are taken as text: `1e-3` stays `1e-3`, `yes` stays `yes`.
    """

    words: str = ""
    parse: Check | None = None
    before: Check | None = None
    after: Check | None = None
    show: Callable[[Any], Any] | None = None
    schema: dict[str, Any] | None = None
    limits: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()
    as_written: bool = False


class StartMethod(str, Enum):
    """How the workers of a node come to be."""

    SPAWN = "spawn"
    FORK = "fork"
    AUTO = "auto"


class StallAction(str, Enum):
    """What happens to a run that is confirmed as stalled."""

    REPORT = "report"
    STOP = "stop"
    RESTART = "restart"


class Resume(str, Enum):
    """Which checkpoints an attempt may go on from."""

    NEVER = "never"
    THIS_RUN = "this run"
    ANY = "any"


class When(str, Enum):
    """After which ends of a run something is done."""

    SUCCESS = "success"
    ALWAYS = "always"


class Key:
    """What is said of a key.

    Attributes:
        about: A sentence; `(default)` in it names the default, which is told at its end otherwise.
        examples: Values as a person may write them.
        unset: What holds without the key, where the default itself does not say it.
    """

    __slots__ = ("about", "examples", "unset")

    def __init__(self, about: str, *examples: Any, unset: str = "") -> None:
        self.about, self.examples, self.unset = about, examples, unset


def _parsed(kind: Kind, value: object) -> Any:
    assert kind.parse is not None
    return kind.parse(value)


def _positive(kind: Kind) -> Kind:
    def parse(value: object) -> Any:
        number = _parsed(kind, value)
        if number <= 0:
            raise WrongValueError("must be more than 0")
        return number

    return replace(kind, words=kind.words.removesuffix(" or 0"), parse=parse)


def _or(kind: Kind, word: str) -> Kind:
    """Let a word stand for `None`."""
    form = kind.schema or {}
    return replace(
        kind,
        words=f"{kind.words}{',' if ',' in kind.words else ''} or `{word}`",
        parse=lambda value: None if value == word else _parsed(kind, value),
        show=lambda value: word if value is None else kind.show(value) if kind.show else value,
        schema={"anyOf": [*form.get("anyOf", [form]), {"const": word}]},
    )


_MAX_DEVICES = 1024


def _count(value: object, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongValueError(f"must be {what}, not {shown(value)}")
    if not least <= value <= _MAX_DEVICES:
        raise WrongValueError(f"must be between {least} and {_MAX_DEVICES}, not {shown(value)}")
    return value


def _gpus(value: object) -> int | tuple[int, ...]:
    if not isinstance(value, list):
        return _count(value, "a count, a list of indices, or `auto`", 0)
    indices = tuple(_count(item, "a list of device indices", 0) for item in value)
    if not indices:
        raise WrongValueError("an empty list of devices", "write `gpus: 0` for none")
    if len(set(indices)) < len(indices):
        raise WrongValueError("lists a device twice")
    return indices


def _port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongValueError(f"must be a port or `auto`, not {shown(value)}")
    if not 1 <= value <= 65535:
        raise WrongValueError("must be a port from 1 to 65535")
    return value


def _command(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and "\r" in value:
        raise WrongValueError("has the line ends of Windows, at which bash fails", "take the `\\r` out of the text")
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and None in value:
        # What could not be filled in has been told already.
        return ()
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise WrongValueError("must be a shell command, or a list of program and arguments")


def _interpreter(value: object) -> object:
    """Refuse what only a shell could run, and folders."""
    words_of_value = value.split() if isinstance(value, str) else []
    if any("/" not in word for word in words_of_value[1:]) or words_of_value[:1] in (["source"], ["."]):
        hint = "name its interpreter, such as `.venv/bin/python`; `job.command` runs a command"
        raise WrongValueError(f"{shown(value)} is a command, not the path of one program", hint)
    if isinstance(value, str) and value.endswith("/"):
        hint = f"name the interpreter in it: `{value}bin/python`"
        raise WrongValueError(f"{shown(value)} is a folder", hint)
    return value


def reached(of: type[Enum]) -> Kind:
    """Make the kind of a transport: a word of `of`, or a command as a list of its words."""
    by_word = {word.value: word for word in of}

    def parse(value: object) -> Any:
        if isinstance(value, str) and value in by_word:
            return by_word[value]
        if isinstance(value, dict) and [*value] == ["command"]:
            return words.command(value["command"])
        raise WrongValueError(
            f"must be {', '.join(f'`{word}`' for word in by_word)} or a mapping with the key `command`", COMMAND_HINT
        )

    argv = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    keyed = {"type": "object", "properties": {"command": argv}, "required": ["command"], "additionalProperties": False}
    return Kind(
        words=", ".join(f"`{word}`" for word in by_word) + " or `command:` with a list",
        parse=parse,
        show=lambda value: {"command": [*value]} if isinstance(value, tuple) else value.value,
        schema={"anyOf": [{"enum": [*by_word]}, keyed]},
    )


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": _MAX_DEVICES}
_SCALAR: dict[str, Any] = {"type": ["string", "number", "boolean"]}
_CAUSES = ("crash", "stall", "node_lost", "unhealthy")
_A_PORT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}


def _one_or_many(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [item, {"type": "array", "items": item}]}


def _quantity(word: str, number: str, pattern: str, parse: Check, show: Callable[[Any], str]) -> Kind:
    forms = [{"type": number, "minimum": 0}, {"type": "string", "pattern": pattern}]
    return Kind(words=f"{word} or 0", parse=parse, show=show, schema={"anyOf": forms})


_DURATION = _quantity("duration", "number", units.DURATION_PATTERN, units.duration, units.format_duration)
_SIZE = _quantity("size", "integer", units.SIZE_PATTERN, units.size, units.format_size)
_INDICES: dict[str, Any] = {"type": "array", "minItems": 1, "uniqueItems": True, "items": _COUNT}
_GPUS = Kind(words="count, list of indices", parse=_gpus, show=_listed, schema={"anyOf": [_COUNT, _INDICES]})
_WORKERS = Kind(
    words="count", parse=lambda value: _count(value, "a count or `auto`", 1), schema=_COUNT | {"minimum": 1}
)

Duration = Annotated[float, _DURATION]
PositiveDuration = Annotated[float, _positive(_DURATION)]
DurationOrNone = Annotated[float | None, _or(_positive(_DURATION), "none")]
DurationOrAuto = Annotated[float | None, _or(_positive(_DURATION), "auto")]
Size = Annotated[int, _positive(_SIZE)]
SizeOrZero = Annotated[int, _SIZE]
SizeOrNone = Annotated[int | None, _or(_positive(_SIZE), "none")]
Port = Annotated[int, Kind(limits=(1, 65535))]
PortOrAuto = Annotated[int | None, _or(Kind(words="port", parse=_port, schema=_A_PORT), "auto")]
Gpus = Annotated[int | tuple[int, ...] | None, _or(_GPUS, "auto")]
Workers = Annotated[int | None, _or(_WORKERS, "auto")]
Interface = Annotated[
    str | None,
    Kind(
        words="name or `auto`",
        after=lambda name: None if name == "auto" else name,
        show=lambda name: name or "auto",
    ),
]
Connections = Annotated[int, Kind(limits=(1, 1024))]
Restarts = Annotated[int, Kind(limits=(0, 1000))]
ExitCodes = tuple[Annotated[int, Kind(limits=(0, 255))], ...]
Texts = Annotated[
    tuple[str, ...], Kind(words="text or list of texts", before=_as_list, schema=_one_or_many({"type": "string"}))
]
Args = Annotated[tuple[str, ...], Kind(words="list", schema={"type": "array", "items": _SCALAR}, as_written=True)]
Env = Annotated[
    dict[str, str],
    Kind(words="mapping", schema={"type": "object", "additionalProperties": _SCALAR}, as_written=True),
]
Command = Annotated[
    str | tuple[str, ...] | None,
    Kind(
        words="text or list",
        parse=_command,
        show=_listed,
        schema={"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _SCALAR}]},
        as_written=True,
    ),
]
Causes = Annotated[
    tuple[Annotated[str, Kind(choices=_CAUSES)], ...],
    Kind(before=_as_list, schema=_one_or_many({"enum": [*_CAUSES]})),
]
StopSignal = Annotated[str, Kind(choices=("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"))]
Weights = dict[str, Annotated[str, Kind(choices=("fail", "warn", "ignore"))]]
Interpreter = Annotated[str, Kind(before=_interpreter)]
SshWord = Annotated[str, Kind(before=words.argument)]
SshUser = Annotated[str, Kind(before=words.user)]
SshHops = Annotated[str, Kind(words="hosts, with `,` between", before=words.hops)]
SshFile = Annotated[str, Kind(words="file", before=words.path)]
SshFiles = Annotated[
    tuple[SshFile, ...], Kind(words="file or list of files", before=_as_list, schema=_one_or_many({"type": "string"}))
]
