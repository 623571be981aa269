"""Derives validators from the declarations of messages: TypedDicts and dataclasses of `clusterctl.agent.protocol`."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from typing_extensions import NotRequired, Required, get_type_hints, is_typeddict

from clusterctl.agent.protocol import record_types, validators, wire_types

if TYPE_CHECKING:
    from clusterctl.agent.protocol.validators import Validator

_NAMES = {"wire_types": wire_types, **vars(record_types)}
"""The names that annotations of the dataclasses use. The modules of the dataclasses import these names for the type
checker only.
"""
_UNBOUNDED = {bool: validators.boolean, int: validators.integer(), float: validators.number()}
"""The validators of types that have a default bound."""


def derive_object_validator(*declarations: type) -> Validator:
    """Return the validator of a JSON object that has the fields of all declarations."""
    required: dict[str, Validator] = {}
    optional: dict[str, Validator] = {}
    for declaration in declarations:
        for name, annotation in get_type_hints(declaration, localns=_NAMES, include_extras=True).items():
            if name != "KIND":
                (required if _is_required(declaration, name) else optional)[name] = derive_validator(annotation)
    return validators.object_of(required, optional)


def _is_required(declaration: Any, name: str) -> bool:
    if is_typeddict(declaration):
        return name in declaration.__required_keys__
    (field,) = (field for field in dataclasses.fields(declaration) if field.name == name)
    return field.default is field.default_factory is dataclasses.MISSING


@cache
def derive_validator(annotation: Any, max_items: int = 0) -> Validator:
    """Return the validator of a type. An annotation must limit each text, list and mapping.

    Raises:
        TypeError: The type has no bound, or no rule exists for this type.
    """
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Required, NotRequired):
        return derive_validator(parts[0])
    if kind is Annotated:
        bound = parts[1]
        return derive_validator(parts[0], bound) if isinstance(bound, validators.MaxItems) else bound
    if kind in (Union, types.UnionType) and len(parts) == 2 and parts[1] is types.NoneType:
        return validators.optional(derive_validator(parts[0]))
    if kind is tuple:
        return validators.tuple_of(*map(derive_validator, parts))
    if kind is list and max_items:
        return validators.list_of(derive_validator(parts[0]), max_items)
    if kind is dict and max_items:
        return validators.mapping_of(derive_validator(parts[0]), derive_validator(parts[1]), max_items)
    if annotation in _UNBOUNDED:
        return _UNBOUNDED[annotation]
    if is_typeddict(annotation):
        return derive_object_validator(annotation)
    raise TypeError(f"no validator for {annotation}")
