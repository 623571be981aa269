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
    """Open files by their path; the one that was used least recently is closed for another.

    Args:
        limit: How many may be open at once; default half of what this process may have. Sockets and journals need
            the rest.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = max(1, limit or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._open: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """Return a descriptor to read and write `path`, made with its folder if need be; good until the next call.

        Raises:
            OSError: It cannot be opened.
        """
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        self._keep(self._limit - 1)
        try:
            fd = _open(path)
        except OSError as error:
            if not is_short(error) or not self._open:
                raise
            self._keep(len(self._open) // 2)
            fd = _open(path)
        self._open[path] = fd
        return fd

    def close_where(self, over: Callable[[Path], bool]) -> None:
        """Close those that nothing more is written to."""
        for path in [path for path in self._open if over(path)]:
            os.close(self._open.pop(path))

    def close(self) -> None:
        """Close all of them."""
        self._keep(0)

    def _keep(self, count: int) -> None:
        while len(self._open) > count:
            os.close(self._open.popitem(last=False)[1])


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
