"""What pydantic checks a section by, and what the JSON Schema is made of.

A key that is left out keeps its default, so there are none here. Short forms are made long before validation
(`clusterctl.config.sections.normal`), so that one mistake gives one message.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)
from typing_extensions import NotRequired, TypedDict

from clusterctl.config.sections.declared import Declared, Section, apart

if TYPE_CHECKING:
    from clusterctl.config.field_types import FieldType

# Unknown keys are mistakes, and `"8"` is not a number.
_CONFIG = ConfigDict(extra="forbid", strict=True)


@cache
def model_of(section: Section) -> TypeAdapter[dict[str, Any]]:
    """Make what checks a section. A file without it never pays for that: half of the time to start."""
    return TypeAdapter(_mapping(section))


@cache
def _mapping(section: Section) -> Any:
    # Mypy knows mappings alone that stand in the source.
    typed_dict: Any = TypedDict
    made = typed_dict(section.title, {name: _key(key) for name, key in section.keys.items()})
    made.__doc__, made.__pydantic_config__ = section.summary, _CONFIG
    return made


def _key(key: Declared) -> Any:
    told = Field(description=key.description, examples=list(key.key.examples))
    checked: Any = Annotated[_checked(key.type, key.kind), told]
    return checked if key.required else NotRequired[checked]


def _checked(of: Any, kind: FieldType) -> Any:
    checked = _typed(of, kind) if kind.parse is None else Annotated[Any, PlainValidator(kind.parse)]
    if kind.before is not None:
        checked = Annotated[checked, BeforeValidator(kind.before)]
    if kind.after is not None:
        checked = Annotated[checked, AfterValidator(kind.after)]
    return checked if kind.schema is None else Annotated[checked, WithJsonSchema(kind.schema)]


def _typed(of: Any, kind: FieldType) -> Any:
    """Say in pydantic's terms what is written for a type of the spec, and how that becomes one."""
    if isinstance(of, Section):
        return Annotated[_mapping(of), AfterValidator(lambda values: of.spec(**values))]
    if kind.choices:
        return Literal[kind.choices]
    if kind.limits is not None:
        return Annotated[int, Field(ge=kind.limits[0], le=kind.limits[1])]
    if isinstance(of, type) and issubclass(of, Enum):
        return Annotated[Literal[tuple(word.value for word in of)], AfterValidator(of)]
    if get_origin(of) is tuple:
        return Annotated[list[_checked(*apart(get_args(of)[0]))], AfterValidator(_as_tuple)]  # type: ignore[misc]
    if get_origin(of) is dict:
        return dict[str, _checked(*apart(get_args(of)[1]))]  # type: ignore[misc]
    return of


def _as_tuple(items: list[Any]) -> tuple[Any, ...]:
    # Pydantic looks at the signature of what it calls: that of `tuple` itself costs 5 ms.
    return tuple(items)
