"""Secrets that a later attempt needs again: 0600 on a tmpfs, and only as long as the run lasts. Never on a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import request_errors

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.requests import Start

_NAMES_FILE = "secrets.names"
"""File in the directory of the run with the names of the secrets that its workers get."""


def store_or_restore_secrets(run: RunDir, start: Start, tell: Callable[[str], None]) -> Start:
    """Keep the secrets of a start where a later attempt may need them; fill them in where this one brings none.

    Args:
        run: Whose secrets.
        start: What brings them, or lacks them.
        tell: Is told why they cannot be kept, and what follows: anybody can fill the memory that all users share.

    Raises:
        RequestError: They were not kept, or are gone: a worker without them would not do what it is meant to.
    """
    folder = run.secrets()
    if start.secrets:
        if start.keep_secrets:
            with contextlib.suppress(OSError):
                syscalls.write_json(run.file(_NAMES_FILE), {"names": sorted(start.secrets)})
            if folder is not None:
                _write_secrets(folder, start.secrets, tell)
        return start
    listed = syscalls.read_json(run.file(_NAMES_FILE)) if start.keep_secrets else None
    if listed is None:
        return start
    secrets = syscalls.read_json(folder) if folder is not None else None
    if secrets is None:
        raise request_errors.make_refused_error(
            f"the secrets of run {run.run} are not kept on this node: {', '.join(listed['names'])}",
            "only the controller that was given them can restart it: start the run anew",
        )
    return dataclasses.replace(start, secrets={str(k): str(v) for k, v in secrets.items()})


def _write_secrets(folder: str, secrets: dict[str, str], tell: Callable[[str], None]) -> None:
    try:
        syscalls.write_json(folder, secrets)
    except OSError as error:
        tell(f"{os.path.dirname(folder)}: {error.strerror}: {run_dir.SECRETS_NOT_KEPT}")
        # Those of an earlier attempt are no stand-in for these.
        with contextlib.suppress(OSError):
            os.unlink(folder)


def remove_secrets(run: RunDir) -> None:
    """Remove them."""
    folder = run.secrets()
    if folder is not None:
        with contextlib.suppress(OSError):
            os.unlink(folder)


def remove_tmpfs_files(run: RunDir, attempts: int) -> None:
    """Remove all that a run has on the tmpfs, where it had so many attempts."""
    remove_secrets(run)
    for number in range(attempts):
        remove_status_dir(run.status_dir(number))
    run.remove_tmpfs_dir()


def remove_status_dir(path: str) -> None:
    """Remove what workers left on the tmpfs."""
    shutil.rmtree(path, ignore_errors=True)
