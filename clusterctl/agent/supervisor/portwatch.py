"""Looking for somebody else on the ports that are held for the workers, until a worker of ours listens there.

That a port is bound keeps nobody out who listens on purpose: Linux lets any user bind beside it with SO_REUSEADDR, and
the first to listen has it. The ranks would then meet at his. The kernel says of every listener whose it is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.linux import ports

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOT = 0
_SHARE = 20
"""The time since the start is this many times the pause before the next look: soon there are few."""


class PortWatch:
    """The ports of one attempt on which no worker listens yet.

    Args:
        numbers: Which ports.
        ours: Return the users of all processes of the run; asked only where somebody else listens.
        root: Prefix of /proc.
    """

    def __init__(self, numbers: Iterable[int], ours: Callable[[], set[int | None]], root: str = "/") -> None:
        self._open = set(numbers)
        self._ours, self._root = ours, root
        self._since: float | None = None
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time for a look; the first call is the start."""
        self._since = now if self._since is None else self._since
        return bool(self._open) and now >= self._next

    def look(self, now: float) -> str | None:
        """Return who listens on one of the ports and is not of the run, or `None`.

        Root is nobody's intruder: it may do as it likes anyway, and starts containers for others.
        """
        self._next = now + (now - (now if self._since is None else self._since)) / _SHARE
        found = [(port, uid) for port, uid in ports.listeners(self._root) if port in self._open]
        self._open -= {port for port, uid in found if uid == os.getuid()}
        others = [(port, uid) for port, uid in found if uid not in (os.getuid(), _ROOT)]
        if not others:
            return None
        ours = self._ours()
        self._open -= {port for port, uid in others if uid in ours}
        return next((_say(port, uid) for port, uid in others if uid not in ours), None)


def _say(port: int, uid: int) -> str:
    return f"uid {uid} listens on port {port}, which is held for the workers; no process of the run is of that user"
