"""The secrets of a run, stored for later attempts on a tmpfs (0600) until the run ends, and never on a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import command_messages

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.run_requests import StartArguments

_NAMES_FILE = "secrets.names"
"""Name of the file in the run directory with the names of the secrets."""


def store_or_restore_secrets(run: RunDir, start: StartArguments, report: Callable[[str], None]) -> StartArguments:
    """Store the secrets of a start request. Return the request; if it has no secrets, add the stored ones.

    Args:
        run: The run.
        start: The start request, with or without secrets.
        report: Called with a text if the secrets cannot be stored, for example because the tmpfs is full.

    Raises:
        RequestError: The request has no secrets, and the secrets of the run are not stored.
    """
    file = run.secrets_file()
    if start.secrets:
        if start.keep_secrets:
            with contextlib.suppress(OSError):
                syscalls.write_json(run.file_path(_NAMES_FILE), {"names": sorted(start.secrets)})
            try:
                if file is not None:
                    syscalls.write_json(file, start.secrets)
            except OSError as error:
                folder, consequence = os.path.dirname(file or ""), "a controller that adopts the run cannot restart it"
                report(f"cannot store the secrets in {folder}: {error.strerror}: {consequence}")
                # A later attempt must not use the secrets of an earlier attempt.
                remove_secrets(run)
        return start
    stored_names = syscalls.read_json(run.file_path(_NAMES_FILE)) if start.keep_secrets else None
    if stored_names is None:
        return start
    secrets = syscalls.read_json(file) if file is not None else None
    if secrets is None:
        raise command_messages.make_refused_error(
            f"the secrets of run {run.run} are not stored on this node: {', '.join(stored_names['names'])}",
            "only the first controller of the run knows them: start a new run",
        )
    return dataclasses.replace(start, secrets={str(k): str(v) for k, v in secrets.items()})


def remove_secrets(run: RunDir) -> None:
    """Remove the stored secrets of a run."""
    file = run.secrets_file()
    if file is not None:
        with contextlib.suppress(OSError):
            os.unlink(file)


def remove_tmpfs_files(run: RunDir, attempts: int) -> None:
    """Remove the secrets of a run and the status files of its first `attempts` attempts from the tmpfs."""
    remove_secrets(run)
    for number in range(attempts):
        shutil.rmtree(run.status_dir(number), ignore_errors=True)
    run.remove_tmpfs_dir()
