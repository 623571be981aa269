"""Stores the commands that the user has accepted with `clusterctl trust`; runs accepted commands that list hosts."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from clusterctl.config.sections import hostfiles_and_slurm
from clusterctl.config.sections.hostfiles_and_slurm import HostListError
from clusterctl.config.spec import HostSpec
from clusterctl.errors import RefusedError
from clusterctl.run.record import lock_files
from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.record.rundir import find_runs_root

Argv = tuple[str, ...]

_LISTING_LIMIT_S = 30.0
_LISTING_LIMIT_BYTES = 1 << 20
_MAX_QUOTED_CHARS = 200


def _find_store_path() -> Path:
    return find_runs_root().parent / "commands.json"


def list_unaccepted_commands(hosts: Iterable[HostSpec]) -> list[Argv]:
    """Return, without duplicates, the commands that connect to these hosts and that the user has not accepted."""
    wanted = dict.fromkeys(host.transport for host in hosts if isinstance(host.transport, tuple))
    known = _load_accepted_commands() if wanted else set()
    return [argv for argv in wanted if argv not in known and not hostfiles_and_slurm.is_srun_command(argv)]


def refuse_unaccepted_commands(hosts: Iterable[HostSpec]) -> None:
    """Raise an error if the user has not accepted a command that connects to one of these hosts.

    Raises:
        RefusedError: The user has not accepted one of the commands.
    """
    new = list_unaccepted_commands(hosts)
    if new:
        text = (
            f"to reach hosts, the cluster file runs a command here that you have not accepted: `{shlex.join(new[0])}`"
        )
        raise RefusedError(text, hint="read it, then accept it with `clusterctl trust`")


def is_accepted_command(argv: Argv) -> bool:
    """Return whether the user has accepted a command."""
    return argv in _load_accepted_commands()


def accept_commands(trusted_commands: Iterable[Argv]) -> None:
    """Store commands as accepted. A command counts as accepted only if its words equal those of a stored command."""
    make_private_folder(_find_store_path().parent)
    with lock_files.lock_folder(_find_store_path().parent):
        write_atomically(
            _find_store_path(),
            json.dumps(sorted(map(list, _load_accepted_commands() | set(trusted_commands)))).encode(),
        )


def _load_accepted_commands() -> set[Argv]:
    try:
        listed = json.loads(_find_store_path().read_bytes())
    except (OSError, ValueError):
        return set()
    return {tuple(map(str, argv)) for argv in listed if isinstance(argv, list)} if isinstance(listed, list) else set()


def run_accepted_host_command(argv: tuple[str, ...]) -> str:
    """Run an accepted command that lists hosts, and return its output.

    Raises:
        RefusedError: The user has not accepted the command.
        HostListError: The command failed.
    """
    if not is_accepted_command(argv):
        text = f"to list hosts, the cluster file runs a command here that you have not accepted: `{shlex.join(argv)}`"
        raise RefusedError(text, hint="read it, then accept it with `clusterctl trust`")
    return run_host_command(argv)


def run_host_command(argv: tuple[str, ...]) -> str:
    """Run a command that lists hosts, without a shell, and return its output.

    Raises:
        HostListError: The command cannot be run, fails, takes longer than 30 s, or prints more than 1 MiB.
    """
    shown = f"`{shlex.join(argv)}`"
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LISTING_LIMIT_S, cwd="/", check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HostListError(f"{shown} does not end within {_LISTING_LIMIT_S:g}s") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HostListError(f"{shown} cannot be run: {reason}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[-_MAX_QUOTED_CHARS:] or "nothing"
        raise HostListError(f"{shown} ended with status {done.returncode}; it said: {said}")
    if len(done.stdout) > _LISTING_LIMIT_BYTES:
        raise HostListError(f"{shown} prints more than {_LISTING_LIMIT_BYTES >> 20} MiB")
    return done.stdout.decode("utf-8", "replace")
