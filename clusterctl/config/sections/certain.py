"""What a section says where nothing about it can be wrong.

Most files are good, and importing pydantic takes longer than reading them. Only what is plainly of the right form is
taken here, as `clusterctl.config.sections.models` would take it; of anything
else that is to judge, which alone has words for mistakes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from clusterctl.config.sections.declared import Declared, Section, apart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.config.kinds import Kind

_EXACT = 2**53


class UncertainError(Exception):
    """Whether the value is good is for pydantic to say."""


def certain(section: Section, plain: object) -> dict[str, Any] | None:
    """Return what a section says, as the spec holds it; `None` where that is not certain."""
    try:
        return _mapping(section.keys, plain)
    except (UncertainError, ValueError):
        return None


def _mapping(keys: Mapping[str, Declared], value: object) -> dict[str, Any]:
    if type(value) is not dict or not value.keys() <= keys.keys():
        raise UncertainError
    if any(key.required and name not in value for name, key in keys.items()):
        raise UncertainError
    # In the order in which the keys are declared, as a model has them.
    return {name: _checked(key.type, key.kind, value[name]) for name, key in keys.items() if name in value}


def _checked(of: Any, kind: Kind, value: Any) -> Any:
    if kind.before is not None:
        value = kind.before(value)
    value = _typed(of, kind, value) if kind.parse is None else kind.parse(value)
    return value if kind.after is None else kind.after(value)


def _typed(of: Any, kind: Kind, value: Any) -> Any:
    if isinstance(of, Section):
        return of.spec(**_mapping(of.keys, value))
    if kind.choices:
        return _one_of(kind.choices, value)
    if kind.limits is not None:
        if type(value) is not int or not kind.limits[0] <= value <= kind.limits[1]:
            raise UncertainError
        return value
    if isinstance(of, type) and issubclass(of, Enum):
        return of(_one_of(tuple(word.value for word in of), value))
    if get_origin(of) is Literal:
        return _one_of(get_args(of), value)
    return _plain(of, value)


def _plain(of: Any, value: Any) -> Any:
    if get_origin(of) is tuple and type(value) is list:
        item, kind = apart(get_args(of)[0])
        return tuple(_checked(item, kind, part) for part in value)
    if get_origin(of) is dict and type(value) is dict:
        item, kind = apart(get_args(of)[1])
        return {_plain(str, key): _checked(item, kind, part) for key, part in value.items()}
    if of is str and type(value) is str:
        value.encode()  # What has no UTF-8 is no text for pydantic either: UnicodeEncodeError is a ValueError.
        return value
    if of is float and type(value) is int and -_EXACT <= value <= _EXACT:
        return float(value)
    if of is Any or (of in (int, float, bool) and type(value) is of):
        return value
    raise UncertainError


def _one_of(choices: tuple[Any, ...], value: object) -> Any:
    choice = next((word for word in choices if type(word) is type(value) and word == value), None)
    if choice is None:
        raise UncertainError
    return choice
