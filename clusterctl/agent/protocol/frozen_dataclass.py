"""`@frozen_dataclass(frozen=True)`: `dataclasses.dataclass(frozen=True)` without the import of `dataclasses`.

Every command on a node starts an agent. The import of `dataclasses` would take a third of the agent's start time. Use
`frozen_dataclass` for classes that every agent needs, and `dataclasses` for all others.
"""

from __future__ import annotations

__all__ = ["frozen_dataclass"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as frozen_dataclass
else:

    def frozen_dataclass(*, frozen):
        """Return the decorator; defaults of fields must be immutable values."""
        assert frozen, "use an ordinary class for mutable objects"
        return _add_methods


def _add_methods(cls: type) -> type:
    names = tuple(cls.__annotations__)
    defaults = {name: vars(cls)[name] for name in names if name in vars(cls)}

    def fill(self: object, *positional: object, **named: object) -> None:
        given = dict(zip(names, positional))
        twice = given.keys() & named.keys()
        given.update(named)
        missing = [name for name in names if name not in given and name not in defaults]
        if twice or missing or len(positional) > len(names) or given.keys() - set(names):
            raise TypeError(f"{cls.__name__} has the fields {', '.join(names)}")
        # This bypasses the `__setattr__` of the class, which refuses changes.
        vars(self).update(defaults)
        vars(self).update(given)

    def refuse(self: object, name: str, _value: object) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be changed")

    def equals(self: object, other: object) -> bool:
        return vars(self) == vars(other) if other.__class__ is cls else NotImplemented

    def digest(self: object) -> int:
        return hash(tuple(vars(self)[name] for name in names))

    def describe(self: object) -> str:
        return f"{cls.__name__}({', '.join(f'{name}={vars(self)[name]!r}' for name in names)})"

    methods = {"__init__": fill, "__setattr__": refuse, "__eq__": equals, "__hash__": digest, "__repr__": describe}
    for name, method in {**methods, "__match_args__": names}.items():
        setattr(cls, name, method)
    return cls
