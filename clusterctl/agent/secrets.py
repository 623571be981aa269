"""Secrets that a later attempt needs again: 0600 on a tmpfs, and only as long as the run lasts. Never on a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from clusterctl.agent import requests, system

if TYPE_CHECKING:
    from clusterctl.agent.protocol import Start
    from clusterctl.agent.rundir import RunDir

_NAMES = "secrets.names"
"""File in the directory of the run with the names of the secrets that its workers get."""


def recall(run: RunDir, start: Start) -> Start:
    """Keep the secrets of a start where a later attempt may need them; fill them in where this one brings none.

    Raises:
        RequestError: They were not kept, or are gone: a worker without them would not do what it is meant to.
    """
    place = run.secrets()
    if start.secrets:
        if start.keep_secrets:
            with contextlib.suppress(OSError):
                system.write_json(run.file(_NAMES), {"names": sorted(start.secrets)})
            if place is not None:
                system.write_json(place, start.secrets)
        return start
    wanted = system.read_json(run.file(_NAMES)) if start.keep_secrets else None
    if wanted is None:
        return start
    known = system.read_json(place) if place is not None else None
    if known is None:
        raise requests.refused(
            f"the secrets of run {run.run} are not kept on this node: {', '.join(wanted['names'])}",
            "only the controller that was given them can restart it: start the run anew",
        )
    return dataclasses.replace(start, secrets={str(k): str(v) for k, v in known.items()})


def forget(run: RunDir) -> None:
    """Remove them."""
    place = run.secrets()
    if place is not None:
        with contextlib.suppress(OSError):
            os.unlink(place)


def remove_folder(path: str) -> None:
    """Remove what workers left on the tmpfs."""
    shutil.rmtree(path, ignore_errors=True)
