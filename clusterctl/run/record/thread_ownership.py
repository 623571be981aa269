"""The rule of one owner: what a thread owns, no other thread changes. Checked where `CLUSTERCTL_DEBUG` is set."""

from __future__ import annotations

import os
import threading
from typing import Any

from typing_extensions import override

DEBUG = os.environ.get("CLUSTERCTL_DEBUG", "") not in ("", "0")


class NotOwnerError(AssertionError):
    """A thread changes what another one owns. A mistake of ours, which nothing catches."""


class ThreadOwned:
    """What one thread owns from `own` on; before that, whoever makes it does. Methods that change it call `check`."""

    _owner: int | None = None

    def take_ownership(self) -> None:
        """Make this thread the owner."""
        self._owner = threading.get_ident()

    def check(self) -> None:
        """Look that this thread is the owner.

        Raises:
            NotOwnerError: It is not, and `CLUSTERCTL_DEBUG` is set.
        """
        if DEBUG and self._owner not in (None, threading.get_ident()):
            raise NotOwnerError(f"{type(self).__name__} is changed by {threading.current_thread().name}")


class ThreadOwnedState(ThreadOwned):
    """What one thread owns with each of its attributes."""

    if DEBUG:

        @override
        def __setattr__(self, name: str, value: Any) -> None:
            """Change an attribute, if this thread may."""
            self.check()
            super().__setattr__(name, value)
