"""Objects that only one thread may change. With `CLUSTERCTL_DEBUG`, a change by another thread raises an error."""

from __future__ import annotations

import os
import threading
from typing import Any

from typing_extensions import override

DEBUG = os.environ.get("CLUSTERCTL_DEBUG", "") not in ("", "0")


class NotOwnerError(AssertionError):
    """A thread changes an object of another thread. This is a bug, and no code catches it."""


class ThreadOwned:
    """An object that one thread owns after `take_ownership`. Methods that change the object call `check_owner`."""

    _owner: int | None = None

    def take_ownership(self) -> None:
        """Make this thread the owner."""
        self._owner = threading.get_ident()

    def check_owner(self) -> None:
        """Check that this thread is the owner.

        Raises:
            NotOwnerError: Another thread is the owner, and `CLUSTERCTL_DEBUG` is set.
        """
        if DEBUG and self._owner not in (None, threading.get_ident()):
            raise NotOwnerError(f"{type(self).__name__} is changed by {threading.current_thread().name}")


class ThreadOwnedAttributes(ThreadOwned):
    """An object of one thread, whose attributes no other thread may set."""

    if DEBUG:

        @override
        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute if this thread is the owner."""
            self.check_owner()
            super().__setattr__(name, value)
