"""Which commands of cluster files may be run on this head by those who only look: `clusterctl trust` keeps the list."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from clusterctl.config.sections import host_lists
from clusterctl.errors import RefusedError
from clusterctl.run.record import ownership
from clusterctl.run.record.disk_files import make_private_folder, write_atomically
from clusterctl.run.record.rundir import find_runs_root

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from clusterctl.config.spec import HostSpec

Argv = tuple[str, ...]


def _path() -> Path:
    return find_runs_root().parent / "commands.json"


def unknown(hosts: Iterable[HostSpec]) -> list[Argv]:
    """Return the commands that lead to these hosts and were not accepted, each once."""
    wanted = dict.fromkeys(host.transport for host in hosts if isinstance(host.transport, tuple))
    known = _accepted() if wanted else set()
    return [argv for argv in wanted if argv not in known and not host_lists.is_srun_command(argv)]


def refuse_unknown(hosts: Iterable[HostSpec]) -> None:
    """See that nothing of a file is run here that its user has not seen.

    Raises:
        RefusedError: A command was not accepted.
    """
    new = unknown(hosts)
    if new:
        text = f"the cluster file reaches hosts by a command that would be run on this machine: `{shlex.join(new[0])}`"
        raise RefusedError(text, hint="read it, then accept it with `clusterctl trust`")


def is_accepted(argv: Argv) -> bool:
    """Tell whether a command was accepted."""
    return argv in _accepted()


def accept(commands: Iterable[Argv]) -> None:
    """Accept commands, word for word."""
    make_private_folder(_path().parent)
    with ownership.lock_folder(_path().parent):
        write_atomically(_path(), json.dumps(sorted(map(list, _accepted() | set(commands)))).encode())


def _accepted() -> set[Argv]:
    try:
        listed = json.loads(_path().read_bytes())
    except (OSError, ValueError):
        return set()
    return {tuple(map(str, argv)) for argv in listed if isinstance(argv, list)} if isinstance(listed, list) else set()
