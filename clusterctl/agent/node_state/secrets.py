"""Secrets for later attempts, stored on a tmpfs (0600) while the run lasts, and never on a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import command_messages

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.run_requests import StartArguments

_NAMES_FILE = "secrets.names"
"""File in the run directory with the names of the workers' secrets."""


def store_or_restore_secrets(run: RunDir, start: StartArguments, report: Callable[[str], None]) -> StartArguments:
    """Store the secrets of a start for later attempts; fill in the stored ones if the start brings none.

    Args:
        run: The run.
        start: The start, with or without secrets.
        report: Called with the reason and the consequence if the secrets cannot be stored: any user can fill the tmpfs.

    Raises:
        RequestError: The secrets were not stored, or are gone: workers must not start without them.
    """
    folder = run.secrets()
    if start.secrets:
        if start.keep_secrets:
            with contextlib.suppress(OSError):
                syscalls.write_json(run.file(_NAMES_FILE), {"names": sorted(start.secrets)})
            try:
                if folder is not None:
                    syscalls.write_json(folder, start.secrets)
            except OSError as error:
                report(f"{os.path.dirname(folder or '')}: {error.strerror}: {run_dir.SECRETS_NOT_KEPT}")
                # The secrets of an earlier attempt must not replace these.
                remove_secrets(run)
        return start
    listed = syscalls.read_json(run.file(_NAMES_FILE)) if start.keep_secrets else None
    if listed is None:
        return start
    secrets = syscalls.read_json(folder) if folder is not None else None
    if secrets is None:
        raise command_messages.make_refused_error(
            f"the secrets of run {run.run} are not kept on this node: {', '.join(listed['names'])}",
            "only the controller that was given them can restart it: start the run anew",
        )
    return dataclasses.replace(start, secrets={str(k): str(v) for k, v in secrets.items()})


def remove_secrets(run: RunDir) -> None:
    """Remove the stored secrets of a run."""
    folder = run.secrets()
    if folder is not None:
        with contextlib.suppress(OSError):
            os.unlink(folder)


def remove_tmpfs_files(run: RunDir, attempts: int) -> None:
    """Remove everything of a run from the tmpfs, for this number of attempts."""
    remove_secrets(run)
    for number in range(attempts):
        shutil.rmtree(run.status_dir(number), ignore_errors=True)
    run.remove_tmpfs_dir()
