"""Reaches nodes by a command of the user: its standard streams are those of a shell on the node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl import rlimits
from clusterctl.config import value_parsers
from clusterctl.errors import ConnectError
from clusterctl.transport.base import Progress, ignore_progress
from clusterctl.transport.local import LocalChannel, spawn

if TYPE_CHECKING:
    from clusterctl.config.spec import HostSpec


class CommandTransport:
    """Reaches nodes by the command in the cluster file."""

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> LocalChannel:
        """Start the command of `host` (see `Transport.open`)."""
        progress("starting")
        # The command must work from any folder, and for a controller that outlives the folder.
        process, ours, stderr = spawn(host.name, command_argv(host), folder="/")
        rlimits.restore_rlimits(process.pid)
        return LocalChannel(process, ours, stderr, relays=True)

    def close(self) -> None:
        """Channels share nothing."""


def command_argv(host: HostSpec) -> list[str]:
    """Return the command of a host with its placeholders filled in.

    Raises:
        ConnectError: A placeholder has no value for this host.
    """
    assert isinstance(host.transport, tuple), host.transport
    known = {"host": host.address or host.host, "user": host.user, "port": host.port}
    values = {name: str(value) for name, value in known.items() if value is not None}
    missing = [n for word in host.transport for n in value_parsers.find_placeholders(word) if n not in values]
    if missing:
        text = f"its command names `{{{missing[0]}}}`, and the file does not say it"
        raise ConnectError(host.name, text, hint=f"add `{missing[0]}:` to the host")
    # The cluster file was checked when it was read. Check again, because the result is executed.
    if not value_parsers.is_host_name(values["host"]) or not value_parsers.is_user_name(values.get("user", "x")):
        raise ConnectError(host.name, "its name, address or user cannot be put into a command")
    return [value_parsers.fill_placeholders(word, values) for word in host.transport]


def terminal_argv(host: HostSpec, script: str) -> list[str]:
    """Return the command of a host that runs a script on a terminal; the shell at its end gets the script.

    `srun` needs `--pty`; `docker`, `podman` and `kubectl` need `-t` with `-i`. Other commands pass our terminal on.
    """
    program, *words = command_argv(host)
    name = os.path.basename(program)
    if name == "srun":
        words = ["--pty", *words]
    elif name in ("docker", "podman", "kubectl"):
        words = ["-it" if word == "-i" else word for word in words]
    return [program, *words, script]
