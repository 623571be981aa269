"""A spec as JSON in the run directory, so that an adopting controller knows what the run was started with.

Every command that asks something of a run's nodes reads it, so it is read by the types of the spec alone: importing
what checks cluster files would take longer than the rest of such a command.
"""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from clusterctl.config.spec import ClusterSpec


def dump(spec: ClusterSpec) -> str:
    """Write a spec as one line of JSON; names of secrets are kept, their values are empty."""
    public = dataclasses.replace(spec, secrets=dict.fromkeys(spec.secrets, ""))
    return json.dumps(_written(public), separators=(",", ":"))


def load_stored(text: str) -> ClusterSpec:
    """Read what `dump` wrote, or the `dump` of an earlier version: what is not there has its default.

    Raises:
        ValueError: The text is something else.
    """
    try:
        spec: ClusterSpec = _read(ClusterSpec, json.loads(text), "spec")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return spec


def _written(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _written(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _written(part) for key, part in value.items()}
    return [_written(part) for part in value] if isinstance(value, (tuple, list)) else value


@cache
def _fields(of: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a class, and whether it has to be there."""
    hints, missing = get_type_hints(of), dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(of)
    }


def _read(of: Any, value: Any, where: str) -> Any:
    """Return `value` of JSON as the type that it was written of.

    Raises:
        ValueError: It is none.
    """
    origin = get_origin(of)
    if origin is Annotated:
        return _read(of.__origin__, value, where)
    if origin in (Union, UnionType):
        return _either(get_args(of), value, where)
    if isinstance(value, dict) and dataclasses.is_dataclass(of):
        return _object(of, value, where)
    if isinstance(value, dict) and origin is dict:
        return {key: _read(get_args(of)[1], part, f"{where}.{key}") for key, part in value.items()}
    if isinstance(value, list) and origin is tuple:
        return tuple(_read(get_args(of)[0], part, where) for part in value)
    return _scalar(of, value, where)


def _object(of: Any, value: dict[str, Any], where: str) -> Any:
    fields = _fields(of)
    for name, (_, needed) in fields.items():
        if needed and name not in value:
            raise ValueError(f"{where}: `{name}` is missing")
    return of(
        **{name: _read(fields[name][0], part, f"{where}.{name}") for name, part in value.items() if name in fields}
    )


def _either(some: tuple[Any, ...], value: Any, where: str) -> Any:
    for of in some:
        try:
            return _read(of, value, where)
        except ValueError:
            continue
    raise _unfit(where, value)


def _scalar(of: Any, value: Any, where: str) -> Any:
    if of is Any or (of is NoneType and value is None) or (get_origin(of) is Literal and value in get_args(of)):
        return value
    if of in (str, int, bool, float) and type(value) is of:
        return value
    if of is float and type(value) is int:
        return float(value)
    if isinstance(of, type) and issubclass(of, Enum) and isinstance(value, str):
        return of(value)
    raise _unfit(where, value)


def _unfit(where: str, value: Any) -> ValueError:
    return ValueError(f"{where}: {str(value)[:40]!r} does not fit there")
