"""Pydantic's models of the sections: what checks what people write, and what the JSON Schema is made of.

A key that is left out keeps its default, so the models hold none. Short forms are made long before validation
(`clusterctl.config.sections.normal`), so that one mistake gives one message.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
)

from clusterctl.config.sections.declared import Declared, Section, apart

if TYPE_CHECKING:
    from clusterctl.config.kinds import Kind

# Unknown keys are mistakes, and `"8"` is not a number.
_CONFIG = ConfigDict(extra="forbid", strict=True)


@cache
def model_of(section: Section) -> type[BaseModel]:
    """Make the model of a section. One that a file does not have is never made: that is half of the time to start."""
    fields = {name: (_checked(key.type, key.kind), _field(key)) for name, key in section.keys.items()}
    made: type[BaseModel] = create_model(section.title, __config__=_CONFIG, __doc__=section.about, **fields)  # type: ignore[call-overload]
    return made


def given(model: BaseModel) -> dict[str, Any]:
    """Take the values that were written; the rest is left to the spec's defaults."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def _field(key: Declared) -> Any:
    default = ... if key.required else None
    return Field(default=default, description=key.description, examples=list(key.key.examples))


def _checked(of: Any, kind: Kind) -> Any:
    checked = _typed(of, kind) if kind.parse is None else Annotated[Any, PlainValidator(kind.parse)]
    if kind.before is not None:
        checked = Annotated[checked, BeforeValidator(kind.before)]
    if kind.after is not None:
        checked = Annotated[checked, AfterValidator(kind.after)]
    return checked if kind.schema is None else Annotated[checked, WithJsonSchema(kind.schema)]


def _typed(of: Any, kind: Kind) -> Any:
    """Say in pydantic's terms what is written for a type of the spec, and how that becomes one."""
    if isinstance(of, Section):
        return Annotated[model_of(of), AfterValidator(lambda model: of.spec(**given(model)))]
    if kind.choices:
        return Literal[kind.choices]
    if kind.limits is not None:
        return Annotated[int, Field(ge=kind.limits[0], le=kind.limits[1])]
    if isinstance(of, type) and issubclass(of, Enum):
        return Annotated[Literal[tuple(word.value for word in of)], AfterValidator(of)]
    if get_origin(of) is tuple:
        return Annotated[list[_checked(*apart(get_args(of)[0]))], AfterValidator(tuple)]  # type: ignore[misc]
    if get_origin(of) is dict:
        return dict[str, _checked(*apart(get_args(of)[1]))]  # type: ignore[misc]
    return of
