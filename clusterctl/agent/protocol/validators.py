"""Validators of received JSON values. A validator checks type and bounds, and may raise `ValidationError`.

This module needs the standard library only, because a node also validates the status files of its workers with this
module.
"""

from __future__ import annotations

from clusterctl.agent.protocol.frames import FrameError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Callable

    Validator = Callable[[Any], None]


class MaxItems(int):
    """In an annotation: the maximum number of items of a list, or of keys of a JSON object."""


FIRST_INEXACT_INTEGER = 1 << 53
"""The smallest positive integer that JSON readers with double precision cannot represent exactly."""
_MAX_SHOWN_CHARS = 40
_VALIDATOR_WITHOUT_NULL: dict[Validator, Validator] = {}
"""The inner validator of each validator that `optional` has made. `object_of` tests for null itself, because most
fields may be null.
"""


class ValidationError(FrameError):
    """A validator does not accept a value.

    Attributes:
        place: The path of the value, such as `ranks.3.pid`; "" for the whole value.
    """

    def __init__(self, expected: str, value: object, place: str = "") -> None:
        super().__init__(expected, value, place)
        self.place, self._expected, self._value = place, expected, value

    def __str__(self) -> str:  # type: ignore[explicit-override]  # the mark would have to be imported
        # The text is built only when it is read, because `any_of` raises and drops many such errors.
        return f"{self.place or 'it'} is {_describe_value(self._value)}, and must be {self._expected}"

    def add_place(self, name: object) -> ValidationError:
        """Return the same error with a longer path: `name` is the key or index of the value in its parent."""
        place = f"{str(name)[:_MAX_SHOWN_CHARS]}.{self.place}" if self.place else str(name)[:_MAX_SHOWN_CHARS]
        return ValidationError(self._expected, self._value, place)


def _describe_value(value: object) -> str:
    if isinstance(value, str):
        return ascii(value if len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "...")
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def integer(low: int = 0, high: int = FIRST_INEXACT_INTEGER - 1) -> Validator:
    """Return a validator of an integer from `low` to `high`."""
    expected = f"a whole number from {low} to {high}"

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValidationError(expected, value)

    return check


def number(low: float = -1e15, high: float = 1e15) -> Validator:
    """Return a validator of a finite number from `low` to `high`."""
    expected = f"a number from {low:g} to {high:g}"

    def check(value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValidationError(expected, value)

    return check


def string(max_chars: int) -> Validator:
    """Return a validator of a text of at most `max_chars` characters."""
    expected = f"text of at most {max_chars} characters"

    def check(value: Any) -> None:
        if not isinstance(value, str) or len(value) > max_chars:
            raise ValidationError(expected, value)

    return check


def boolean(value: Any) -> None:
    """Raise `ValidationError` if the value is not a boolean."""
    if not isinstance(value, bool):
        raise ValidationError("true or false", value)


def optional(validator: Validator) -> Validator:
    """Return a validator that accepts null and the values that `validator` accepts."""

    def check(value: Any) -> None:
        if value is not None:
            validator(value)

    _VALIDATOR_WITHOUT_NULL[check] = validator
    return check


def any_of(*validators: Validator) -> Validator:
    """Return a validator that accepts a value if one of `validators` does. The last validator makes the error."""

    def check(value: Any) -> None:
        for validator in validators[:-1]:
            try:
                validator(value)
            except ValidationError:
                continue
            return
        validators[-1](value)

    return check


def list_of(validator: Validator, max_items: int) -> Validator:
    """Return a validator of a list of at most `max_items` items, each of which `validator` accepts."""
    expected = f"a list of at most {max_items}"

    def check(value: Any) -> None:
        if not isinstance(value, list) or len(value) > max_items:
            raise ValidationError(expected, value)
        for place, item in enumerate(value):
            try:
                validator(item)
            except ValidationError as error:
                raise error.add_place(place) from None

    return check


def tuple_of(*validators: Validator) -> Validator:
    """Return a validator of a list with one value for each of `validators`, in this order."""
    expected = f"a list of {len(validators)}"

    def check(value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(validators):
            raise ValidationError(expected, value)
        for place, (validator, item) in enumerate(zip(validators, value)):
            try:
                validator(item)
            except ValidationError as error:
                raise error.add_place(place) from None

    return check


def mapping_of(key: Validator, validator: Validator, max_items: int) -> Validator:
    """Return a validator of a JSON object with at most `max_items` keys, whose values `validator` accepts."""
    expected = f"an object with at most {max_items} names"

    def check(value: Any) -> None:
        if not isinstance(value, dict) or len(value) > max_items:
            raise ValidationError(expected, value)
        for name, item in value.items():
            try:
                key(name)
                validator(item)
            except ValidationError as error:
                raise error.add_place(name) from None

    return check


def object_of(required: Mapping[str, Validator], optional: Mapping[str, Validator] | None = None) -> Validator:
    """Return a validator of a JSON object with these fields. The validator ignores other fields of the object."""
    allowed = {**required, **(optional or {})}
    may_be_null = frozenset(name for name, validator in allowed.items() if validator in _VALIDATOR_WITHOUT_NULL)
    shape_of = {name: _VALIDATOR_WITHOUT_NULL.get(validator, validator) for name, validator in allowed.items()}.get

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise ValidationError("an object", value)
        for name in required:
            if name not in value:
                raise ValidationError(f"an object with `{name}`", value)
        for name, item in value.items():
            validator = shape_of(name)
            if validator is None or (item is None and name in may_be_null):
                continue
            try:
                validator(item)
            except ValidationError as error:
                raise error.add_place(name) from None

    return check


def any_json(max_depth: int, max_items: int, max_chars: int) -> Validator:
    """Return a validator of any JSON with finite numbers and limited depth, items per level and characters per text."""
    scalar = any_of(boolean, integer(-(1 << 64), 1 << 64), number(-1e300, 1e300))
    words = string(max_chars)

    def at(level: int) -> Validator:
        if level == 0:
            return optional(any_of(scalar, words))
        inner = at(level - 1)
        lists, objects = list_of(inner, max_items), mapping_of(string(max_chars), inner, max_items)

        def check(value: Any) -> None:
            if isinstance(value, str):
                words(value)
            elif isinstance(value, dict):
                objects(value)
            elif isinstance(value, list):
                lists(value)
            elif value is not None:
                scalar(value)

        return check

    return at(max_depth)


def digits(max_digits: int = 9) -> Validator:
    """Return a validator of a text of decimal digits, such as a rank that is a JSON key."""
    expected = f"a number of at most {max_digits} digits"

    def check(value: Any) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= max_digits or not (value.isascii() and value.isdigit()):
            raise ValidationError(expected, value)

    return check


PID = integer(0, (1 << 31) - 1)
COUNT = integer(-(1 << 63), (1 << 63) - 1)
