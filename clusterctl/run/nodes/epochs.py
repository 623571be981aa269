"""Which controller the nodes of a run obey: asked of several, because one of them may be wrong."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterctl.run.nodes.fan_out import each
from clusterctl.session.errors import StaleEpochError
from clusterctl.session.requests import STATUS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.session.session import Session

_PATIENCE = 10.0
"""Seconds in which another controller, which comes to one node after the other, has been to a second one."""
_PAUSE = 0.5


def succeeded(run: str, witnesses: Mapping[str, Session], epoch: int) -> bool:
    """Return whether one of these nodes, by their names in the run, knows a controller after that of `epoch`."""
    until = time.monotonic() + _PATIENCE
    while witnesses:
        epochs, errors = each(dict(witnesses), lambda n, s: _epoch_of(run, n, s))
        if any(seen > epoch for seen in epochs.values()):
            return True
        if any(isinstance(error, StaleEpochError) for error in errors.values()):
            return True
        if not epochs or time.monotonic() > until:
            return False
        time.sleep(_PAUSE)
    return False


def _epoch_of(run: str, node: str, session: Session) -> int:
    told = STATUS.call(session, {"run": run, "node": node})
    return int(told["epoch"] or 0)


def highest_epoch(run: str, sessions: Mapping[str, Session]) -> int:
    """Return the highest epoch that any of the nodes knows of a run, by the node names that are the keys; 0 if none."""
    seen: dict[str, int]
    seen, _ = each(dict(sessions), lambda n, s: _epoch_of(run, n, s))
    return max(seen.values(), default=0)
