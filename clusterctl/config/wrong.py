"""Values that a check refuses, and how a message names them."""

from __future__ import annotations


class WrongValueError(ValueError):
    """A value that a check refuses, with a remedy."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def shown(value: object) -> str:
    """Name a value in a message."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"the text `{value if len(value) <= 40 else value[:37] + '...'}`"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    return "nothing" if value is None else f"`{value}`"
