"""What `typing` has in newer versions of Python, without what it costs every command to import `typing_extensions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import assert_never, override
else:

    def assert_never(value):
        """Say that this place cannot be reached, as type checkers have made sure."""
        raise AssertionError(f"nothing was expected here, and it is {value!r}")

    def override(method):
        """Mark a method that takes the place of one of its base."""
        return method


__all__ = ["assert_never", "override"]
