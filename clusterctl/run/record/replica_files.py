"""The files of replicas that are open: so many that others find room too, those in use before those that were."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from typing import TYPE_CHECKING

from clusterctl.run.record.disk import is_short

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class ReplicaFiles:
    """Open files by node and name; the one that was used least recently is closed for another.

    Args:
        place: Tells where the replica of a node's file lies; asked when it is opened, not with each piece.
        limit: How many may be open at once; default half of what this process may have. Sockets and journals need
            the rest.
    """

    def __init__(self, place: Callable[[str, str], Path], limit: int | None = None) -> None:
        self._place = place
        self._limit = max(1, limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: OrderedDict[tuple[str, str], int] = OrderedDict()

    def descriptor(self, node: str, file: str) -> int:
        """Return a descriptor to read and write a replica, made with its folder if need be; good until the next call.

        Raises:
            OSError: It cannot be opened.
        """
        key = node, file
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        path = self._place(node, file)
        self._keep(self._limit - 1)
        try:
            fd = _open(path)
        except OSError as error:
            if not is_short(error) or not self._open:
                raise
            self._keep(len(self._open) // 2)
            fd = _open(path)
        self._open[key] = fd
        return fd

    def close_where(self, over: Callable[[str, str], bool]) -> None:
        """Close those of which `over` says, by node and file, that nothing more is written to them."""
        for key in [key for key in self._open if over(*key)]:
            os.close(self._open.pop(key))

    def close(self) -> None:
        """Close all of them."""
        self._keep(0)

    def _keep(self, count: int) -> None:
        while len(self._open) > count:
            os.close(self._open.popitem(last=False)[1])


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
