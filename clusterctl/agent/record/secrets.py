"""Secrets that a later attempt needs again: 0600 on a tmpfs, and only as long as the run lasts. Never on a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import request_errors
from clusterctl.agent.record import rundir

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.protocol.requests import Start
    from clusterctl.agent.record.rundir import RunDir

_NAMES = "secrets.names"
"""File in the directory of the run with the names of the secrets that its workers get."""


def recall(run: RunDir, start: Start, tell: Callable[[str], None]) -> Start:
    """Keep the secrets of a start where a later attempt may need them; fill them in where this one brings none.

    Args:
        run: Whose secrets.
        start: What brings them, or lacks them.
        tell: Is told why they cannot be kept, and what follows: anybody can fill the memory that all users share.

    Raises:
        RequestError: They were not kept, or are gone: a worker without them would not do what it is meant to.
    """
    place = run.secrets()
    if start.secrets:
        if start.keep_secrets:
            with contextlib.suppress(OSError):
                syscalls.write_json(run.file(_NAMES), {"names": sorted(start.secrets)})
            if place is not None:
                _keep(place, start.secrets, tell)
        return start
    listed = syscalls.read_json(run.file(_NAMES)) if start.keep_secrets else None
    if listed is None:
        return start
    secrets = syscalls.read_json(place) if place is not None else None
    if secrets is None:
        raise request_errors.make_refused_error(
            f"the secrets of run {run.run} are not kept on this node: {', '.join(listed['names'])}",
            "only the controller that was given them can restart it: start the run anew",
        )
    return dataclasses.replace(start, secrets={str(k): str(v) for k, v in secrets.items()})


def _keep(place: str, secrets: dict[str, str], tell: Callable[[str], None]) -> None:
    try:
        syscalls.write_json(place, secrets)
    except OSError as error:
        tell(f"{os.path.dirname(place)}: {error.strerror}: {rundir.NOT_KEPT}")
        # Those of an earlier attempt are no stand-in for these.
        with contextlib.suppress(OSError):
            os.unlink(place)


def forget(run: RunDir) -> None:
    """Remove them."""
    place = run.secrets()
    if place is not None:
        with contextlib.suppress(OSError):
            os.unlink(place)


def leave_memory(run: RunDir, attempts: int) -> None:
    """Remove all that a run has on the tmpfs, where it had so many attempts."""
    forget(run)
    for number in range(attempts):
        remove_folder(run.status_dir(number))
    run.unmake_memory()


def remove_folder(path: str) -> None:
    """Remove what workers left on the tmpfs."""
    shutil.rmtree(path, ignore_errors=True)
