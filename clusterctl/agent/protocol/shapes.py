"""What a value from elsewhere may be: types with bounds. A shape takes a value, and raises where it does not fit.

Standard library only, and little of it: a node looks at what its workers say with the same shapes with which the head
looks at what nodes say.
"""

from __future__ import annotations

from clusterctl.agent.protocol.frames import FrameError

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Callable

    Shape = Callable[[Any], None]

MOST_EXACT = 1 << 53
"""The first whole number that other readers of JSON may take for another one."""
_SHOWN = 40
_WITHOUT_NULL: dict[Shape, Shape] = {}
"""What `maybe` was made of, for records, which see to null themselves: most fields of a sample may be null."""


class MisfitError(FrameError):
    """A value is not what it must be.

    Attributes:
        place: Of the value in what holds it, such as `ranks.3.pid`; "" for the whole.
    """

    def __init__(self, wanted: str, value: object, place: str = "") -> None:
        super().__init__(wanted, value, place)
        self.place, self._wanted, self._value = place, wanted, value

    def __str__(self) -> str:  # type: ignore[explicit-override]  # the mark would have to be imported
        # Where one of several shapes may fit, most are raised for nothing.
        return f"{self.place or 'it'} is {_shown(self._value)}, and must be {self._wanted}"

    def below(self, name: object) -> MisfitError:
        """Return the same for what holds the value under `name`."""
        place = f"{str(name)[:_SHOWN]}.{self.place}" if self.place else str(name)[:_SHOWN]
        return MisfitError(self._wanted, self._value, place)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return ascii(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def whole(low: int = 0, high: int = MOST_EXACT - 1) -> Shape:
    """A whole number from `low` to `high`."""
    wanted = f"a whole number from {low} to {high}"

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise MisfitError(wanted, value)

    return check


def real(low: float = -1e15, high: float = 1e15) -> Shape:
    """A finite number from `low` to `high`."""
    wanted = f"a number from {low:g} to {high:g}"

    def check(value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high:
            raise MisfitError(wanted, value)

    return check


def text(most: int) -> Shape:
    """Text of at most so many characters."""
    wanted = f"text of at most {most} characters"

    def check(value: Any) -> None:
        if not isinstance(value, str) or len(value) > most:
            raise MisfitError(wanted, value)

    return check


def flag(value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise MisfitError("true or false", value)


def maybe(shape: Shape) -> Shape:
    """The shape, or null."""

    def check(value: Any) -> None:
        if value is not None:
            shape(value)

    _WITHOUT_NULL[check] = shape
    return check


def either(*shapes: Shape) -> Shape:
    """One of several shapes; what is wrong is said in the words of the last."""

    def check(value: Any) -> None:
        for shape in shapes[:-1]:
            try:
                shape(value)
            except MisfitError:
                continue
            return
        shapes[-1](value)

    return check


def many(shape: Shape, most: int) -> Shape:
    """A list of at most so many."""
    wanted = f"a list of at most {most}"

    def check(value: Any) -> None:
        if not isinstance(value, list) or len(value) > most:
            raise MisfitError(wanted, value)
        for place, item in enumerate(value):
            try:
                shape(item)
            except MisfitError as error:
                raise error.below(place) from None

    return check


def row(*shapes: Shape) -> Shape:
    """A list with one value of each shape, in this order."""
    wanted = f"a list of {len(shapes)}"

    def check(value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(shapes):
            raise MisfitError(wanted, value)
        for place, (shape, item) in enumerate(zip(shapes, value)):
            try:
                shape(item)
            except MisfitError as error:
                raise error.below(place) from None

    return check


def table(key: Shape, shape: Shape, most: int) -> Shape:
    """An object with at most so many names, all of one shape."""
    wanted = f"an object with at most {most} names"

    def check(value: Any) -> None:
        if not isinstance(value, dict) or len(value) > most:
            raise MisfitError(wanted, value)
        for name, item in value.items():
            try:
                key(name)
                shape(item)
            except MisfitError as error:
                raise error.below(name) from None

    return check


def record(needed: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """An object with these fields; others are ignored, so that either side can gain some."""
    allowed = {**needed, **(optional or {})}
    may_be_null = frozenset(name for name, shape in allowed.items() if shape in _WITHOUT_NULL)
    shape_of = {name: _WITHOUT_NULL.get(shape, shape) for name, shape in allowed.items()}.get

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            raise MisfitError("an object", value)
        for name in needed:
            if name not in value:
                raise MisfitError(f"an object with `{name}`", value)
        for name, item in value.items():
            shape = shape_of(name)
            if shape is None or (item is None and name in may_be_null):
                continue
            try:
                shape(item)
            except MisfitError as error:
                raise error.below(name) from None

    return check


def loose(depth: int, most: int, longest: int) -> Shape:
    """Anything of JSON with finite numbers: so many levels, names or items a level, characters a text."""
    number, words = either(flag, whole(-(1 << 64), 1 << 64), real(-1e300, 1e300)), text(longest)

    def at(level: int) -> Shape:
        if level == 0:
            return maybe(either(number, words))
        inner = at(level - 1)
        lists, objects = many(inner, most), table(text(longest), inner, most)

        def check(value: Any) -> None:
            if isinstance(value, str):
                words(value)
            elif isinstance(value, dict):
                objects(value)
            elif isinstance(value, list):
                lists(value)
            elif value is not None:
                number(value)

        return check

    return at(depth)


def number_text(most_digits: int = 9) -> Shape:
    """Text that is a whole number in decimal digits, as JSON's names of ranks are."""
    wanted = f"a number of at most {most_digits} digits"

    def check(value: Any) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= most_digits or not (value.isascii() and value.isdigit()):
            raise MisfitError(wanted, value)

    return check
